"""The carried site: made of wheels and archives, without code for other GPUs, symbols and unused folders."""

import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from tests.gpu.runner import carried_site, prepare
from tests.tools.wheels import write_wheel

PTX, CODE, LTO = 1, 2, 8
SIZE = 24


def group(*entries: tuple[int, int]) -> bytes:
    """Of a fat binary; each entry, (kind, architecture), holds its number in its group."""
    inside = b""
    for number, (kind, sm) in enumerate(entries, 1):
        inside += struct.pack("<HHIQ", kind, 0x101, 64, SIZE) + bytes(12) + struct.pack("<I", sm) + bytes(32)
        inside += bytes([number]) * SIZE
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside


def elf(fatbin: bytes) -> bytes:
    """A 64-bit ELF file with the sections .other, .nv_fatbin and .shstrtab."""
    names = b"\0.other\0.nv_fatbin\0.shstrtab\0"
    contents = [b"", group((CODE, 80)), fatbin, names]
    offsets = [64 + sum(map(len, contents[:at])) for at in range(4)]
    table = b""
    for name, offset, content in zip((b"", b".other", b".nv_fatbin", b".shstrtab"), offsets, contents, strict=True):
        at = names.index(b"\0" + name + b"\0") + 1 if name else 0
        table += struct.pack("<II4Q", at, 1, 0, 0, offset, len(content)) + bytes(24)
    after = 64 + len(b"".join(contents))
    head = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHI3QI6H", 3, 62, 1, 0, 0, after, 0, 64, 0, 0, 64, 4, 3)
    return head + b"".join(contents) + table


def kept(data: bytes, groups: list[tuple[tuple[int, int], ...]]) -> list[list[int]]:
    """Numbers of the entries whose content is not zero, for each group."""
    at = 64 + len(group((CODE, 80)))
    found = []
    for entries in groups:
        at += 16
        contents = [data[at + 64 + number * (64 + SIZE) :][:SIZE] for number in range(len(entries))]
        assert all(content in (bytes([n]) * SIZE, bytes(SIZE)) for n, content in enumerate(contents, 1))
        found.append([number for number, content in enumerate(contents, 1) if any(content)])
        at += len(entries) * (64 + SIZE) + 8
    return found


@pytest.mark.parametrize(
    ("sm", "wanted"),
    [(90, [[2, 3], [1], [3], [], []]), (86, [[1], [1], [2], [], []]), (100, [[4], [1], [3], [], []])],
)
def test_code_for_other_gpus_becomes_zeros(sm: int, wanted: list[list[int]], tmp_path: Path) -> None:
    groups: list[tuple[tuple[int, int], ...]] = [
        ((CODE, 80), (CODE, 90), (CODE, 90), (CODE, 100), (PTX, 80)),
        ((PTX, 80), (CODE, 120)),
        ((CODE, 70), (PTX, 80), (PTX, 90), (LTO, 90)),
        ((CODE, 120), (PTX, 120)),
        (),
    ]
    library = tmp_path / "lib.so"
    whole = elf(b"".join(group(*entries) + bytes(8) for entries in groups))  # the linker aligns groups
    library.write_bytes(whole)
    zeroed = carried_site.slim(library, sm)
    data = library.read_bytes()
    assert kept(data, groups) == wanted
    assert zeroed == SIZE * (sum(map(len, groups)) - sum(map(len, wanted)))
    assert data[: 64 + len(group((CODE, 80)))] == whole[: 64 + len(group((CODE, 80)))], "another section"
    assert len(data) == len(whole)


def test_a_library_without_gpu_code_stays_as_it_is(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(elf(b"").replace(b".nv_fatbin", b".nv_catbin"))
    before = library.read_bytes()
    assert carried_site.slim(library, 90) == 0
    assert library.read_bytes() == before


def archive_of(folder: Path, *files: str) -> Path:
    """Empty files below `folder`/site, and an archive of them."""
    for file in files:
        (folder / "site" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / file).touch()
    with tarfile.open(folder / "site.tar.xz", "w:xz") as archive:
        archive.add(folder / "site", ".")
    return folder / "site.tar.xz"


@pytest.mark.parametrize("kernels", ["", "csrc/norm.cu", "aot/norm/norm.so"])
def test_wheels_and_archives_make_one_site(kernels: str, tmp_path: Path) -> None:
    """Wheels for Python 3.12, whatever runs pip; FlashInfer has kernels, or what they are compiled of."""
    wheel = tmp_path / write_wheel(tmp_path, "carried-package", "1.0", {"shared/a.py": ""})
    wheel = wheel.rename(tmp_path / "carried_package-1.0-cp312-cp312-linux_x86_64.whl")
    names = ["shared/b.py", "flashinfer/norm.py"] + ([f"flashinfer/data/{kernels}"] if kernels else [])
    site = tmp_path / "made"
    given = ([str(wheel)], [archive_of(tmp_path, *names)], site)
    if not kernels:
        with pytest.raises(ValueError, match="neither csrc, to compile kernels of, nor aot/NAME"):
            carried_site.build(*given)
        return
    carried_site.build(*given)
    assert all((site / name).is_file() for name in ("shared/a.py", *names))


def test_a_pruned_site_comes_out_of_its_archives_and_loads(tmp_path: Path) -> None:
    site = tmp_path / "site"
    raylet = "ray/core/src/ray/raylet/raylet"
    stays = ["ray/__init__.py", "ray/tune/tune.py", raylet, "_psutil_linux.abi3.so", "script.so"]
    goes = ["ray/jars/ray.jar", "ray/data/__init__.py", "transformer_engine/jax/a.py", "ray/__pycache__/a.pyc"]
    archive_of(tmp_path, *stays, *goes)
    for name in (raylet, "_psutil_linux.abi3.so"):
        shutil.copyfile(psutil._psutil_linux.__file__, site / name)
    (site / "script.so").write_text("INPUT(libc.so)")  # a linker's script
    carried_site.prune(site, 90)
    prepare.pack(carried_site.compress(site, tmp_path), tmp_path / "carry", 1 << 20)
    assert prepare.unpack(tmp_path / "carry" / "1", tmp_path / "there") == []
    there = tmp_path / "there" / "site"
    files = {str(file.relative_to(there)) for file in there.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert files == {*stays}
    assert (there / raylet).stat().st_mode & 0o111 == 0o111
    code = "import _psutil_linux as it; print(it.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(there)}, capture_output=True, text=True)
    assert done.stdout.strip() == str(there / "_psutil_linux.abi3.so"), done.stderr
