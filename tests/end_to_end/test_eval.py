"""`megatron-dapo eval` with real servers: killed and gone on, refused where it would mix, and beside a training run."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.cli.main import main
from megatron_dapo.cluster.engines import KEY_FILE
from megatron_dapo.cluster.heartbeat import read_heartbeat
from megatron_dapo.monitor.console import Count
from tests.processes import ROOT, Running

CONFIG = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
ASKED = ("evaluation.limit=10", "evaluation.greedy=false", "rollout.deterministic=true", "rollout.servers=1")
pytestmark = pytest.mark.timeout(600)


def evaluate(folder: Path, *arguments: str, target: str = CONFIG) -> Running:
    return Running("eval", target, *ASKED, *arguments, log=folder / f"eval{time.monotonic_ns()}.txt")


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An undisturbed evaluation of the quickstart's base: 10 problems, 12 responses each."""
    out = tmp_path_factory.mktemp("eval") / "whole"
    finished = evaluate(out.parent, "evaluation.samples=12", "--out", str(out)).finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    return out


def test_the_result_has_figures_with_intervals(whole):
    result = json.loads((whole / "result.json").read_text())
    sampled = result["ways"]["sampled"]
    assert (sampled["problems"], sampled["samples"]) == (10, 12)
    assert list(sampled["figures"]) == ["avg@12", "pass@1", "pass@2", "pass@4", "pass@8", "pass@12", "cons@12"]
    rising = [sampled["figures"][f"pass@{k}"]["value"] for k in (1, 2, 4, 8, 12)]
    assert rising == sorted(rising)
    assert 0 < rising[0] < rising[-1], "the base solves some of them, and not all at once"
    assert all(f["low"] <= f["value"] <= f["high"] for f in sampled["figures"].values())
    problems = records(whole / "problems.jsonl")
    assert len(problems) == 10
    assert {len(problem["correct"]) for problem in problems} == {12}


def test_it_says_what_it_starts_and_its_state_is_in_a_file(whole):
    log = next(whole.parent.glob("eval*.txt")).read_text()
    assert log.index("starting 1 server(s)") < log.index("servers ready after")
    state = read_heartbeat(whole)
    assert (state.state, state.progress) == ("finished", {"evaluation": Count(120, 120, "responses")})
    assert not (whole / KEY_FILE).exists(), "its servers have ended"


@pytest.mark.slow
def test_after_a_kill_only_what_is_missing_is_asked_for(whole, tmp_path):
    out = tmp_path / "killed"
    first = evaluate(tmp_path, "evaluation.samples=6", "rollout.servers=2", "--out", str(out))
    deadline = time.monotonic() + 200
    while len(records(out / "responses.jsonl")) < 5 and first.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    first.signal(signal.SIGKILL)
    assert first.finish(60).left_behind == (), "the servers end with their evaluation"
    kept = (out / "responses.jsonl").read_bytes()
    finished = evaluate(tmp_path, "evaluation.samples=12", "--out", str(out)).finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert "of 120 responses are there already" in finished.output
    assert (out / "responses.jsonl").read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    asked = [(line["problem"], line["sample"]) for line in records(out / "responses.jsonl")]
    assert len(asked) == len(set(asked)) == 120, "every response once"
    assert records(out / "problems.jsonl") == records(whole / "problems.jsonl"), "as if it had never been killed"


@pytest.mark.slow
def test_responses_of_other_settings_are_not_mixed_in(whole, tmp_path):
    refused = evaluate(tmp_path, "evaluation.samples=12", "evaluation.temperature=0.5", "--out", str(whole))
    finished = refused.finish(200)
    assert finished.code == ExitCode.CONFIG
    assert "made with temperature = 1.0, not 0.5" in finished.output
    assert finished.left_behind == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/nowhere/dapo.yaml",), "/nowhere/dapo.yaml: No such file or directory; give a YAML file"),
        ((str(ROOT / "examples"),), "examples/config.yaml: No such file"),
        ((CONFIG, "--model", str(ROOT / "docs")), "tools.convert_checkpoint makes one"),
        ((CONFIG, "evaluation.path=nowhere.jsonl"), "evaluation.path"),
    ],
)
def test_what_cannot_be_evaluated_is_said(refused, arguments, words):
    assert words in refused(*arguments)


@pytest.fixture
def refused(monkeypatch, capfd) -> Callable[..., str]:
    """What the command says before it ends with a wrong config's exit code; in this process, for it starts nothing."""

    def call(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["megatron-dapo", "eval", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == ExitCode.CONFIG
        return "".join(capfd.readouterr())

    return call
