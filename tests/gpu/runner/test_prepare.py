"""What a GPU machine without network gets: cut into sets, put together again in any order, and checked."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.gpu.runner import carried_site, prepare

SET = 1500


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Archives of two packages of a site."""
    made = []
    for name in ("package_a", "package_b"):
        inside = tmp_path / "inside" / name
        inside.mkdir(parents=True)
        (inside / "__init__.py").write_text(f"NOISE = {os.urandom(900).hex()!r}\n")
        made.append(tmp_path / f"{name}.tar.xz")
        with tarfile.open(made[-1], "w:xz") as archive:
            archive.add(inside, name)
    return made


def in_site(env: Path, code: str) -> list[str]:
    """Lines that Python code prints once env.sh is sourced."""
    sourced = ["sh", "-c", '. "$0" && exec "$1" -c "$2"', str(env), sys.executable, code]
    done = subprocess.run(sourced, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_sets_are_small_and_come_together_in_any_order(files: list[Path], tmp_path: Path) -> None:
    manifest = prepare.pack(files, tmp_path / "carry", SET)
    sets = sorted((tmp_path / "carry").iterdir(), key=lambda folder: int(folder.name))
    assert len(sets) >= 2
    for folder in sets:
        assert sum(file.stat().st_size for file in folder.iterdir() if file.name != "manifest.json") <= SET
    text = prepare.report(manifest, tmp_path / "carry")
    assert [f"unpack carry/{folder.name} " in text for folder in sets] == [True] * len(sets)
    into = tmp_path / "it's there, $HOME"
    for at, folder in enumerate(reversed(sets), 1):
        assert len(prepare.unpack(folder, into)) == len(sets) - at
    names = ("TRITON_CACHE_DIR", "OMP_NUM_THREADS")
    code = "import os, package_a as a, package_b as b; print(a.__file__, b.__file__, a.__cached__, sep='\\n')\n"
    found = in_site(into / "env.sh", code + f"for name in {names!r}: print(os.environ[name])")
    site = into / "site"
    assert found[:2] == [str(site / "package_a" / "__init__.py"), str(site / "package_b" / "__init__.py")]
    assert found[3:] == [str(into / "caches" / "triton_cache_dir"), "3"]
    compiled = (site / "package_a" / "__pycache__").iterdir()
    assert [str(file) for file in compiled] == [found[2]], "by unpack, for the Python that ran it"


def test_a_newer_site_replaces_the_older_one(files: list[Path], tmp_path: Path) -> None:
    for at, given in enumerate((files, files[1:])):
        prepare.pack(given, tmp_path / str(at), 1 << 20)
        assert prepare.unpack(tmp_path / str(at) / "1", tmp_path / "there") == []
    assert [entry.name for entry in (tmp_path / "there" / "site").iterdir()] == ["package_b"]


def test_a_damaged_file_is_named(files: list[Path], tmp_path: Path) -> None:
    prepare.pack(files, tmp_path / "carry", 1 << 20)
    folder = tmp_path / "carry" / "1"
    piece = folder / "package_a.tar.xz.0"
    piece.write_bytes(piece.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"package_a\.tar\.xz is damaged"):
        prepare.unpack(folder, tmp_path / "there")


def test_a_damaged_file_can_be_sent_again(files: list[Path], tmp_path: Path) -> None:
    """Also where a file of the same name, larger and cut into other sets, was sent before."""
    into = tmp_path / "there"
    files[0].write_bytes(files[0].read_bytes() + bytes(5 * SET))  # xz takes zeros as padding
    prepare.pack(files[:1], tmp_path / "old", SET // 3)
    for folder in (tmp_path / "old").iterdir():
        prepare.unpack(folder, into)
    files[0].write_bytes(files[0].read_bytes()[: -5 * SET])
    prepare.pack(files[:1], tmp_path / "new", SET // 3)
    sets = sorted((tmp_path / "new").iterdir(), key=lambda folder: int(folder.name))
    assert [len(prepare.unpack(folder, into)) for folder in sets] == list(range(len(sets) - 1, -1, -1))
    whole = into / "files" / "package_a.tar.xz"
    assert whole.read_bytes() == files[0].read_bytes()
    piece = sets[0] / "package_a.tar.xz.0"
    good = piece.read_bytes()
    piece.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"package_a\.tar\.xz is damaged: unpack sets \[1"):
        prepare.unpack(sets[0], into)
    piece.write_bytes(good)
    assert [prepare.unpack(folder, into) for folder in sets][-1] == []
    assert whole.read_bytes() == files[0].read_bytes()


def test_what_cannot_be_done_is_said_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "build", lambda *_: pytest.fail("installs"))
    (tmp_path / "prepared" / "folder").mkdir(parents=True)
    (tmp_path / "carry" / "1").mkdir(parents=True)
    absent = str(tmp_path / "absent")
    into = ["--into", str(tmp_path / "carry")]
    for arguments, message in (
        (["unpack", absent], r"absent/manifest\.json is missing"),
        (["pack", "--prepared", absent], "absent: no such folder"),
        (["pack", "--prepared", str(tmp_path / "prepared")], "make an archive of .*prepared/folder"),
        (["pack", *into], r"carry holds sets already \(1\)"),
    ):
        with pytest.raises(SystemExit, match=message):
            prepare.main(arguments)
    with pytest.raises(SystemExit):
        prepare.main(["pack", "--set-mib", "0"])
    assert "0: a set has at least 1 MiB" in capsys.readouterr().err


def test_unpacked_files_lie_below_the_checkout() -> None:
    """A shared folder could hold another user's env.sh."""
    assert not prepare.INTO.is_absolute()
    assert f". {prepare.INTO}/env.sh" in prepare.report([], Path(".carry"))


def test_the_list_names_each_package_once_with_its_version() -> None:
    lines = carried_site.wanted(te=True)
    names = [line.partition("==")[0] for line in lines]
    assert all(version for _, _, version in (line.partition("==") for line in lines))
    assert len(set(names)) == len(names)
    assert set(carried_site.wanted(te=False)) < set(lines)


def test_the_manifest_travels_with_every_set(files: list[Path], tmp_path: Path) -> None:
    prepare.pack(files, tmp_path / "carry", SET)
    manifests = {(folder / "manifest.json").read_text() for folder in (tmp_path / "carry").iterdir()}
    assert [file["name"] for file in json.loads(manifests.pop())] == [file.name for file in files]
    assert not manifests
