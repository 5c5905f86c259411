"""What a GPU machine without network gets: cut into sets, put together again in any order, and checked."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.gpu.runner import prepare
from tests.tools.wheels import write_wheel

SET = 1500


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """An archive of a prepared site, and a wheel."""
    inside = tmp_path / "inside" / "prepared_package"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text(f"NOISE = {os.urandom(900).hex()!r}\n")
    archive = tmp_path / "site.tar.xz"
    with tarfile.open(archive, "w:xz") as made:
        made.add(inside, "prepared_package")
    return [archive, tmp_path / write_wheel(tmp_path, "carried-package", "1.0", {"carried_package/__init__.py": ""})]


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
    code = "import carried_package, prepared_package as p; print(carried_package.__file__, p.__file__, sep='\\n')"
    sourced = ["sh", "-c", '. "$0" && exec "$1" -c "$2"', str(into / "env.sh"), sys.executable, code]
    found = subprocess.run(sourced, capture_output=True, text=True, timeout=60)
    assert found.stdout.splitlines() == [
        str(into / "site" / "carried_package" / "__init__.py"),
        str(into / "prepared" / "prepared_package" / "__init__.py"),
    ], found.stderr


def test_a_damaged_file_is_named(files: list[Path], tmp_path: Path) -> None:
    prepare.pack(files, tmp_path / "carry", 1 << 20)
    folder = tmp_path / "carry" / "1"
    piece = folder / "site.tar.xz.0"
    piece.write_bytes(piece.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"site\.tar\.xz is damaged"):
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
    whole = into / "files" / "site.tar.xz"
    assert whole.read_bytes() == files[0].read_bytes()
    piece = sets[0] / "site.tar.xz.0"
    good = piece.read_bytes()
    piece.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"site\.tar\.xz is damaged: unpack sets \[1"):
        prepare.unpack(sets[0], into)
    piece.write_bytes(good)
    assert [prepare.unpack(folder, into) for folder in sets][-1] == []
    assert whole.read_bytes() == files[0].read_bytes()


def test_what_cannot_be_done_is_said_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "download", lambda *_: pytest.fail("downloads"))
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
    lines = prepare.wanted(te=True)
    names = [line.partition("==")[0] for line in lines]
    assert all(version for _, _, version in (line.partition("==") for line in lines))
    assert len(set(names)) == len(names)
    assert set(prepare.wanted(te=False)) < set(lines)


def test_the_manifest_travels_with_every_set(files: list[Path], tmp_path: Path) -> None:
    prepare.pack(files, tmp_path / "carry", SET)
    manifests = {(folder / "manifest.json").read_text() for folder in (tmp_path / "carry").iterdir()}
    assert [file["name"] for file in json.loads(manifests.pop())] == [file.name for file in files]
    assert not manifests
