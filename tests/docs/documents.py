"""The Markdown files, and what stands in them."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of code."""

    info: str
    """What follows the opening fence: `python file=x.py`."""
    body: str

    @property
    def options(self) -> dict[str, str]:
        """`{"file": "x.py"}`"""
        return dict(word.split("=", 1) for word in self.info.split() if "=" in word)


def documents() -> list[Path]:
    """Every committed or committable Markdown file."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", "*.md"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return sorted(ROOT / name for name in names if name and (ROOT / name).is_file())


def blocks(text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        indent = found["indent"]
        body = "".join(line.removeprefix(indent) for line in found["body"].splitlines(keepends=True))
        yield Block(info=found["info"].strip(), body=body)


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", text)


def inline_code(text: str) -> list[str]:
    """`such` and `such` of the prose."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*#*$", prose(text), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.replace("`", "").lower()).replace(" ", "-")
        number = seen.get(slug, 0)
        seen[slug] = number + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found
