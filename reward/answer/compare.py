"""Whether two answers that were read are the same, decided without algebra; None where algebra has to decide."""

from reward.answer.interval import as_interval, is_interval
from reward.answer.read import Answer, read
from reward.answer.text import compact
from reward.messages import Rule


def compare(answer: Answer, truth: Answer) -> tuple[bool, Rule] | None:
    """(equal, rule), or None if neither numbers nor texts settle it.

    Numbers are equal only if exactly equal. A list where one answer was asked for is a hedge, unless all of its items
    are that answer. Order counts in `(a, b)` and `[a, b]`, not in `{a, b}` and `a, b`.
    """
    if answer.contradicts:
        return False, Rule.HEDGE
    if answer.number is not None and truth.number is not None:
        integers = answer.number.value.denominator == truth.number.value.denominator == 1
        equal = answer.number.equals(truth.number) and _names_agree(answer, truth)
        return equal, Rule.INTEGER if integers else Rule.NUMBER
    if _same_text(answer, truth):
        return True, Rule.TEXT
    answer, truth = _as_intervals(answer, truth)
    if truth.items:
        return _compare_lists(answer, truth)
    if answer.items:
        verdicts = [compare(item, truth) for item in answer.items]
        if not answer.brackets and all(verdict is not None and verdict[0] for verdict in verdicts):
            return True, Rule.LIST
        return False, Rule.HEDGE
    if answer.number is not None and "." in answer.body:
        return False, Rule.NUMBER  # a decimal is not an exact form: 1.414 is not \\sqrt{2}
    return None


def _as_intervals(answer: Answer, truth: Answer) -> tuple[Answer, Answer]:
    """Both as intervals where one is an interval and the other an inequality."""
    if _is_interval(truth) and not answer.items and (interval := as_interval(answer.text)):
        return read(interval), truth
    if _is_interval(answer) and not truth.items and (interval := as_interval(truth.text)):
        return answer, read(interval)
    return answer, truth


def _is_interval(answer: Answer) -> bool:
    return is_interval(len(answer.items), answer.brackets, answer.text)


def _same_text(answer: Answer, truth: Answer) -> bool:
    if not _names_agree(answer, truth):
        return False
    given, wanted = compact(answer.text), compact(truth.text)
    if given and (given == wanted or _bare(given) == _bare(wanted)):
        return True
    return bool(answer.name) and compact(answer.body) == wanted


def _bare(text: str) -> str:
    """`(B)` as `B`."""
    enclosed = len(text) > 2 and text[0] == "(" and text[-1] == ")" and text[1:-1].isalnum()
    return compact(text[1:-1]) if enclosed else text


def _names_agree(answer: Answer, truth: Answer) -> bool:
    """`y = 3` is not `x = 3`. A longer left side (`f(2) = 3`) is taken for a derivation, not for a name."""
    return not (len(answer.name) == len(truth.name) == 1) or answer.name == truth.name


def _compare_lists(answer: Answer, truth: Answer) -> tuple[bool, Rule] | None:
    if len(answer.items) != len(truth.items):
        # one item, or one equation that algebra may still recognise, against several
        return (False, Rule.LIST) if answer.items or answer.number is not None else None
    if answer.brackets and truth.brackets and answer.brackets != truth.brackets:
        return False, Rule.LIST
    if _is_interval(truth) and not answer.brackets:
        return False, Rule.LIST  # `0, 1` does not say which ends belong to it
    if truth.brackets == "{}" and answer.brackets not in ("", "{}"):
        return False, Rule.LIST
    names = {item.name for item in (*answer.items, *truth.items)}
    unordered = truth.brackets in ("", "{}") and answer.brackets in ("", "{}") and len(names - {""}) <= 1
    undecided = False
    remaining = list(answer.items)
    for wanted in truth.items:
        candidates = remaining if unordered else remaining[:1]
        verdicts = [compare(item, wanted) for item in candidates]
        match = next((i for i, verdict in enumerate(verdicts) if verdict is not None and verdict[0]), None)
        if match is None:
            if not any(verdict is None for verdict in verdicts):
                return False, Rule.LIST
            undecided = True
            match = verdicts.index(None)
        del remaining[match]
    return None if undecided else (True, Rule.LIST)
