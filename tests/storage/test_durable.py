"""What a kill leaves of files that are replaced or grow by lines, and who holds a folder."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.storage.durable import (
    FolderHeld,
    append_lines,
    drop_torn_line,
    lock_folder,
    remove_folder,
    replace_file,
    replace_folder,
)
from megatron_dapo.storage.run_dir import RunDir, RunDirError
from tests.processes import ROOT


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", b""),
        (b"a\nb\n", b"a\nb\n"),
        (b"a\nb", b"a\n"),
        (b"a", b""),
        (b"a\n\0\0\0", b"a\n"),
        (b"a\n" + b"x" * 70000, b"a\n"),
    ],
    ids=["empty", "whole", "torn", "torn first line", "zeros of a power cut", "long"],
)
def test_whole_lines_stay(tmp_path, left, kept):
    file = tmp_path / "lines"
    file.write_bytes(left)
    drop_torn_line(file)
    assert file.read_bytes() == kept


def test_lines_come_behind_the_last_whole_one(tmp_path):
    with pytest.raises(OSError, match="folder/lines"):  # a run directory that has gone is not made anew elsewhere
        append_lines(tmp_path / "folder" / "lines", ["one"])
    file = tmp_path / "lines"
    append_lines(file, ["one"])
    file.write_text(file.read_text() + "tor")
    append_lines(file, ["two", "three"], durable=True)
    assert file.read_text() == "one\ntwo\nthree\n"


def test_no_file_is_left_alone(tmp_path):
    drop_torn_line(tmp_path / "lines")
    assert not (tmp_path / "lines").exists()


class Killed(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, call):
    file = tmp_path / "file"
    replace_file(file, "before")

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as killed:
        killed.setattr(os, call, kill)
        with pytest.raises(Killed):
            replace_file(file, "after, and longer")
    assert file.read_text() == "before"
    replace_file(file, "after")
    assert file.read_text() == "after"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_private_file_is_readable_by_its_owner_only(tmp_path):
    replace_file(tmp_path / "key", "secret", private=True)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_folder_is_the_old_one_or_the_new_one_or_its_old_one_is_beside_it(tmp_path, monkeypatch, renames):
    folder, partial, rename = tmp_path / "model", tmp_path / "partial", os.rename
    for path, content in ((folder, "old"), (partial, "new")):
        path.mkdir()
        (path / "file").write_text(content)
    left = iter(range(renames))

    def until_killed(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise Killed
        rename(source, target)

    with monkeypatch.context() as killed:
        killed.setattr(os, "rename", until_killed)
        if renames < 2:
            with pytest.raises(Killed):
                replace_folder(partial, folder, durable=True)
        else:
            replace_folder(partial, folder, durable=True)
    found = {path.name: (path / "file").read_text() for path in tmp_path.iterdir()}
    assert (
        found
        == [
            {"model": "old", "partial": "new"},
            {".model.old": "old", "partial": "new"},
            {"model": "new"},
        ][renames]
    )


def test_a_full_disk_is_named_with_the_file(tmp_path):
    (tmp_path / ".file.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*\.file\.tmp'"):
        replace_file(tmp_path / "file", "x")


def test_a_folder_that_somebody_reads_is_gone_under_its_name_all_the_same(tmp_path, monkeypatch):
    """NFS keeps a file that is open, under another name, and its folder with it."""
    (tmp_path / "step_1").mkdir()

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as nfs:
        nfs.setattr(os, "rmdir", busy)
        for _ in range(2):
            (tmp_path / "step_1").mkdir(exist_ok=True)
            remove_folder(tmp_path / "step_1")
    assert not (tmp_path / "step_1").exists()


def test_a_killed_holder_holds_nothing(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from megatron_dapo.storage.durable import lock_folder\n"
        "lock = lock_folder(Path(sys.argv[1])); print(flush=True); time.sleep(100)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(FolderHeld):
        lock_folder(tmp_path)
    holder.kill()
    holder.wait(10)
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_refused_and_nothing_stays(number, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", refuse)
        with pytest.raises(OSError, match=r"has no locks \(flock\).*-o flock"):
            lock_folder(tmp_path)
        with pytest.raises(RunDirError, match=r"run.dir = .*has no locks"):
            RunDir(tmp_path / "run", resume=False)
    RunDir(tmp_path / "run", resume=False).close()
