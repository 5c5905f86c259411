"""What is wrong with the address of a service, before anybody waits for its answer."""

import ipaddress
import re
from urllib.parse import urlsplit

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def check_address(url: str) -> str:
    """The address itself. Raises ValueError: no request could ever be sent there."""
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("holds a space or a character that must be written as %XX")
    parts = urlsplit(url)  # a ValueError of its own for brackets that are not closed
    if parts.scheme not in ("http", "https"):
        raise ValueError("must begin with http:// or https://")
    _check_host(parts.hostname or "")
    port = parts.netloc.rpartition("@")[2].rpartition("]")[2].partition(":")[2]
    if port and not (port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise ValueError(f"port {port[:20]} must be a number from 1 to 65535")
    return url


def _check_host(host: str) -> None:
    if ":" in host or host.replace(".", "").isdigit():
        ipaddress.ip_address(host.partition("%")[0])  # its ValueError says what is wrong
        return
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"host {host[:80]!r} is no name of a machine")
