"""The site folder that `prepare.py` carries: made for Python 3.12, without what the GPU tests do without."""

import mmap
import shutil
import struct
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIST = Path(__file__).with_name("carried.txt")
ARCHIVES = 4
"""Compressed, and extracted there, side by side."""

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "linux_x86_64", "any"]
UNUSED = [f"ray/{folder}" for folder in ("jars", "rllib", "dashboard/client", "serve", "data", "tune/examples")]
UNUSED += ["transformer_engine/jax"]
WITH_SYMBOLS = ("numpy", "transformer_engine", "sgl_kernel", "torch_memory", "libtvm", "flashinfer", "deep_gemm")
"""`strip` leaves libraries alone whose path has one of these."""

DAEMONS = ("ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet")
GROUP, MAGIC = struct.Struct("<IHHQ"), 0xBA55ED50
"""Header of a group in a CUDA fat binary: magic, version, size of this header, size of the entries after it."""

ENTRY, PTX, CODE = struct.Struct("<HHIQ12xI"), 1, 2
"""Header of an entry: kind, version, size of this header, size of what follows, architecture (90 for sm_90)."""


def wanted(te: bool) -> list[str]:
    """Requirements of carried.txt."""
    lines = [line.strip() for line in LIST.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [line.removeprefix("te: ") for line in lines if te or not line.startswith("te: ")]


def build(requirements: list[str], archives: list[Path], site: Path) -> None:
    """Installs the requirements, names or wheels, and extracts the archives over them.

    Raises:
        ValueError: pip could not install them, or FlashInfer has no kernels.
    """
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--no-compile"]
    command += ["--target", str(site), "--python-version", "3.12", "--implementation", "cp"]
    command += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    if subprocess.run([*command, *requirements]).returncode:
        raise ValueError(f"pip could not install the wheels for Python 3.12, see above; the list is {LIST}")
    for archive in archives:
        extract(archive, site)
    data = site / "flashinfer" / "data"
    if data.parent.is_dir() and not ((data / "csrc").is_dir() or list(data.glob("aot/*/*.so"))):
        raise ValueError("the prepared flashinfer/data has neither csrc, to compile kernels of, nor aot/NAME/NAME.so")


def extract(archive: Path, into: Path) -> None:
    """A tar archive of any compression."""
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="tar")


def prune(site: Path, sm: int) -> None:
    """Takes out what the tests do without: folders, symbols, code for GPUs other than `sm`."""
    for folder in UNUSED:
        shutil.rmtree(site / folder, ignore_errors=True)
    for compiled in site.rglob("*.pyc"):
        compiled.unlink()
    found = [file for file in sorted(site.rglob("*.so*")) if file.is_file() and not file.is_symlink()]
    libraries = [file for file in found if file.open("rb").read(4) == b"\x7fELF"]
    for library in libraries:
        slim(library, sm)
    bare = [file for file in libraries if not any(word in str(file.relative_to(site)) for word in WITH_SYMBOLS)]
    daemons = [site / name for name in DAEMONS if (site / name).exists()]
    for command, files in ((["strip", "--strip-unneeded"], bare), (["strip"], daemons)):
        if files and subprocess.run([*command, *map(str, files)]).returncode:
            raise ValueError(f"{' '.join(command)} failed, see above")
    for daemon in daemons:
        daemon.chmod(0o755)


def slim(library: Path, sm: int) -> int:
    """Overwrites with zeros, which compress to nothing, what a CUDA fat binary has for other GPUs; how many bytes.

    Of each group stays the code that runs on `sm`; of a group that has none, the PTX that can be compiled for it.
    """
    zeroed = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at, end = _section(data, b".nv_fatbin")
        while at + GROUP.size <= end:
            magic, _, header, size = GROUP.unpack_from(data, at)
            if magic != MAGIC:
                at += 8
                continue
            entries, start, at = [], at + header, at + header + size
            while start < at:
                kind, _, header, size, of = ENTRY.unpack_from(data, start)
                entries.append(((kind, of), start + header, size))
                start += header + size
            codes = [key for key, *_ in entries if key[0] == CODE and key[1] in range(sm // 10 * 10, sm + 1)]
            texts = [key for key, *_ in entries if key[0] == PTX and key[1] <= sm]
            best = max(codes or texts, default=None)
            for key, begin, size in entries:
                if key != best:
                    data[begin : begin + size] = bytes(size)
                    zeroed += size
    return zeroed


def _section(data: mmap.mmap, name: bytes) -> tuple[int, int]:
    """Where a section of a 64-bit ELF file begins and ends; (0, 0): it has none of this name."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, of_names = struct.unpack_from("<3H", data, 0x3A)
    headers = [struct.unpack_from("<II4Q", data, table + at * size) for at in range(count)]
    for at, _, _, _, offset, length in headers:
        here = headers[of_names][4] + at
        if data[here : here + len(name) + 1] == name + b"\0":
            return offset, offset + length
    return 0, 0


def compress(site: Path, into: Path) -> list[Path]:
    """The site as a few archives of about the same size."""
    groups: list[list[Path]] = [[] for _ in range(ARCHIVES)]
    sizes = [0] * ARCHIVES
    for size, entry in sorted(((_size(entry), entry) for entry in site.iterdir()), reverse=True):
        least = sizes.index(min(sizes))
        groups[least].append(entry)
        sizes[least] += size

    def write(number: int) -> Path:
        with tarfile.open(into / f"site-{number}.tar.xz", "w:xz", preset=6) as archive:
            for entry in sorted(groups[number]):
                archive.add(entry, entry.name)
        return into / f"site-{number}.tar.xz"

    with ThreadPoolExecutor() as threads:
        return list(threads.map(write, [number for number in range(ARCHIVES) if groups[number]]))


def _size(entry: Path) -> int:
    return sum(file.lstat().st_size for file in (entry, *entry.rglob("*")))
