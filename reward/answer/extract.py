"""Finding what a response states as its answer: the last `Answer:` line or the last box, with its rivals.

Linear in the length of the response: every search runs on native string functions, every look-around is bounded.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from reward.answer.compare import compare
from reward.answer.number import read_number
from reward.answer.read import read_raw
from reward.answer.text import ascii_lower, clean, closing, patterns

LINE_LIMIT = 5000
"""Characters of a statement that are read; what goes beyond is no answer."""

_PROSE, _AROUND = patterns("prose"), patterns("surroundings")
_NEAR = 300  # characters before a statement in which a comment or a stroke may open: both end with their line
_AFTERWARDS = 2000  # characters behind the last statement that are searched for its retraction

_ATTEMPTS = 64  # statements that are looked at, from the end of the response on
_RIVALS = 8  # statements that are looked at for a hedge

_BLOCKS = {"$$": "$$", "\\[": "\\]", "\\(": "\\)", "```": "```"}


@dataclass(frozen=True, slots=True)
class Statement:
    """What a response says its answer is."""

    text: str
    """The content of the box, or the line behind `Answer:` with its boxes opened. Not cleaned."""

    rivals: tuple[str, ...] = ()
    """Statements offered beside this one (`\\\\boxed{3} or \\\\boxed{4}`). A statement replaced later is no rival."""

    parts: tuple[str, ...] = ()
    """Boxes under names or numbers before this one (`x = 3` beside `y = 4`): a list, if one is asked for."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A statement and where it stands in the response: `text[start:end]`."""

    start: int
    end: int
    text: str
    is_line: bool


def last_statement(response: str, prompt: str = "", form: str = "") -> Statement | None:
    """The answer that `response` states last, None if it states none. With a `form`, `<answer>{answer}</answer>`, only
    what has that form is a statement; another line or box behind it takes it back.

    Where there is neither line nor box, a heading `### Answer` is as good as a marker for the line below it.
    A marker with nothing behind it, a box that is never closed, a line copied from the prompt, and what stands in code,
    in comments or struck out are passed over. A response that takes its last statement back states nothing.
    """
    found = _in_form(response, prompt, form) if form else _statements(response, prompt)
    last = next(found, None) or (None if form else _under_heading(response))
    if last is None or is_retracted(response, last.end, last.text):
        return None
    later = next(_statements(response, prompt), None) if form else None
    if later and later.start >= last.end and later.text.strip(" $.") != last.text.strip(" $."):
        return None
    more = response[last.end : last.end + _NEAR] if last.is_line else ""
    lines = (more and _AROUND["listed"].match(last.text + more)) or [""]
    *others, text = [*filter(str.strip, _AROUND["line_begin"].split(lines[0]))] or [last.text]
    rivals, parts = _rivals(response, last, found)
    text = _named(response, last) if parts else text
    return Statement(text=text, rivals=(*reversed(others), *rivals), parts=parts)


