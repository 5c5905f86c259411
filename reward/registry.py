"""The table of verifiers: name -> where it is and how it is run. One outside the table is `module:function`: code of
the user's own, which a config may name in other places too."""

import importlib.util
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from reward.verdict import Judgement, LoadError, VerificationRequest, Verifier, VerifierError


def check_name(name: str, table: Collection[str]) -> str:
    """The name. Raises ValueError, with the nearest entry, if it is neither in the table nor `module:name` in form."""
    module, colon, item = name.partition(":")
    if name in table or (colon and item.isidentifier() and all(map(str.isidentifier, module.split(".")))):
        return name
    near = get_close_matches(name.lower(), table, n=1)
    raise ValueError(f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(table)}, or 'module:name'")


def load_named(path: str) -> Callable[..., Any]:
    """The function or class `module:name`; the working directory counts, last. Raises LoadError, whatever is wrong with
    the module."""
    module, _, item = path.partition(":")
    try:
        if module not in sys.modules and importlib.util.find_spec(module.partition(".")[0]) is None:
            sys.path.extend({""} - {*sys.path})
        found = vars(importlib.import_module(module)).get(item)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        hint = "; set PYTHONPATH to the folder of the module" if isinstance(error, ModuleNotFoundError) else ""
        raise LoadError(f"import of {module} failed: {type(error).__name__}: {error}{hint}") from error
    if not callable(found):
        raise LoadError(f"module {module} has no function or class {item}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where a verifier lives and what it asks of its surroundings."""

    path: str
    fast: bool = False
    """It takes linear time on any text and may share a batch with others."""
    second: str = ""
    """The other verifier that can judge the same responses, whose verdict is reported beside this one's."""
    probe: str = ""
    """What raises VerifierError where the system lacks what the verifier needs."""
    remote: bool = False
    """A service judges: `path` names none of our functions."""


VERIFIERS: dict[str, Entry] = {
    "robust": Entry(path="reward.verifiers.robust:judge", fast=True, second="exact"),
    "exact": Entry(path="reward.verifiers.exact:judge", fast=True, second="robust"),
    "choice": Entry(path="reward.verifiers.choice:judge", fast=True),
    "json": Entry(path="reward.verifiers.json_answer:judge"),
    "code": Entry(path="reward.verifiers.code:judge", probe="reward.verifiers.code:check_system"),
    "remote": Entry(path="", remote=True),
    "none": Entry(path="reward.registry:judge_none"),
}


_PLUS = re.compile(r"\s{1,9}\+\s{1,9}(?=-?[\d.]{1,20}\s{0,9}\*)")
_WEIGHTED = re.compile(r"(?:(-?(?:\d{1,9}\.?\d{0,9}|\.\d{1,9}))\s{0,9}\*\s{0,9})?((?![-\d.]).*)", re.S)


@lru_cache(maxsize=1024)
def weighted(name: str) -> tuple[tuple[float, str], ...]:
    """(weight, verifier) of each reward in a sum, of any other name (1.0, name). The first one is the accuracy.

    Example: `robust + 0.2 * forms:tidy` is ((1.0, "robust"), (0.2, "forms:tidy")).
    """
    terms = [_WEIGHTED.fullmatch(term) for term in _PLUS.split(name)]
    return tuple((float(term[1] or 1), term[2]) for term in terms if term) if all(terms) else ((1.0, name),)


def is_sum(name: str) -> bool:
    """Whether the name holds a weight."""
    return weighted(name) != ((1.0, name),)


def find(name: str) -> Entry:
    """The entry of a registered name, of `robust:FORM`, of a `module:function` path; of a weighted sum the first's.

    Raises:
        VerifierError: the name, or one in the sum, is none of these; the message gives the nearest name.
    """
    if is_sum(name):
        first, *_ = [find(part) for _, part in weighted(name)]
        return first
    module, _, form = name.partition(":")
    if module == "robust" and form.count("{answer}") == 1 and form.partition("{answer}")[0].strip(". \t\r\n"):
        return replace(VERIFIERS["robust"], second="")  # `exact` knows one form alone
    try:
        return VERIFIERS.get(check_name(name, VERIFIERS)) or Entry(path=name)
    except ValueError as error:
        raise VerifierError(f"verifier {name[:80]!r} is not known; {error}") from None


def stated_form(name: str) -> str | None:
    """How a verifier wants the answer: "#### {answer}" for `robust:#### {answer}`. None: in a way of its own."""
    return weighted(name)[0][1].partition(":")[2] or "Answer: {answer}" if find(name).fast else None


def find_named_by_data(name: str, allowed: Collection[str]) -> Entry:
    """As `find`, for a name out of a file of samples: a file may choose among built-in verifiers and what the user
    allows by name, and no other code to import and run.

    Raises:
        VerifierError: unknown name, or code that is not allowed.
    """
    entry = find(name)
    for _, part in weighted(name):
        known = part in VERIFIERS or find(part).fast
        if not known and not any(part == own for each in allowed for _, own in weighted(each)):
            remedy = "a data file may not choose code to run: name it in the command or in the config too"
            raise VerifierError(f"verifier {part[:80]!r} is code that only the file names; {remedy}")
    return entry


def judge_none(request: VerificationRequest) -> Judgement:
    """Verifier `none`, for environments that end each episode themselves. Raises VerifierError: one did not."""
    raise VerifierError("an environment left the verdict to the prompt's verifier, and that is none; name one")


def load(name: str) -> Verifier:
    """Imports the verifier's module and returns its function.

    Raises:
        VerifierError: unknown name, a module that cannot be imported, no such function in it.
    """
    return load_named(find(name).path)


def probe(name: str) -> None:
    """Loads the verifier and tries what it needs of the system. Raises VerifierError."""
    load(name)
    if path := find(name).probe:
        load_named(path)()


def other_accuracy(request: VerificationRequest) -> bool | None:
    """The accuracy of a response by `exact` where its verifier is `robust`, and the reverse. Takes linear time.

    None where there is no second verifier, where the ground truth is unusable, or where only algebra could tell.
    Example: True for `Answer: 42` under `robust`, False for `Answer: 42.`, which `exact` refuses.
    """
    entry = VERIFIERS.get(weighted(request.verifier)[0][1])
    if entry is None or not entry.second:
        return None
    try:
        judged = load(entry.second)(replace(request, verifier=entry.second))
    except VerifierError:
        return None
    return judged.accuracy if isinstance(judged, Judgement) else None
