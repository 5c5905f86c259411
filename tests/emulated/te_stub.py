"""TransformerEngine's real Python over stubs of its compiled parts: modules can be built and their state looked at.

Products and kernels are mocks, so nothing can be computed. For a process of its own: it changes `sys.modules`.
"""

import enum
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

COMPILED = "transformer_engine_torch"
ENUMS = {
    ("constants.py", "DType"): ("DType", ""),
    ("cpp_extensions/fused_attn.py", "FusedAttnBackend"): ("NVTE_Fused_Attn_Backend", "NVTE_"),
}
"""Python enums that must equal the compiled ones, by file of transformer_engine/pytorch: name and prefix of those."""


class _Stub(types.ModuleType):
    """A module in which every name is a mock."""

    __path__: list[str] = []  # noqa: RUF012  (import reads it)
    __version__ = "1.16.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, mock.MagicMock(name=f"{self.__name__}.{name}"))
        return getattr(self, name)


def python_is_there() -> bool:
    """Whether TransformerEngine's Python files are installed."""
    found = importlib.util.find_spec("transformer_engine")
    return found is not None and found.origin is not None


def install() -> None:
    """Make `import transformer_engine.pytorch` work without its compiled parts and without a GPU."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the shared libraries are not loaded
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda name: None
    compiled = _put(COMPILED)
    for (file, name), (compiled_name, prefix) in ENUMS.items():
        source = (Path(spec.origin).parent / "pytorch" / file).read_text()
        body = re.search(rf"^class {name}\(.*?(?=^    def |^\S)", source[source.index(f"class {name}(") :], re.S | re.M)
        assert body is not None
        members = re.findall(r"^    (\w+) = int\(", body[0], re.M)
        values = {prefix + member: number for number, member in enumerate(members)}
        setattr(compiled, compiled_name, enum.IntEnum(compiled_name, values))
    _import_with_stubs()


def _import_with_stubs() -> None:
    """Packages that only a part of TransformerEngine needs become stubs too, as their imports fail."""
    absent: list[str] = []
    while True:
        try:
            import transformer_engine.pytorch  # noqa: F401

            return
        except ModuleNotFoundError as error:
            if error.name is None or error.name in absent:
                raise
            absent.append(error.name)
            _put(error.name)
            for name in [name for name in sys.modules if name.startswith("transformer_engine.pytorch")]:
                del sys.modules[name]


def _put(name: str) -> types.ModuleType:
    module = sys.modules[name] = _Stub(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module
