"""What a reader of the rendered response does not see, or sees denied: code, comments, struck-out text, retractions."""

import re
from bisect import bisect_right

from reward.answer.prose import CONDITION, RETRACTION

_NEAR = 300  # characters before a statement in which a comment or a stroke may open: both end with their line
_AFTERWARDS = 2000  # characters behind the last statement that are searched for its retraction

_BLOCK = re.compile(r"^[ \t]*(```|~~~)[`~]*[^`~\n]*$.*?(?:^[ \t]*\1[`~]*[^\S\n]*$|\Z)", re.MULTILINE | re.DOTALL)
# A line before a statement: `% ...` from its beginning, or a percent sign right in front of the statement.
_COMMENT = re.compile(r"\s*%|.*\s%+\s*(?:the )?(?:final )?(?:answer\s*(?:is|:)?)?[\s$*]*$", re.IGNORECASE)
# `50 %`, `$50$ %`, `n % 5`: no comment.
_PERCENTAGE = re.compile(r"(?:\d|[)}\]]|(?<![A-Za-z\\])[A-Za-z])[\s$*_]*(?:\\[)\]])?\s*%[^%]*$")
_STROKE = re.compile(r"(?<![\w~])~~(?=[^\s~])|(?<=[^\s~])~~(?![\w~])")
STRUCK = re.compile(
    r"(?<![\w~])~~(?=[^\s~])[^~\n]{1,300}(?<=[^\s~])~~(?![\w~])|<(del|s|strike)>[^<>\n]{0,300}</\1>|<!--.{0,2000}?-->",
    re.DOTALL,
)
"""A passage of one line that is struck out, or a comment of HTML."""


def code_blocks(text: str) -> list[tuple[int, int]]:
    """Beginning and end of each block between fences, in order; one that is never closed goes on to the end."""
    if "`" not in text and "~" not in text:  # single characters are found ten times faster than fences
        return []
    return [block.span() for block in _BLOCK.finditer(text)]


def is_hidden(text: str, at: int, blocks: list[tuple[int, int]]) -> bool:
    """Whether what stands at `at` is in one of the code `blocks`, in a comment of LaTeX or HTML, or struck out."""
    if blocks and (before := bisect_right(blocks, (at, at))) and blocks[before - 1][1] > at:
        return True
    begin = max(text.rfind("\n", max(at - _NEAR, 0), at) + 1, at - _NEAR, 0)
    line = text[begin:at]
    if "%" in line and _COMMENT.match(line) and not _PERCENTAGE.search(line):
        return True
    if "~~" in line and len(_STROKE.findall(text[begin : at + 1])) % 2 and "~~" in text[at : at + _NEAR]:
        return True
    if any(line.lower().rfind(f"<{tag}>") > line.lower().rfind(f"</{tag}>") for tag in ("del", "strike")):
        return True
    return "<" in text and text.rfind("<!--", 0, at) > text.rfind("-->", 0, at)


def is_retracted(text: str, after: int) -> bool:
    """Whether the text behind the last statement takes it back: `Wait, that is wrong.`"""
    tail = text[after : after + _AFTERWARDS]
    if not tail or tail.isspace():
        return False
    return any(not CONDITION.search(tail, 0, found.start()) for found in RETRACTION.finditer(tail))
