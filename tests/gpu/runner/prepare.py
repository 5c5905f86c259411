"""Brings what `make test-gpu` needs to a GPU machine without network, through transfers of limited size.

Here, with a network:

    python tests/gpu/runner/prepare.py pack --prepared DIR [--te]

DIR holds what carried.txt does not list: the packages of the SGLang server in the versions of the GPU lock, as an
archive of an installed site-packages, and for --te a wheel of TransformerEngine's extension. The archive is made by
`pip install --no-deps --target SITE sglang==... sglang-kernel==... ...` and `tar -cJf DIR/sglang.tar.xz -C SITE .`

It downloads the wheels of `carried.txt` for Python 3.12 and cuts everything into sets, `.carry/1`, `.carry/2` and on,
each small enough to travel beside the repository. It prints the sizes, and the command to give there for each set:

    python3 tests/gpu/runner/prepare.py unpack .carry/1

The command of the last set installs them all into a folder of their own and says how to go on. Only Python's standard
library and pip are needed. Nothing of this belongs into a commit.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("carried.txt")
MIB = 1 << 20
SET_MIB = 46
"""Where a transfer is limited, say to 64 MiB, the repository needs a part of it too."""

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]
INTO = Path(".carry/unpacked")
"""Below the repository's root: env.sh is sourced, so it must not lie where others can write."""


def wanted(te: bool) -> list[str]:
    """Requirements of carried.txt."""
    lines = [line.strip() for line in LIST.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [line.removeprefix("te: ") for line in lines if te or not line.startswith("te: ")]


def download(requirements: list[str], folder: Path) -> list[Path]:
    """One wheel for each requirement, in their order.

    Raises:
        SystemExit: pip found none of a version for Python 3.12 on x86-64 Linux.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += [
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        "--abi",
        "cp312",
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    command += [word for platform in (*PLATFORMS, "any") for word in ("--platform", platform)]
    if subprocess.run([*command, *requirements]).returncode:
        raise SystemExit(f"pip could not download a wheel, see above; the list is {LIST}")
    wheels = []
    for requirement in requirements:
        name, version = requirement.split("==")
        found = [w for w in folder.glob("*.whl") if _project(w) == (name.replace("-", "_").lower(), version)]
        if len(found) != 1:
            raise SystemExit(f"{requirement}: {len(found)} wheels in {folder}; empty the folder and try again")
        wheels += found
    return wheels


def _project(wheel: Path) -> tuple[str, str]:
    name, version, *_ = wheel.name.split("-")
    return name.lower().replace(".", "_"), version


def pack(files: list[Path], into: Path, set_bytes: int) -> list[dict[str, Any]]:
    """Cuts the files into sets; the manifest, which every set holds: of each file its name, size, SHA-256 and pieces
    as (set, offset, size)."""
    manifest: list[dict[str, Any]] = []
    number, room = 1, set_bytes
    for file in files:
        data = file.read_bytes()
        pieces = []
        offset = 0
        while offset < len(data):
            if room == 0:
                number, room = number + 1, set_bytes
            size = min(room, len(data) - offset)
            folder = into / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{file.name}.{offset}").write_bytes(data[offset : offset + size])
            pieces.append([number, offset, size])
            offset, room = offset + size, room - size
        digest = hashlib.sha256(data).hexdigest()
        manifest.append({"name": file.name, "size": len(data), "sha256": digest, "pieces": pieces})
    for each in range(1, number + 1):
        (into / str(each) / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def unpack(folder: Path, into: Path) -> list[int]:
    """Puts one set's pieces in their places; the sets that are still missing. The last one installs everything.

    Raises:
        ValueError: the folder is no set, or a file is not what was packed; that file is removed, to be sent again.
    """
    if not (folder / "manifest.json").is_file():
        raise ValueError(f"{folder / 'manifest.json'} is missing: name a set that `pack` made, as .carry/1")
    manifest = json.loads((folder / "manifest.json").read_text())
    into = into.resolve()
    store = into / "files"
    store.mkdir(parents=True, exist_ok=True)
    for file in manifest:
        for _, offset, size in file["pieces"]:
            piece = folder / f"{file['name']}.{offset}"
            if piece.exists():
                target = store / file["name"]
                target.touch()
                with target.open("r+b") as whole:
                    whole.seek(offset)
                    whole.write(piece.read_bytes())
                    whole.truncate(file["size"])  # an older file of this name may have been longer
                _mark(store, file, offset, size).touch()
    missing = {
        number
        for file in manifest
        for number, offset, size in file["pieces"]
        if not _mark(store, file, offset, size).exists()
    }
    if not missing:
        _install(manifest, store, into)
    return sorted(missing)


def _mark(store: Path, file: dict[str, Any], offset: int, size: int) -> Path:
    """Exists once the piece is in its place. The digest keeps marks of an older file of the same name apart."""
    return store / f".{file['name']}.{file['sha256'][:16]}.{offset}.{size}.here"


def _drop_damaged(manifest: list[dict[str, Any]], store: Path) -> None:
    damaged = []
    for file in manifest:
        whole = store / file["name"]
        if whole.exists() and hashlib.sha256(whole.read_bytes()).hexdigest() == file["sha256"]:
            continue
        damaged.append(f"{whole} is damaged: unpack sets {sorted({number for number, _, _ in file['pieces']})} again")
        whole.unlink(missing_ok=True)
        for _, offset, size in file["pieces"]:
            _mark(store, file, offset, size).unlink(missing_ok=True)
    if damaged:
        raise ValueError("; ".join(damaged))


def _install(manifest: list[dict[str, Any]], store: Path, into: Path) -> None:
    _drop_damaged(manifest, store)
    names = [file["name"] for file in manifest]
    prepared = into / "prepared"
    prepared.mkdir(exist_ok=True)
    for name in names:
        if ".tar" in name:
            with tarfile.open(store / name) as archive:
                archive.extractall(prepared, filter="tar")
    wheels = [str(store / name) for name in names if name.endswith(".whl")]
    if wheels:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-cache-dir"]
        command += ["--no-compile", "--upgrade", "--target", str(into / "site"), *wheels]
        if subprocess.run(command).returncode:
            raise ValueError(f"pip could not install the wheels of {store}, see above")
    lines = [f"export PYTHONPATH={shlex.quote(f'{into}/site:{prepared}')}"]
    lines += [f"export TVM_FFI_CACHE_DIR={shlex.quote(f'{into}/kernels')}"]
    lines += ["export RAY_AUTH_MODE=disabled PYTHONUNBUFFERED=1"]
    (into / "env.sh").write_text("\n".join(lines) + "\n")


def report(manifest: list[dict[str, Any]], into: Path) -> str:
    """Sizes, and the command for each set."""
    sets: dict[int, int] = {}
    for file in manifest:
        for number, _, size in file["pieces"]:
            sets[number] = sets.get(number, 0) + size
    largest = sorted(manifest, key=lambda file: -file["size"])[:12]
    lines = [f"{file['size'] / MIB:8.1f} MiB  {file['name']}" for file in largest]
    lines += [
        f"{sum(file['size'] for file in manifest) / MIB:8.1f} MiB  in {len(manifest)} files, {len(sets)} sets",
        "",
    ]
    lines += ["Transfer each set with the repository, and give there, one after the other:"]
    for number, size in sets.items():
        lines.append(f"  python3 tests/gpu/runner/prepare.py unpack {into.name}/{number}   # {size / MIB:.1f} MiB")
    lines += ["then, as often as it takes until no stage is left:"]
    lines += [f"  . {INTO}/env.sh && python3 -m tests.gpu.runner.run_stages --resume --minutes 9.5"]
    return "\n".join(lines)


def mib(text: str) -> int:
    """An argument of at least 1; argparse names this function in its message."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a set has at least 1 MiB")
    return int(text)


