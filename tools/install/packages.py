"""uv where it can be had, else pip, both with pip's configuration, in the environment of one Python."""

import ast
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ASTRAY = (
    "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
)  # fmt: skip
"""Variables of the caller that would lead pip, uv or Python to another place."""
_OPTIONS = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "no-index": "UV_NO_INDEX",  # ours, for --no-index
}
"""pip's option to the variable by which uv takes the same."""
_NEW_NAMES = {"UV_INDEX_URL": "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL": "UV_INDEX"}


class InstallError(RuntimeError):
    """The install cannot go on. The message says what failed, why, and what to do."""


def uv_variables(pip_config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """uv's variables for what pip was told; what uv itself was told stays.

    Args:
        pip_config: what `pip config list` printed: a line `section.option='value'` each.
        environment: its PIP_* variables are stronger than the files, and its UV_* variables than both.
    """
    told = {}
    for line in pip_config.splitlines():
        key, _, value = line.partition("=")
        if key.startswith(("global.", "install.")):
            told[key.partition(".")[2]] = str(ast.literal_eval(value))
    told |= {key[4:].lower().replace("_", "-"): value for key, value in environment.items() if key.startswith("PIP_")}
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best version of all indexes
    for option, name in _OPTIONS.items():
        if told.get(option):
            variables[name] = ("," if name == "UV_FIND_LINKS" else " ").join(told[option].split())
    return {n: value for n, value in variables.items() if not {n, _NEW_NAMES.get(n)} & environment.keys()}


class Packages:
    """Runs uv or pip for the environment at `venv`. Their output goes to the terminal."""

    def __init__(self, base: str, venv: Path) -> None:
        """`base` is the interpreter that the environment is made from. `tmp` in it takes temporary files."""
        self.python = str(venv / "bin" / "python")
        self._base, self._venv = base, venv
        kept = {key: value for key, value in os.environ.items() if key not in _ASTRAY}
        quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        self.environment = kept | quiet | {"TMPDIR": str(venv / "tmp")}
        # For the verbs that uv lacks. -I: neither this folder's packages nor PYTHON* variables reach it.
        self.pip = (self.python, "-I", "-m", "pip")
        self._install: tuple[str, ...] = (*self.pip, "install", "--no-compile")

    def make_environment(self, lock: Path) -> str:
        """Make or repair the environment, and find uv: in it, on the PATH, or in the package index. Says which it is.

        Raises:
            InstallError: Python cannot make environments; it said why.
        """
        self.call(self._base, "-m", "venv", "--prompt", "megatron-dapo", str(self._venv))
        uv = self._venv / "bin" / "uv"
        found = str(uv) if uv.exists() else shutil.which("uv")
        if found is None:
            fetch = (*self.pip, "install", "--quiet", "--no-deps", "--retries", "1", "-c", str(lock), "uv")
            if self.call(*fetch, must=False, capture_output=True).returncode:
                return "pip, for uv cannot be had"
            found = str(uv)
        config = self.call(*self.pip, "config", "list", stdout=subprocess.PIPE).stdout
        self.environment |= uv_variables(config, self.environment)
        offline = ("--no-index",) if self.environment.get("UV_NO_INDEX") else ()
        self._install = (found, "pip", "install", "--python", self.python, *offline)
        return "uv"

    def install(self, *arguments: str) -> None:
        """`pip install ARGUMENTS`. Raises InstallError when that fails."""
        self.call(*self._install, *arguments)

    def call(self, *command: str, must: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command. Raises InstallError where it `must` not fail and does."""
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, text=True, check=False, **options
        )
        if must and done.returncode:
            raise InstallError(
                f"`{' '.join(command)[:200]}` ended with status {done.returncode}; what it said stands above. What is "
                "installed stays: the same command goes on from here.\nIf a download failed, check the network, and "
                "index and proxy in `pip config list`; if the disk is full, make room. The locks are for Linux x86-64 "
                "with glibc 2.34 or newer."
            )
        return done
