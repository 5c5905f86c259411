"""Brings what `make test-gpu` needs to a GPU machine without network, through transfers of limited size.

Here, with a network, `strip` and 3 GB of disk:

    python tests/gpu/runner/prepare.py pack --prepared DIR [--te]

DIR holds what carried.txt does not list: the packages of the SGLang server in the versions of the GPU lock, as an
archive of an installed site-packages, and for --te a wheel of TransformerEngine's extension. The archive is made by
`pip install --no-deps --target SITE sglang==... sglang-kernel==... ...` and `tar -cJf DIR/sglang.tar.xz -C SITE .`
FlashInfer compiles small kernels when a server in bfloat16 starts: the archives must hold either its folder
flashinfer/data (csrc, include, cutlass, cccl, spdlog) or ready kernels, flashinfer/data/aot/NAME/NAME.so (norm and
sampling).

It makes one site folder for Python 3.12, takes out what the tests do without, most of all code for other GPUs, and
cuts it into sets, `.carry/1`, `.carry/2` and on, each small enough to travel beside the repository. It prints the
sizes, and the command to give there for each set:

    python3 tests/gpu/runner/prepare.py unpack .carry/1

The command of the last set extracts the site into a folder of its own and says how to go on. Only Python's standard
library is needed there. Kernels that are compiled there gather in `.carry/unpacked/caches`: brought back and sent
again, they save 30 s at a server's start. Nothing of this belongs into a commit.
"""

import argparse
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # as a script

from tests.gpu.runner.carried_site import build, compress, extract, prune, wanted  # noqa: E402

MIB = 1 << 20
SET_MIB = 54
"""Where a transfer is limited, say to 64 MiB, the repository needs a part of it too."""

INTO = Path(".carry/unpacked")
"""Below the repository's root: env.sh is sourced, so it must not lie where others can write."""

CACHES = ("TVM_FFI_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR")


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
    site = into / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda file: extract(store / file["name"], site), manifest))
    # Some packages hold files for other versions of Python: what cannot be compiled is left as it is.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", str(site)], capture_output=True)
    lines = [f"export PYTHONPATH={shlex.quote(str(site))}"]
    lines += [f"export {name}={shlex.quote(str(into / 'caches' / name.lower()))}" for name in CACHES]
    # With a thread for each core, stages side by side slow each other's reference models on the CPU.
    lines += ["export OMP_NUM_THREADS=3 PYTHONUNBUFFERED=1 RAY_AUTH_MODE=disabled"]
    lines += ["if [ -d /usr/local/cuda ]; then"]
    lines += ['    export CUDA_HOME=/usr/local/cuda PATH="/usr/local/cuda/bin:$PATH"', "fi"]
    (into / "env.sh").write_text("\n".join(lines) + "\n")


def report(manifest: list[dict[str, Any]], into: Path) -> str:
    """Sizes, and the command for each set."""
    sets: dict[int, int] = {}
    for file in manifest:
        for number, _, size in file["pieces"]:
            sets[number] = sets.get(number, 0) + size
    lines = [f"{file['size'] / MIB:8.1f} MiB  {file['name']}" for file in manifest]
    lines += [
        f"{sum(file['size'] for file in manifest) / MIB:8.1f} MiB  in {len(manifest)} files, {len(sets)} sets",
        "",
    ]
    lines += ["Transfer each set with the repository, and give there, one after the other:"]
    for number, size in sets.items():
        lines.append(f"  python3 tests/gpu/runner/prepare.py unpack {into.name}/{number}   # {size / MIB:.1f} MiB")
    lines += ["then, as often as it takes until no stage is left:"]
    lines += [f"  . {INTO}/env.sh && python3 -m tests.gpu.runner.run_stages --together --resume --minutes 9.5"]
    return "\n".join(lines)


def mib(text: str) -> int:
    """An argument of at least 1; argparse names this function in its message."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a set has at least 1 MiB")
    return int(text)


def _prepared(folder: Path, te: bool) -> list[Path]:
    """Its archives and wheels.

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
    packing = commands.add_parser("pack", help="make the site and cut it into sets")
    packing.add_argument("--prepared", type=Path, help="folder with archives (.tar.*) of a site, and wheels")
    packing.add_argument("--te", action="store_true", help="TransformerEngine too")
    packing.add_argument("--sm", type=int, default=90, help="the GPU's architecture (%(default)s: H100, H200)")
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
            wheels = [str(file) for file in files if file.suffix == ".whl"]
            given.into.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=given.into) as folder:
                site = Path(folder) / "site"
                build([*wanted(given.te), *wheels], [file for file in files if file.suffix != ".whl"], site)
                prune(site, given.sm)
                print(report(pack(compress(site, Path(folder)), given.into, given.set_mib * MIB), given.into))
            return 0
        missing = unpack(given.set, given.into)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    ready = f"all there: . {shlex.quote(str(given.into.resolve() / 'env.sh'))}"
    print(f"sets {missing} are still missing" if missing else ready)
    return 0


if __name__ == "__main__":
    sys.exit(main())
