"""The table of verifiers: name -> where it is, whether it is cheap. One outside the table is `module:function`."""

import importlib
from dataclasses import dataclass
from difflib import get_close_matches

from reward.messages import Verifier, VerifierError


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where a verifier lives. A cheap one takes linear time on any text and may share a batch with others."""

    path: str
    cheap: bool


VERIFIERS: dict[str, Entry] = {
    "robust": Entry(path="reward.verifiers.robust:judge", cheap=True),
    "exact": Entry(path="reward.verifiers.exact:judge", cheap=True),
    "choice": Entry(path="reward.verifiers.choice:judge", cheap=True),
    "json": Entry(path="reward.verifiers.json_answer:judge", cheap=False),
}


def find(name: str) -> Entry:
    """The entry of a registered name or of a `module:function` path.

    Raises:
        VerifierError: the name is neither; the message gives the nearest name.
    """
    entry = VERIFIERS.get(name)
    if entry is not None:
        return entry
    module, colon, function = name.partition(":")
    if colon and function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return Entry(path=name, cheap=False)
    near = get_close_matches(name.lower(), VERIFIERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(VERIFIERS)}, or 'module:function'"
    raise VerifierError(f"verifier {name[:80]!r} is not known; {hint}")


def load(name: str) -> Verifier:
    """Imports the verifier's module and returns its function.

    Raises:
        VerifierError: unknown name, a module that cannot be imported, no such function in it.
    """
    path = find(name).path
    module_name, _, function_name = path.partition(":")
    try:
        function = vars(importlib.import_module(module_name)).get(function_name)
    except Exception as error:  # a user's module may fail in any way, and the pool must go on
        raise VerifierError(
            f"verifier {name!r}: import of {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise VerifierError(f"verifier {name!r}: module {module_name} has no function {function_name}")
    return function
