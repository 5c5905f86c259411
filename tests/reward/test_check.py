"""What is refused before the first response is written."""

import time
from contextlib import suppress

import psutil
import pytest

from reward import check
from reward.check import check_ground_truth, check_verifiers
from reward.config import RemoteConfig, RewardConfig
from reward.registry import load
from reward.verdict import VerifierError


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nomod:fn", "import of nomod failed: ModuleNotFoundError"),
        ("tests.reward.hostile:nothing", "no function or class nothing"),
        ("robst", "did you mean 'robust'"),
        ("remote", "reward.remote.url is not set"),
        ("json", ""),
        ("code", ""),
        ("tests.reward.hostile:judge", ""),
        ("robust", ""),
    ],
)
def test_a_verifier_that_cannot_run_is_refused_with_who_names_it(name, reason):
    names = {"choice": "reward.verifier", name: "train.jsonl:17"}
    if not reason:
        check_verifiers(names, RewardConfig())
        return
    with pytest.raises(VerifierError) as error:
        check_verifiers(names, RewardConfig())
    assert str(error.value).startswith("train.jsonl:17")
    assert reason in str(error.value)


def test_a_module_that_ends_its_process_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nprint('{}')\nsys.exit('bye')\n")
    (tmp_path / "leaves_quietly.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "leaves_hard.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "talks.py").write_text(
        "import atexit\nprint('hello')\natexit.register(print, 'bye')\ndef judge(request): return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VerifierError, match="import of leaves_quietly failed: SystemExit"):
        check_verifiers({"leaves_quietly:f": "reward.verifier"}, RewardConfig())
    with pytest.raises(VerifierError, match="exit code 0"):
        check_verifiers({"leaves_hard:f": "reward.verifier"}, RewardConfig())
    with pytest.raises(VerifierError, match="import of leaves_quietly failed"):
        load("leaves_quietly:f")
    with pytest.raises(VerifierError, match=r"(?s)reward\.verifier = leaves_at_once:f: .*exit code 1: .*bye"):
        check_verifiers({"leaves_at_once:f": "reward.verifier"}, RewardConfig())
    check_verifiers({"talks:judge": "reward.verifier"}, RewardConfig())


def test_what_an_import_starts_neither_delays_the_trial_nor_outlives_it(tmp_path, monkeypatch):
    (tmp_path / "with_a_server.py").write_text(
        "import subprocess\nfrom pathlib import Path\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(subprocess.Popen(['sleep', '300']).pid))\n"
        "def judge(request): return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    check_verifiers({"with_a_server:judge": "reward.verifier"}, RewardConfig())
    assert time.monotonic() - began < 60
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        while child.status() != "zombie":
            assert time.monotonic() - began < 60, "it is still there"
            time.sleep(0.05)


def test_one_that_raises_is_tried_for_as_long_as_any_other_and_may_end_its_process(tmp_path, monkeypatch):
    (tmp_path / "raises_slowly.py").write_text(
        "import sys, time\ndef judge(request):\n    time.sleep(0.2)\n    sys.exit('usage')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check, "START_LIMIT_S", 30.0)
    truths = [(f"a:{line}", "?", "7") for line in range(1000)]
    began = time.monotonic()
    check_verifiers({"raises_slowly:judge": "reward.verifier"}, RewardConfig(), {"raises_slowly:judge": truths})
    assert time.monotonic() - began < 25


def test_an_error_is_not_hidden_behind_what_the_module_prints(tmp_path, monkeypatch):
    (tmp_path / "chatters.py").write_text("print('x' * 5000)\nraise ValueError('no key')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VerifierError, match="ValueError: no key"):
        check_verifiers({"chatters:judge": "reward.verifier"}, RewardConfig())


TRIED = {
    "truths": """
from reward.verdict import Judgement, VerifierError
def judge(request):
    if not request.ground_truth.isdigit():
        raise VerifierError(f"ground truth {request.ground_truth!r} is no integer")
    return Judgement(accuracy=request.response == request.ground_truth, extracted=request.response, rule="own")
""",
    "boom": "def judge(request): raise ValueError('boom')",
    "two": "def judge(request, truth): return True",
    "slips": "def judge(request): return request['response'] == '1'",
    "slips_once": "def judge(request): return [None, 1][int(request.ground_truth)] + 1 > 0",
    "sometimes": "def judge(request): return 1 / int(request.ground_truth) > 0",
    "a_dict": "def judge(request): return {'score': 1.0}",
    "points": """
from reward.verdict import Judgement
def judge(request): return Judgement(accuracy=0.7, extracted=None, rule="")
""",
    "a_number": """
from reward.verdict import Judgement
def judge(request): return Judgement(accuracy=True, extracted=5, rule="")
""",
    "unknown": "def judge(request): return nobody",
    "reads": "import sys\nsys.stdin.read()\ndef judge(request): return True",
    "threads": """
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
def judge(request): return True
""",
    "hangs": "import re\ndef judge(request): return bool(re.match(r'(a+)+$', 'a' * 60 + 'b'))",
}


@pytest.mark.parametrize(
    ("module", "truths", "reason"),
    [
        ("truths", ["1", "2"], ""),
        ("truths", ["1", "seven"], "rows:2: ground truth 'seven' is no integer"),
        ("boom", ["1", "2"], ""),  # it may want a form that a ground truth alone does not have
        ("two", ["1", "2"], "TypeError: judge() missing 1 required"),
        ("slips", ["1"], "TypeError: 'VerificationRequest' object is not subscriptable"),
        ("slips_once", ["0", "1"], ""),
        ("unknown", ["1"], "NameError: name 'nobody' is not defined"),
        ("reads", ["1"], ""),
        ("threads", ["1"], ""),
        ("sometimes", ["0", "1"], ""),
        ("a_dict", ["1"], "it returned {'score': 1.0}, not a Judgement (accuracy True or False, extracted a text"),
        ("points", ["1"], "it returned Judgement(accuracy=0.7, extracted=None, rule=''), not a Judgement (accuracy"),
        ("a_number", ["1"], "it returned Judgement(accuracy=True, extracted=5, rule=''), not a Judgement (accuracy"),
        ("hangs", ["1"], "no verdict on a ground truth in reward.timeout_s = 5\nTimeout (0:00:05)"),
    ],
)
def test_an_own_verifier_is_tried_on_the_ground_truths_it_will_have(module, truths, reason, tmp_path, monkeypatch):
    (tmp_path / f"own_{module}.py").write_text(TRIED[module])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check, "START_LIMIT_S", 60.0)
    name = f"robust + 0.5 * own_{module}:judge"
    rows = [(f"rows:{number}", "a prompt", truth) for number, truth in enumerate(truths, 1)]
    if not reason:
        check_verifiers({name: "reward.verifier"}, RewardConfig(), {name: rows})
        return
    with pytest.raises(VerifierError) as error:
        check_verifiers({name: "reward.verifier"}, RewardConfig(), {name: rows})
    assert str(error.value).startswith(f"reward.verifier = own_{module}:judge: ")
    assert reason in str(error.value)


def test_a_service_with_an_address_is_not_asked():
    check_verifiers({"remote": "x"}, RewardConfig(remote=RemoteConfig(url="http://127.0.0.1:1/")))


@pytest.mark.parametrize(
    ("name", "truth", "good"),
    [
        ("robust", "42", True),
        ("robust", "$$", False),
        ("exact", "4" * 5000, False),
        ("choice", "B", True),
        ("choice", "Paris", False),
        ("json", '{"equals": 1}', True),
        ("json", '{"schema": {"type": 7}}', False),
        ("json", '{"schema": {"$ref": "http://127.0.0.1:1/schema"}}', False),
        ("json", "42", False),
        ("remote", "", True),
        ("code", '{"tests": "assert f() == 1"}', True),
        ("code", '{"tests": "assert f( == 1"}', False),
        ("tests.reward.hostile:die", "", True),
    ],
)
def test_a_ground_truth_that_its_verifier_cannot_use(name, truth, good):
    if good:
        check_ground_truth(name, truth)
        return
    with pytest.raises(VerifierError):
        check_ground_truth(name, truth)
