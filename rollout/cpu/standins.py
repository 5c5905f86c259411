"""Stand-ins for packages that only a GPU needs, so that SGLang's modules can be imported without them.

SGLang imports `triton`, `sgl_kernel` and `torchvision` at the top of modules that the CPU path shares with the GPU
path, and never calls them there. `install()` answers such an import with an empty package whose attributes can be
named, subclassed and used as decorators; calling one raises `GpuOnlyError`. A package that is really installed is not
replaced, with one exception: the CUDA build of `sgl_kernel` needs a GPU driver and lacks functions for the CPU.
"""

import enum
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("triton", "sgl_kernel", "torchvision", "IPython", "soundfile")


class GpuOnlyError(NotImplementedError):
    """Code that needs a GPU package was executed on the CPU."""


class StandIn(ModuleType):
    """A package that is not installed: any attribute of it is a stand-in or an empty class, calling it raises.

    `import triton.language as tl` gives StandIn("triton.language"), `tl.constexpr` a stand-in in turn, and
    `class Kernel(triton.KernelInterface)` works because a capitalised attribute is an empty class.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection (`__file__`, `__wrapped__`) must see that there is nothing
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        value = _empty_class(name, self.__name__) if name[:1].isupper() else importlib.import_module(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise GpuOnlyError(f"{self.__name__} was called, but {self.__name__.split('.')[0]} is not installed here")

    def __bool__(self) -> bool:  # `if triton.something:` takes the branch without the package
        return False


def _empty_class(name: str, module: str) -> type:
    """Takes any arguments: `triton.Config` and `tl.constexpr` are built while modules are imported."""
    subclass = classmethod(lambda cls, **_: None)
    return type(name, (), {"__module__": module, "__init__": lambda *_, **__: None, "__init_subclass__": subclass})


def _decorator(*args: Any, **options: Any) -> Any:
    """`@jit` and `@jit(...)`: leaves the function as it is. Launching one, `kernel[grid](...)`, is a TypeError."""
    return args[0] if len(args) == 1 and callable(args[0]) and not options else lambda function: function


_InterpolationMode = enum.Enum("_InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
"""torchvision's enum; processors of vision models name its members in default arguments."""

# What is executed while modules are imported, and hence has to work.
_CONTENTS: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": "3.0.0",
        **dict.fromkeys(("jit", "autotune", "heuristics"), _decorator),
        "cdiv": lambda a, b: -(a // -b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
    },
    "triton.language": {"constexpr": _empty_class("constexpr", "triton.language")},
    "torchvision": {"__version__": "0.0.0"},
    "torchvision.transforms": {"InterpolationMode": _InterpolationMode},
    "torchvision.transforms.functional": {"InterpolationMode": _InterpolationMode},
    "IPython": {"get_ipython": lambda: None},
}


class _Finder:
    """Import finder and loader of the stand-ins; first in `sys.meta_path`, it answers for its own packages alone."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        ours = name.split(".")[0] in self.packages
        return ModuleSpec(name, self, is_package=True) if ours else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_CONTENTS.get(module.__name__, {}))


def install(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Answers imports of those `packages` that a CPU lacks with stand-ins, in this process; returns their names."""
    absent = [name for name in packages if name not in sys.modules and not _usable(importlib.util.find_spec(name))]
    if absent:
        sys.meta_path.insert(0, _Finder(frozenset(absent)))
    return absent


def _usable(spec: ModuleSpec | None) -> bool:
    if spec is None or spec.name != "sgl_kernel":
        return spec is not None
    # The build for CPUs has its library at the top, the one for CUDA has a folder for each GPU architecture.
    return any(any(Path(folder).glob("common_ops.*")) for folder in spec.submodule_search_locations or ())
