"""`unshare -rm python -m tests.small_disk FOLDER MEGABYTES ARGUMENTS ...`: train on a disk that fills up.

FOLDER/disk is a file system of that size in a mount namespace of this process's own. The run there is given its
ARGUMENTS, and once more with `run.resume=true` when the disk has been made larger; then it is copied to FOLDER/run.
Prints how each ended.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.processes import Running


def main() -> None:
    folder, size, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(disk)], check=True)
    for more in ((), ("run.resume=true",)):
        log = folder / "out.txt"
        finished = Running("train", *arguments, f"run.dir={disk / 'run'}", *more, log=log).finish(300)
        print(f"{finished.output}\nexit code {finished.code}, left behind: {len(finished.left_behind)}", flush=True)
        print((disk / "run" / "status.json").read_text())
        subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
    shutil.copytree(disk / "run", folder / "run")


if __name__ == "__main__":
    main()
