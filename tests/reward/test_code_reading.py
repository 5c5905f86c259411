"""Which files tests of verifier `code` can read, tried by tests that want others."""

import _ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reward.check import check_verifiers
from reward.code import READS, landlock
from reward.code.seccomp import LockError
from reward.config import RewardConfig
from reward.verdict import VerificationRequest, VerifierError
from reward.verifiers import code
from tests.reward.test_code import ADD, ROOT, right
from tests.reward.test_pool import verify

SECRET = "the key"
HOSTILE = {
    "home": "open('HOME/.ssh/id').read()",
    "run as a library": "ctypes.CDLL('HOME/library.so')",
    "listed": "os.listdir('HOME/.ssh')",
    "run folder": "open('HOME/../run/.server-key').read()",
    "sibling": "os.scandir('HOME/../../')",
    "symbolic link": "open('HOME/../shared/link').read()",
    "linked folder": "open('HOME/../shared/folder/id').read()",
    "hard link": "open('HOME/../run/hard').read()",
    "relative": "open('home/.ssh/id').read()",
    "upwards": "open('HOME/../shared/../home/.ssh/id').read()",
    "below a descriptor": "os.open('.ssh/id', os.O_RDONLY, dir_fd=os.open('HOME', os.O_PATH))",
    "opened again": "open(f\"/proc/self/fd/{os.open('HOME/.ssh/id', os.O_PATH)}\").read()",
    "processes": "open('/proc/self/status').read()",
    "users": "open('/etc/passwd').read()",
    "the project": "import reward.code.suite",
    "source": f"open({__file__!r}).read()",
    "a folder beside Python's": f"os.listdir({str(ROOT)!r})",
}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home with a key, beside a run's folder, links to the key, and a folder that may be read."""
    for folder in ("home/.ssh", "run", "shared"):
        (tmp_path / folder).mkdir(parents=True)
    key = tmp_path / "home/.ssh/id"
    for file in (key, tmp_path / "run/.server-key", tmp_path / "shared/open"):
        file.write_text(SECRET)
    shutil.copy(_ctypes.__file__, tmp_path / "home/library.so")
    (tmp_path / "run/hard").hardlink_to(key)
    (tmp_path / "shared/link").symlink_to(key)
    (tmp_path / "shared/folder").symlink_to(key.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(READS, str(tmp_path / "shared"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", HOSTILE)
def test_tests_cannot_read(name, home, monkeypatch):
    """Each can where it is allowed: so it is Landlock that refuses."""
    tests = f"import os, ctypes\n{HOSTILE[name].replace('HOME', str(home))}\nassert add(1, 1) == 2"
    assert not right(ADD, tests=tests)
    monkeypatch.setenv(READS, "/")
    assert right(ADD, tests=tests)


def test_they_see_no_variable_of_the_run(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    assert not right(ADD, tests="open('/proc/self/environ').read()\nassert add(1, 1) == 2")
    assert right(ADD, tests="import os\nassert 'SECRET_TOKEN' not in os.environ\nassert add(1, 1) == 2")


def test_they_have_no_file_that_their_judge_had_open(home):
    """Landlock does not look at what is open."""
    kept = os.dup(0)
    try:
        with open(home / ".ssh/id") as stream:
            os.dup2(stream.fileno(), 0)
            os.set_inheritable(stream.fileno(), True)
            tests = (
                "import os\nfor at in 0, DESCRIPTOR:\n    try: assert os.read(at, 9) == b''\n    except OSError: pass"
            )
            tests = tests.replace("DESCRIPTOR", str(stream.fileno()))
            assert right(ADD, tests=f"{tests}\nassert add(1, 1) == 2")
    finally:
        os.dup2(kept, 0)
        os.close(kept)


ALONE = {
    "read": "open('home/.ssh/id').read()",
    "after chdir": "os.chdir('home'); open('.ssh/id').read()",
    "list": "os.listdir('.')",
    "write": "open('shared/open', 'w').write('forged')",
    "make": "open('shared/new', 'w')",
    "make a folder": "os.mkdir('shared/made')",
    "remove": "os.remove('shared/open')",
    "rename": "os.rename('run/hard', 'shared/hard')",
    "link": "os.link('home/.ssh/id', 'shared/hard')",
    "cut": "os.truncate('shared/open', 0)",
    "execute": "os.execv('/bin/true', ['true'])",
    "processes": "open(f'/proc/{os.getppid()}/environ').read()",
}


@pytest.mark.parametrize("name", ALONE)
def test_landlock_by_itself_refuses(name, home):
    """Without the filter of system calls, which forbids most of it already."""
    program = (
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom reward.code.landlock import confine, readable\n"
        "confine(readable())\nassert open('shared/open').read()\n"
        f"try: {ALONE[name]}\nexcept PermissionError: sys.exit(7)\nexcept OSError as error: sys.exit(repr(error))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    crossed = name in ("rename", "link") and "Invalid cross-device link" in ended.stderr
    assert ended.returncode == 7 or crossed, ended
    assert sorted(os.listdir("shared")) == ["folder", "link", "open"]
    assert Path("shared/open").read_text() == SECRET


def test_a_kernel_without_it_is_told_what_to_set(monkeypatch):
    class NoLandlock:
        def syscall(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(landlock.ctypes, "CDLL", lambda *_, **__: NoLandlock())
    with pytest.raises(LockError, match=r"this kernel refuses its call 444 .* reward.code_reads=\[/\]"):
        landlock.confine(["/usr/lib"])
    landlock.confine(["/usr/lib", "/"])


def test_what_cannot_be_confined_is_refused_before_a_run(tmp_path):
    config = RewardConfig(code_reads=(str(tmp_path / "missing"),))
    with pytest.raises(
        VerifierError, match=r"(?s)reward.verifier = code: .*cannot be run safely here: .*No such file.*missing"
    ):
        check_verifiers({"code": "reward.verifier"}, config)
    check_verifiers({"code": "reward.verifier"}, RewardConfig(code_reads=(str(tmp_path),)))


def test_the_pool_lets_tests_read_what_the_setting_names(make_pool, home):
    tests = f"assert add(open({str(home / '.ssh/id')!r}).read(), '!') == '{SECRET}!'"
    request = VerificationRequest(
        response=f"```python\n{ADD}\n```", ground_truth=json.dumps({"tests": tests}), verifier="code"
    )
    verdicts = [verify(make_pool(timeout_s=20.0, code_reads=reads), request)[0] for reads in ((), (str(home),))]
    assert [verdict.accuracy for verdict in verdicts] == [False, True]
    assert not any(verdict.error for verdict in verdicts)


def test_a_full_disk_makes_no_right_program_wrong(monkeypatch):
    """What programs read and print is kept in memory: a folder that takes no file stands for the disk."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no-such-folder")
    truth = json.dumps({"cases": [{"input": "2 3\n", "output": "5\n"}]})
    response = "```python\nprint(sum(map(int, input().split())))\n```"
    verdict = code.judge(VerificationRequest(response=response, ground_truth=truth))
    assert (verdict.accuracy, verdict.rule) == (True, code.RULE)
