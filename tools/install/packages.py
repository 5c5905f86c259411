"""uv where it can be had, else pip, both with pip's configuration, in the environment of one Python."""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_ASTRAY = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_PYTHON"}
_ASTRAY |= {"UV_SYSTEM_PYTHON"}
"""Variables of the caller that would lead pip, uv or Python to another place."""
_OPTIONS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "no-index": "UV_NO_INDEX",  # ours, for --no-index
}
"""pip's option to the variable by which uv takes the same."""


class InstallError(RuntimeError):
    """The install cannot go on. The message says what failed, why, and what to do."""


def uv_variables(pip_config: str) -> dict[str, str]:
    """uv's variables for what pip was told: by its files, and by PIP_* variables, which are stronger.

    Args:
        pip_config: what `pip config list` printed: a line `section.option='value'` each.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best version of all indexes
    for section in ("global", "install", ":env:"):
        for option, value in re.findall(rf"^{section}\.(?:default-)?([\w-]+)=(.+)$", pip_config, re.MULTILINE):
            if name := _OPTIONS.get(option):
                words = str(ast.literal_eval(value)).split()
                variables[name] = ("," if name == "UV_FIND_LINKS" else " ").join(words)
    return variables


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
        own = str(self._venv / "bin" / "uv")
        found = own if Path(own).exists() else shutil.which("uv")
        if found is None:
            fetch = (*self.pip, "install", "--quiet", "--no-deps", "--retries", "1", "-c", str(lock), "uv")
            if self.call(*fetch, must=False, capture_output=True).returncode:
                return "pip, for uv cannot be had"
        config = self.call(*self.pip, "config", "list", stdout=subprocess.PIPE)
        self.environment = uv_variables(config.stdout) | self.environment
        offline = ("--no-index",) if self.environment.get("UV_NO_INDEX") else ()
        self._install = (found or own, "pip", "install", "--python", self.python, *offline)
        return "uv"

    def install(self, *arguments: str) -> None:
        """`pip install ARGUMENTS`. Raises InstallError when that fails."""
        self.call(*self._install, *arguments)

    def call(self, *command: str, must: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command. Raises InstallError where it `must` not fail and does."""
        done = subprocess.run(command, env=self.environment, stdin=subprocess.DEVNULL, text=True, **options)
        if must and done.returncode:
            raise InstallError(
                f"`{' '.join(command)[:200]}` ended with status {done.returncode}; what it said stands above. What is "
                "installed stays: the same command goes on from here.\nIf a download failed, check the network, and "
                "index and proxy in `pip config list`; if the disk is full, make room. The locks are for Linux x86-64 "
                "with glibc 2.34 or newer."
            )
        return done