def _rivals(response: str, last: _Found, earlier: Iterator[_Found]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts offered on a par with the last statement; boxes with names of their own.

    On a par are statements joined by "or" and its like, boxes with nothing but punctuation between them, markers in
    one line, and `Answer:` lines that follow each other three times or more: that is a list, not a correction.
    """
    rivals, run, parts = list[str](), list[str](), list[str]()
    following = last
    for found in islice(earlier, _RIVALS):
        gap = _AROUND["typesetting"].sub(" ", response[found.end : following.start])
        lines, boxes = found.is_line and following.is_line, not (found.is_line or following.is_line)
        one_line = lines and not _AROUND["line_end"].search(response, found.start, following.start)
        bare = not _AROUND["content"].search(gap[:200])
        joined = len(gap) <= 60 and _PROSE["connective"].fullmatch(gap)
        if one_line or joined or (bare and boxes):
            rivals.append(found.text)
        elif boxes and len(gap) <= 60 and _PROSE["named"].fullmatch(gap):
            parts.append(_named(response, found))
        elif bare and lines:
            run.append(found.text)
        else:
            break
        following = found
    if len({text.strip() for text in run} | {last.text.strip()}) > 2:
        rivals += run
    return tuple(text for text in rivals if text.strip() != last.text.strip()), tuple(parts)


def _named(response: str, found: _Found) -> str:
    """`x = 3` of `x = \\boxed{3}`."""
    name = _AROUND["name"].search(response, max(found.start - 20, 0), found.start)
    return f"{name[1]} = {found.text}" if name else found.text


def _statements(response: str, prompt: str) -> Iterator[_Found]:
    """Statements from the last to the first, at most `_ATTEMPTS` of them."""
    lower = ascii_lower(response)
    end = marker = boxed = fbox = len(response.rstrip())
    blocks = code_blocks(response)
    for _ in range(_ATTEMPTS):
        # Each by itself: one that is nowhere would be looked for through the whole text every time.
        marker = marker if marker < end else _last_marker(lower, end)
        boxed = boxed if boxed < end else lower.rfind("\\boxed", 0, end)
        fbox = fbox if fbox < end else lower.rfind("\\fbox", 0, end)
        box = max(boxed, fbox)
        if marker < 0 and box < 0:
            return
        near = marker >= 0 and box - marker < LINE_LIMIT
        in_line = near and not _AROUND["line_end"].search(response, marker, max(box, marker))
        found = _line_statement(response, marker, marker + 6, end) if in_line else _enclosed(response, box, end)
        start = found.start if found is not None else max(marker, box)
        if found is not None and not _copied(response, start, prompt) and not is_hidden(response, start, blocks):
            yield found
        end = start


def _in_form(response: str, prompt: str, form: str) -> Iterator[_Found]:
    """What stands between the two texts around `{answer}`, or behind the first to the end of its line if the second is
    a full stop at most; from the last to the first, in any case of letters."""
    opening, _, closer = (part.strip(". \t\r\n") for part in ascii_lower(form).partition("{answer}"))
    lower, blocks = ascii_lower(response), code_blocks(response)
    at = end = len(response.rstrip())
    for _ in range(_ATTEMPTS):
        if (at := lower.rfind(opening, 0, at)) < 0:
            return
        begin, found = at + len(opening), None
        if not closer:
            found = _line_statement(response, at, begin, end)
            before = [lower[max(at - 40, 0) : stop] for stop in (at, begin)]
            if _PROSE["denied_marker"].search(before[0]) or any(map(_PROSE["denied_before"].search, before)):
                found = None
        elif (stop := _form_end(response, lower, opening, closer, begin, min(end, begin + LINE_LIMIT))) >= 0:
            content = _open_boxes(response[begin:stop].strip())
            # Between two equal marks may be the text between two answers.
            between = opening == closer and "\n" in content
            found = None if between else _enclosed(response, at, end, (content, stop + len(closer)))
        if found and not _copied(response, at, prompt) and not is_hidden(response, at, blocks):
            yield found
            end = at


def _form_end(response: str, lower: str, opening: str, closer: str, begin: int, limit: int) -> int:
    """Where the second text of a form begins; of a brace, `\\boxed{{answer}}`, the one that closes the first. -1: not
    there."""
    if opening.endswith("{") and closer.startswith("}"):
        after = closing(response, begin - 1, limit, _AROUND["braces"])
        return after - 1 if after > 0 and lower.startswith(closer, after - 1) else -1
    return lower.find(closer, begin, limit)


def _last_marker(lower: str, end: int) -> int:
    """Where the last `answer` with a colon begins before `end`, -1 if nowhere."""
    at = lower.rfind("answer", 0, end)
    while at >= 0:
        before = lower[max(at - 24, 0) : at]
        if _AROUND["marker_tail"].match(lower, at + 6, end) and not _PROSE["denied_marker"].search(before):
            return at
        at = lower.rfind("answer", 0, at)
    return at


def _under_heading(response: str) -> _Found | None:
    """The line or display below the last heading that says nothing but `Answer`."""
    headings = list(_AROUND["heading"].finditer(response)) if "#" in response or "**" in response else []
    if not headings or is_hidden(response, headings[-1].start(), code_blocks(response)):
        return None
    return _line_statement(response, headings[-1].start(), headings[-1].end(), len(response.rstrip()))


def _enclosed(response: str, at: int, end: int, opened: tuple[str, int] | None = None) -> _Found | None:
    """The content of the box at `at`, or of what is `opened` there; with its line if it is an operand, or denied by the
    sentence around it."""
    opened = opened or open_box(response, at, end)
    if opened is None or not _AROUND["content"].search(opened[0]):
        return None
    content, after = opened
    before, behind = response[max(at - 40, 0) : at], response[after : after + 40]
    operand = _AROUND["part_after"].match(behind) or _AROUND["part_before"].search(before)
    if not ((denied := _PROSE["denied_after"].match(behind)) or operand or _PROSE["denied_before"].search(before)):
        return _Found(at, after, content, False)
    begin = max(response.rfind("\n", max(at - LINE_LIMIT, 0), at) + 1, at - LINE_LIMIT, 0)
    stop = _line_end(response, after + (denied.end() if denied else 0), end)
    return _Found(at, after, f"{response[begin:at]} {content} {response[after:stop]}"[: LINE_LIMIT + 1], False)


def open_box(text: str, at: int, end: int) -> tuple[str, int] | None:
    """The content of the box that begins at `at` and the place behind it; None if it is not closed (a truncation)."""
    head = _AROUND["box"].match(text, at, end)
    if head is None:
        return None
    if head["bare"] is not None:
        return head["bare"], head.end()
    after = closing(text, head.end() - 1, min(end, head.end() + LINE_LIMIT), _AROUND["braces"])
    return (text[head.end() : after - 1], after) if after >= 0 else None


def _line_statement(response: str, marker: int, begin: int, end: int) -> _Found | None:
    """The rest of the line behind a marker or heading that ends at `begin`, or the next line or display with content.

    `begin` may also be where the word `answer` of the marker ends.
    """
    skipped = _AROUND["skipped"].match(response, begin, end)
    start = skipped.end() if skipped else begin
    stop = _line_end(response, _block_end(response, start, end), end)
    line = response[start:stop].rstrip()[: LINE_LIMIT + 1]
    return _Found(marker, stop, _open_boxes(line), True) if _AROUND["content"].search(line) else None


def _block_end(response: str, start: int, end: int) -> int:
    """Where the display, code block or environment that begins at `start` closes; `start` if none begins there."""
    limit = min(end, start + LINE_LIMIT)
    for opener, closer in _BLOCKS.items():
        if response.startswith(opener, start):
            return max(response.find(closer, start + len(opener), limit), start)
    if environment := _AROUND["environment"].match(response, start, limit):
        return max(response.find(f"\\end{{{environment[1]}}}", environment.end(), limit), start)
    return start


def _line_end(response: str, start: int, end: int) -> int:
    near = min(end, start + LINE_LIMIT + 1)
    if newline := _AROUND["line_end"].search(response, start, near):
        return newline.start()
    far = response.find("\n", near, end)  # nobody reads a line so long: where it ends need not be exact, only fast
    return far if far >= 0 else end


def _open_boxes(line: str) -> str:
    """The line with each closed box replaced by its content; of a box with only prose around it, the content alone."""
    pieces: list[str] = []
    at = 0
    for _ in range(_RIVALS + 1):
        box = _AROUND["box_name"].search(line, at)
        opened = open_box(line, box.start(), len(line)) if box else None
        if box is None or opened is None:
            break
        content, after = opened
        if not pieces and _commits(line[: box.start()], line[after:]):
            return content
        pieces += [line[at : box.start()], " ", content, " "]
        at = after
    return "".join(pieces) + line[at:]


def _commits(before: str, after: str) -> bool:
    """Whether a box between these texts is the answer by itself: no part of a formula, no other candidate beside it."""
    if "boxed" in after or "fbox" in after or _PROSE["doubt"].search(before) or _PROSE["doubt"].search(after):
        return False
    before, after = (_AROUND["delimiters"].sub(" ", text) for text in (before[-100:], after[:100]))
    return not _AROUND["formula_before"].search(before) and not _AROUND["formula_after"].match(after)


def _copied(response: str, at: int, prompt: str) -> bool:
    """Whether the line around `at` is, word for word, one that the prompt holds (and long enough to be no accident)."""
    begin = max(response.rfind("\n", 0, at), response.rfind("\r", 0, at)) + 1
    line = response[begin : min(_line_end(response, at, len(response)), begin + LINE_LIMIT)].strip(" \t\"'*`>#-")
    return len(line) >= 20 and line in prompt


def code_blocks(text: str) -> list[tuple[int, int]]:
    """Beginning and end of each block between fences, in order; one that is never closed goes on to the end."""
    # Single characters are found ten times faster than fences.
    return [block.span() for block in _AROUND["block"].finditer(text)] if "`" in text or "~" in text else []


def is_hidden(text: str, at: int, blocks: list[tuple[int, int]]) -> bool:
    """Whether what stands at `at` is in one of the code `blocks`, in a comment of LaTeX or HTML, or struck out."""
    if blocks and (before := bisect_right(blocks, (at, at))) and blocks[before - 1][1] > at:
        return True
    begin = max(text.rfind("\n", max(at - _NEAR, 0), at) + 1, at - _NEAR, 0)
    line = text[begin:at]
    if "%" in line and _AROUND["comment"].match(line) and not _AROUND["percentage"].search(line):
        return True
    if "~~" in line and len(_AROUND["stroke"].findall(text[begin : at + 1])) % 2 and "~~" in text[at : at + _NEAR]:
        return True
    # A thought that is never closed is one that was cut off.
    pairs = (("<!--", "-->", at), ("<del>", "</del>", at), ("<strike>", "</strike>", at), ("<think>", "</think>", None))
    return "<" in text and any(text.rfind(opener, 0, at) > text.rfind(closer, 0, end) for opener, closer, end in pairs)


def is_retracted(text: str, after: int, stated: str) -> bool:
    """Whether the text behind the last statement takes it back: `Wait, that is wrong.` `No, the answer is 43.`"""
    tail = text[after : after + _AFTERWARDS]

    def meant(kind: str) -> list[re.Match[str]]:
        return [each for each in _PROSE[kind].finditer(tail) if not _PROSE["condition"].search(tail, 0, each.start())]

    restated = meant("restated")
    denied = meant("retraction") or any(_same(found, stated) for found in meant("refuted"))
    return bool(denied) or (bool(restated) and not _same(restated[-1], stated))


def _same(found: re.Match[str], stated: str) -> bool:
    """Whether the number is the one that is stated, or one of those in an expression; whether the letter is that of the
    option, where one is stated; whether the formula has the same value."""
    stated = clean(stated)
    option = _AROUND["option"].match(stated)
    if found["letter"] or (option and option[0] == stated):
        return not (found["letter"] and option) or option[1] == found["letter"]
    if found["formula"]:
        return bool((compare(read_raw(found["formula"]), read_raw(stated)) or (False,))[0])
    number, whole = read_number(clean(found["number"])), read_number(stated)
    others = map(read_number, [] if whole else _AROUND["numerals"].findall(stated))
    return number is None or any(other is not None and number.value == other.value for other in (whole, *others))
