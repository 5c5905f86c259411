"""What a config names: an entry of a table, or code of the user's own as `module:name`."""

import importlib.util
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any


def check_name(name: str, table: Collection[str]) -> str:
    """The name. Raises ValueError, with the nearest entry, if it is neither in the table nor `module:name` in form."""
    module, colon, item = name.partition(":")
    if name in table or (colon and item.isidentifier() and all(map(str.isidentifier, module.split(".")))):
        return name
    near = get_close_matches(name.lower(), table, n=1)
    raise ValueError(f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(table)}, or 'module:name'")


def load_named(path: str) -> Callable[..., Any]:
    """The function or class `module:name`; the working directory counts, last. Raises ImportError, whatever is wrong
    with the module."""
    module, _, item = path.partition(":")
    try:
        if module not in sys.modules and importlib.util.find_spec(module.partition(".")[0]) is None:
            sys.path.extend({""} - {*sys.path})
        found = vars(importlib.import_module(module)).get(item)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        hint = "; set PYTHONPATH to the folder of the module" if isinstance(error, ModuleNotFoundError) else ""
        raise ImportError(f"import of {module} failed: {type(error).__name__}: {error}{hint}") from error
    if not callable(found):
        raise ImportError(f"module {module} has no function or class {item}")
    return found
