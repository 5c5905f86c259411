"""The table of verifiers: name -> where it is and how it is run. One outside the table is `module:function`."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from reward.named import check_name, load_named
from reward.verdict import Judgement, VerificationRequest, Verifier, VerifierError


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
}


def find(name: str) -> Entry:
    """The entry of a registered name, of `robust:FORM` or of a `module:function` path.

    Raises:
        VerifierError: the name is neither; the message gives the nearest name.
    """
    module, _, form = name.partition(":")
    if module == "robust" and form.count("{answer}") == 1 and form.partition("{answer}")[0].strip(". \t\r\n"):
        return replace(VERIFIERS["robust"], second="")  # `exact` knows one form alone
    try:
        return VERIFIERS.get(check_name(name, VERIFIERS)) or Entry(path=name)
    except ValueError as hint:
        raise VerifierError(f"verifier {name[:80]!r} is not known; {hint}") from None


def stated_form(name: str) -> str | None:
    """How a verifier wants the answer: "#### {answer}" for `robust:#### {answer}`. None: in a way of its own."""
    return name.partition(":")[2] or "Answer: {answer}" if find(name).fast else None


def find_named_by_data(name: str, allowed: Collection[str]) -> Entry:
    """As `find`, for a name out of a file of samples: a file may choose among built-in verifiers and what the user
    allows by name, and no other code to import and run.

    Raises:
        VerifierError: unknown name, or code that is not allowed.
    """
    entry = find(name)
    if name not in VERIFIERS and not entry.fast and name not in allowed:
        raise VerifierError(
            f"verifier {name[:80]!r} is code that only the file names; a data file may not choose code to run: "
            "name it in the command or in the config too"
        )
    return entry


def load(name: str) -> Verifier:
    """Imports the verifier's module and returns its function.

    Raises:
        VerifierError: unknown name, a module that cannot be imported, no such function in it.
    """
    entry = find(name)
    if entry.remote:
        raise VerifierError(f"verifier {name!r} is a service, which no process of the pool can be")
    return _function(name, entry.path)


def probe(name: str) -> None:
    """Loads the verifier and tries what it needs of the system. Raises VerifierError."""
    load(name)
    if path := find(name).probe:
        _function(name, path)()


def other_accuracy(request: VerificationRequest) -> bool | None:
    """The accuracy of a response by `exact` where its verifier is `robust`, and the reverse. Takes linear time.

    None where there is no second verifier, where the ground truth is unusable, or where only algebra could tell.
    Example: True for `Answer: 42` under `robust`, False for `Answer: 42.`, which `exact` refuses.
    """
    entry = VERIFIERS.get(request.verifier)
    if entry is None or not entry.second:
        return None
    try:
        judged = load(entry.second)(request)
    except VerifierError:
        return None
    return judged.accuracy if isinstance(judged, Judgement) else None


def _function(name: str, path: str) -> Callable[..., Any]:
    try:
        return load_named(path)
    except ImportError as error:  # the pool must go on
        raise VerifierError(f"verifier {name!r}: {error}") from error
