"""The lock of a folder: one holder, none after a kill, and no makeshift where the file system has no locks."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from megatron_dapo.storage.folder_lock import FolderHeld, lock_folder
from megatron_dapo.storage.run_dir import RunDir, RunDirError
from tests.processes import ROOT


def test_a_killed_holder_holds_nothing(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from megatron_dapo.storage.folder_lock import lock_folder\n"
        "lock = lock_folder(Path(sys.argv[1])); print(flush=True); time.sleep(100)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(FolderHeld):
        lock_folder(tmp_path)
    holder.kill()
    holder.wait(10)
    lock_folder(tmp_path).release()


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
