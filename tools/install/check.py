"""Import what a run needs, in the new environment, and say what is missing before a run would."""

import json
from pathlib import Path

from tools.install.command import InstallError, run
from tools.install.progress import Progress

# sglang imports only in a server process, which brings its own stand-ins for what a CPU lacks; here it must be found.
FOUND = ("sglang", "xgrammar", "pytest", "ruff", "mypy")
IMPORTED = (
    "torch", "megatron.core", "ray", "transformers", "tokenizers", "sentencepiece", "safetensors.torch", "numpy",
    "pyarrow", "pydantic", "yaml", "typer", "rich", "aiohttp", "jinja2", "psutil", "filelock", "matplotlib",
    "tensorboard", "math_verify", "jaxtyping", "xxhash", "megatron_dapo", "rollout", "reward",
)  # fmt: skip
SHOWN = ("torch", "megatron-core", "sglang", "ray", "transformers")

_CODE = """
import importlib, importlib.metadata, importlib.util, json, platform, warnings
warnings.simplefilter("ignore")
found, imported, shown = json.loads({names!r})
failed = [[name, "not found"] for name in found if importlib.util.find_spec(name) is None]
for name in imported:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed.append([name, f"{{type(error).__name__}}: {{error}}"])
versions = {{}} if failed else {{name: importlib.metadata.version(name) for name in shown}}
print("RESULT " + json.dumps([failed, platform.python_version(), versions]))
"""


def check_imports(python: Path, *, progress: Progress, scratch: Path, log: Path) -> str:
    """One line with the versions that work together.

    Raises:
        InstallError: names each package that is not there or does not import, with its own error.
    """
    names = json.dumps([FOUND, IMPORTED, SHOWN])
    command = [str(python), "-I", "-c", _CODE.format(names=names)]
    _, lines = run(
        command, scratch=scratch, log=log,
        on_tick=lambda: progress.show("importing the packages", left_s=max(12 - progress.elapsed, 1)),
    )  # fmt: skip
    result = next((line for line in lines if line.startswith("RESULT ")), None)
    if result is None:
        raise InstallError("\n".join([*lines[-6:], f"the packages do not import; all that was said: {log}"]))
    failed, version, versions = json.loads(result.removeprefix("RESULT "))
    if failed:
        raise InstallError(
            "\n".join(["these packages do not work:", *(f"  {name}: {why}" for name, why in failed)])
            + "\n`make clean-venv install` makes the environment anew"
        )
    return f"Python {version}, " + ", ".join(f"{name} {version}" for name, version in versions.items())
