"""The commands that documents name, taken apart: program, subcommand, options, config keys."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.documents import blocks, inline_code

_SHELL = ("", "bash", "sh")
_END = {"|", "||", "&&", ";", "&", ">", ">>", "<"}
_PLACEHOLDER = re.compile(r"\[.*|.*\]|\.\.\.|[A-Z_]+(\.\w+)?")


@dataclass(frozen=True, kw_only=True)
class Command:
    """`python -m tools.x to-hf A --verify` is program `-m tools.x`, words `to-hf A`, options `--verify`."""

    program: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    """Without their values."""
    text: str

    @property
    def subcommand(self) -> str:
        """The first word, if it can be a subcommand's name; else empty."""
        return self.words[0] if self.words and re.fullmatch(r"[a-z][a-z-]*", self.words[0]) else ""


def commands_of(markdown: str) -> Iterator[Command]:
    """Those of `megatron-dapo`, `make` and `python`, in shell blocks and in inline code."""
    texts = [line for block in blocks(markdown) if block.info in _SHELL for line in _joined(block.body)]
    for text in [*texts, *inline_code(markdown)]:
        for words in _simple_commands(text):
            inner = next((at for at, word in enumerate(words) if at and word == "megatron-dapo"), len(words))
            for part in (
                words[:inner],
                words[inner:],
            ):  # a program that runs another one: `python x.py megatron-dapo ...`
                if command := _command(part, text):
                    yield command


def _joined(body: str) -> list[str]:
    """Lines, with those that end in a backslash and the next one as one."""
    return re.sub(r"\\\n\s*", " ", body).splitlines()


def _simple_commands(text: str) -> Iterator[list[str]]:
    try:
        lexer = shlex.shlex(text.replace("$'", "'"), posix=True, punctuation_chars="|;&<>")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return  # a quote that does not end: prose, not a command
    simple: list[str] = []
    for word in words:
        if word in _END:
            yield simple
            simple = []
        else:
            simple.append(word)
    yield simple


def _command(words: list[str], text: str) -> Command | None:
    while words and re.fullmatch(r"\w+=.*", words[0]):  # environment
        words = words[1:]
    if not words:
        return None
    program, rest = Path(words[0]).name, words[1:]
    if program == "python" and len(rest) >= 2 and rest[0] == "-m":
        program, rest = f"-m {rest[1]}", rest[2:]
    elif program == "python" and rest and rest[0].endswith(".py"):
        program, rest = rest[0], rest[1:]
    elif program not in ("megatron-dapo", "make"):
        return None
    options = tuple(word.split("=")[0] for word in rest if word.startswith("--") and len(word) > 2)
    plain = tuple(word for word in rest if not word.startswith("-") and not _PLACEHOLDER.fullmatch(word))
    return Command(program=program, words=plain, options=options, text=text)
