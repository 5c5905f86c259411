"""Writes packages of plain Python files; also copied into the tiny project of test_install.py as its build backend."""

import io
import tarfile
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
            member = zipfile.ZipInfo(path)
            member.external_attr = (0o100755 if ".data/scripts/" in path else 0o100644) << 16
            wheel.writestr(member, text)
    return f"{stem}-py3-none-any.whl"


def installed(site: Path) -> dict[str, str]:
    """Name to version of every package of an environment."""
    stems = [info.name.removesuffix(".dist-info") for info in site.glob("*.dist-info")]
    return {name.replace("_", "-"): version for name, _, version in (stem.partition("-") for stem in stems)}


def write_source(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """A source package in `folder`, whose own pyproject.toml says how a wheel is built of it."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = files | {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    with tarfile.open(Path(folder) / f"{stem}.tar.gz", "w:gz") as source:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{stem}/{path}")
            entry.size = len(text.encode())
            source.addfile(entry, io.BytesIO(text.encode()))


def build_editable(folder, config_settings=None, metadata_directory=None):
    """PEP 660: what pip calls for `pip install -e`."""
    return write_wheel(folder, "tiny-project", "1", {"tiny_project.py": ""})


def write_check(folder: Path, **names) -> Path:
    """A copy of the installer's check that looks for other modules: its constants by name."""
    script = folder / "check.py"
    constants = "".join(f"import_check.{name} = {value!r}\n" for name, value in names.items())
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        f"from tools.install import import_check\n{constants}"
        "sys.exit(import_check.main(sys.argv))\n"
    )
    return script
