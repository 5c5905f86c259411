"""DAPO (arXiv 2503.14476) on Megatron-Core, SGLang and Ray."""

import sys
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).parents[1]
# A file of the user's with such a name, in the working directory or on PYTHONPATH, would hide ours.
for _name in ("reward", "rollout"):
    if (_found := find_spec(_name)) is None or _found.origin != str(_ROOT / _name / "__init__.py"):
        sys.path.insert(0, str(_ROOT))
