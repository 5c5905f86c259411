"""Writes a wheel of plain Python files; also copied into the tiny project of test_install.py as its build backend."""

import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> str:
    """The file name of the wheel written to `folder`."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(Path(folder) / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(path, text)
    return f"{stem}-py3-none-any.whl"


def build_editable(folder, config_settings=None, metadata_directory=None):
    """PEP 660: what pip calls for `pip install -e`."""
    return write_wheel(folder, "tiny-project", "1", {"tiny_project.py": ""})