def _prepared(folder: Path, te: bool) -> list[Path]:
    """The files to carry as they are.

    Raises:
        ValueError: there is no such folder, or it holds more than files.
    """
    if not folder.is_dir():
        raise ValueError(f"--prepared {folder}: no such folder")
    files = sorted(folder.iterdir())
    if other := [str(file) for file in files if not file.is_file()]:
        raise ValueError(f"--prepared takes files only (.tar.*, .whl): make an archive of {', '.join(other)}")
    return [file for file in files if te or not file.name.startswith("transformer_engine")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; what cannot be done ends with a message and code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download and cut into sets")
    packing.add_argument("--prepared", type=Path, help="folder with archives (.tar.*) and wheels to carry as they are")
    packing.add_argument("--te", action="store_true", help="TransformerEngine too")
    packing.add_argument("--set-mib", type=mib, default=SET_MIB, help="size of a set (%(default)s)")
    packing.add_argument("--into", type=Path, default=ROOT / ".carry")
    unpacking = commands.add_parser("unpack", help="on the GPU machine, for each set")
    unpacking.add_argument("set", type=Path)
    unpacking.add_argument(
        "--into", type=Path, default=ROOT / INTO, help="yours alone: env.sh is sourced (%(default)s)"
    )
    given = parser.parse_args(arguments)
    try:
        if given.command == "pack":
            files = _prepared(given.prepared, given.te) if given.prepared else []
            if old := [folder for folder in given.into.glob("*") if folder.name.isdigit()]:
                raise ValueError(f"{given.into} holds sets already ({len(old)}): remove them first")
            files += download(wanted(given.te), given.into / "wheels")
            print(report(pack(files, given.into, given.set_mib * MIB), given.into))
            return 0
        missing = unpack(given.set, given.into)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    ready = f"all there: . {shlex.quote(str(given.into.resolve() / 'env.sh'))}"
    print(f"sets {missing} are still missing" if missing else ready)
    return 0


if __name__ == "__main__":
    sys.exit(main())
