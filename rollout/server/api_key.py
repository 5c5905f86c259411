"""The API key that keeps other users of a machine or network away from a run's servers, in a file of its owner."""

import os
import secrets
from pathlib import Path

from rollout.errors import KeyFileError


class Secret(str):
    """A text whose repr is hidden: SGLang prints its settings when it starts."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def new_key(path: Path) -> None:
    """Write a fresh key to `path`, readable by its owner only; one that is there is replaced."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))


def read_key(path: Path) -> Secret:
    """The key in a file.

    Raises:
        KeyFileError: it is missing, empty, or others may read it too.
    """
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: no API key can be read there ({error})") from None
    if mode & 0o077:
        raise KeyFileError(f"{path}: others may read this API key; chmod 600 it")
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise KeyFileError(f"{path}: expected one API key: a line of ASCII text without spaces")
    return Secret(key)
