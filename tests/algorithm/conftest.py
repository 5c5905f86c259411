"""Shapes and types of `megatron_dapo.algorithm` are checked at run time in tests, at no cost in production.

Where another test imported the package first, the hook comes too late for this process; `test_shapes.py` therefore
checks in a process of its own, and `pytest --jaxtyping-packages=megatron_dapo.algorithm,beartype.beartype` checks all.
"""

import sys

from hypothesis import settings
from jaxtyping import install_import_hook

if "megatron_dapo.algorithm" not in sys.modules:
    install_import_hook("megatron_dapo.algorithm", "beartype.beartype")

settings.register_profile("algorithm", deadline=None, max_examples=50)
settings.load_profile("algorithm")
