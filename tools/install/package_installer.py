"""uv where it can be had, else pip, both with pip's configuration, in the environment of one Python."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ASTRAY = (
    "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
)  # fmt: skip
"""Variables of the caller that would lead pip, uv or Python to another place."""
_OPTIONS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",  # ours, for --no-index
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""pip's option to the variable by which uv takes the same."""
_OLD_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}


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
    return {
        name: value
        for name, value in variables.items()
        if name not in environment and _OLD_NAMES.get(name) not in environment
    }


class PackageInstaller:
    """Runs uv or pip for the environment whose interpreter is `python`. Their output goes to the terminal."""

    def __init__(self, python: Path, base: str, scratch: Path) -> None:
        """`base` is the interpreter that the environment is made from.

        `scratch` takes temporary files: /tmp is often small or in memory, and pip unpacks gigabytes there.
        """
        self.python = python
        self._base = base
        self._uv: str | None = None
        kept = {key: value for key, value in os.environ.items() if key not in _ASTRAY}
        self._environment = kept | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        # -I: neither this folder's packages nor PYTHON* variables reach pip.
        self._pip = [str(python), "-I", "-m", "pip"]

    def make_environment(self, uv_pin: str) -> str:
        """Make or repair the environment, and find uv: in it, on the PATH, or in the package index. Says which it is.

        Raises:
            InstallError: there is neither uv nor pip.
        """
        self.call(self._base, "-m", "venv", "--without-pip", "--prompt", "megatron-dapo", str(self.python.parents[1]))
        own = self.python.with_name("uv")
        self._uv = str(own) if own.exists() else shutil.which("uv", path=self._environment.get("PATH"))
        if self._uv is None and uv_pin:
            fetch = ("install", "--quiet", "--no-deps", "--retries", "1", uv_pin)
            beside = (self._base, "-m", "pip", "--python", str(self.python), *fetch)
            if self._succeeds(*beside) or (self._ensure_pip() and self._succeeds(*self._pip, *fetch)):
                self._uv = str(own)
        if self._uv is not None:
            config = self.call(self._base, "-m", "pip", "config", "list", must=False, stdout=subprocess.PIPE).stdout
            self._environment |= uv_variables(config, self._environment)
            return "uv"
        if not self._ensure_pip():
            raise InstallError(
                f"{self._base} has neither pip nor ensurepip. On Debian and Ubuntu: apt install "
                f"python{sys.version_info[0]}.{sys.version_info[1]}-venv; or put uv on the PATH"
            )
        return f"pip, for {uv_pin or 'uv'} cannot be had"

    def install(self, *arguments: str) -> None:
        """`pip install ARGUMENTS`. Raises InstallError when that fails."""
        self.call(*self._command("install", *arguments))

    def finds(self, *arguments: str) -> bool:
        """Whether `pip install ARGUMENTS` would find what is asked for."""
        return self._succeeds(*self._command("install", "--dry-run", *arguments))

    def uninstall(self, *packages: str) -> None:
        """Remove those that are there."""
        self.call(*self._command("uninstall", *([] if self._uv else ["--yes"]), *packages))

    def build(self, requirement: str, folder: Path, variables: Mapping[str, str]) -> None:
        """Build a wheel into `folder` against the environment's own packages. Raises InstallError when that fails."""
        # A built wheel in pip's cache may have been built against another torch.
        options = ("--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
        self.call(*self._pip, "wheel", "-v", *options, requirement, env={**self._environment, **variables})

    def call(self, *command: str, must: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command. Raises InstallError where it `must` not fail and does."""
        options.setdefault("env", self._environment)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, text=True, check=False, **options)
        if must and done.returncode:
            raise InstallError(
                f"`{' '.join(command)[:200]}` ended with status {done.returncode}; what it said stands above. What is "
                "installed stays: the same command goes on from here.\nIf a download failed, check the network, and "
                "index and proxy in `pip config list`; if the disk is full, make room. The locks are for Linux x86-64 "
                "with glibc 2.34 or newer."
            )
        return done

    def _succeeds(self, *command: str) -> bool:
        return self.call(*command, must=False, capture_output=True).returncode == 0

    def _command(self, verb: str, *arguments: str) -> list[str]:
        if self._uv is None:
            return [*self._pip, verb, *(["--no-compile"] if verb == "install" else []), *arguments]
        if verb == "install" and self._environment.get("UV_NO_INDEX") and "--no-index" not in arguments:
            arguments = ("--no-index", *arguments)
        return [self._uv, "pip", verb, "--python", str(self.python), *arguments]

    def _ensure_pip(self) -> bool:
        there = self._succeeds(*self._pip, "--version")
        return there or self._succeeds(str(self.python), "-I", "-m", "ensurepip", "--default-pip")
