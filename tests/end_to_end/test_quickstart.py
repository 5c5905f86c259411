"""The whole loop with its real parts: Megatron-Core at TP=2, an SGLang server, Ray. Two rollout steps of small
batches."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import pytest
from safetensors import safe_open

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.plan.scenario import load_calibration
from megatron_dapo.storage.ledger import effective_events, read_ledger
from tests.ledger_check import check_ledger
from tests.processes import ROOT, Running
from tools.profile_throughput import main as profile

STEPS = 2
SMALL = (
    "run.rollout_steps=3",
    "run.checkpoint_every=1",
    "algorithm.prompts_per_step=6",
    "algorithm.mini_batch_responses=16",
    "evaluation.limit=12",
    "rollout.deterministic=true",
    "monitor.timeline_every=2",
    "actor.layout.tensor=2",
    "actor.layout.data=1",
    "rollout.servers=1",
)
SHORT = f"run.rollout_steps={STEPS}"
BY_TIME = ("run.checkpoint_every=0", "run.checkpoint_minutes=0.001")
pytestmark = pytest.mark.timeout(600)


def start(run_dir: Path, *overrides: str, module: str = "megatron_dapo.cli.main") -> Running:
    config = ROOT / "examples" / "quickstart" / "dapo.yaml"
    arguments = ["train", str(config), f"run.dir={run_dir}", *SMALL, *overrides]
    return Running(*arguments, log=run_dir.parent / f"{run_dir.name}-{uuid.uuid4().hex[:6]}.txt", module=module)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finished = start(run_dir, SHORT).finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    (run_dir.parent / "said.txt").write_text(finished.output)
    return run_dir


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_start_says_what_it_starts_and_what_is_ready(whole):
    text = (whole.parent / "said.txt").read_text()
    first = ("reading model", "starting trainer and servers: Ray, 2 trainer rank(s), 1 server(s)", "Ray ready after")
    places = [text.index(words) for words in (*first, "trainer ready after", "held-out problems before")]
    assert places == sorted(places)
    assert places[1] < text.index("servers ready after") < places[-1]


def test_the_run_directory_holds_what_the_docs_say(whole):
    for name in ("config.yaml", "manifest.json", "summary.json", "samples.jsonl", "tensorboard", "model"):
        assert (whole / name).exists(), name
    assert not (whole / ".server-key").exists(), "code that is tested later could read it"
    assert {"trainer-rank0.log", "trainer-rank1.log"} <= {file.name for file in (whole / "logs").iterdir()}
    assert any("server" in file.name for file in (whole / "logs").iterdir())
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["versions"]["megatron-core"]
    assert manifest["versions"]["sglang"]
    assert len(manifest["data"]["train"]["sha256"]) == 64
    assert manifest["folder"] == str(ROOT)


def test_every_step_has_its_metrics(whole):
    steps = lines(whole)
    assert [step["rollout_step"] for step in steps] == [1, 2]
    assert [step["optimizer_step"] for step in steps] == [3, 6]
    assert [step["weight_version"] for step in steps] == [1, 2]
    for step in steps:
        assert 0 <= step["accuracy/mean"] <= 1
        assert step["response_length/mean"] <= step["response_length/max"]
        assert step["sampling/kept"] == 6
        assert step["mismatch/max_abs"] < 1e-3, "engine and trainer must agree on the same tokens (float32)"
        assert 0 < step["grad_norm"] < 100
        assert step["timing/step"] > step["timing/rollout"] + step["timing/update"]


def test_the_recorded_step_is_profiled_traced_and_calibrates_the_planner(whole, tmp_path):
    trace, constants, report = tmp_path / "trace.json", tmp_path / "mine.yaml", tmp_path / "report"
    arguments = ["--peak-flops", "5e10", "--memory-bandwidth", "1e10", "--trace", str(trace), "--out", str(report)]
    assert profile([str(whole), *arguments, "--calibration", str(constants)]) == 0
    (found,) = json.loads(report.with_name("report.json").read_text())
    assert found["recorded_steps"] == [2]
    figures = found["figures"]
    assert 0.1 < figures["compute"] <= 1, "much of an update is passes, on a busy machine too"
    assert 0 < figures["communication"] < 1
    assert 0 <= figures["rollout_tail"] <= 1
    assert figures["peak_memory"] is None, "CUDA's allocator alone tells it"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"calls", "update", "phases", "slot 0"} <= {event["args"].get("name") for event in events}
    measured = load_calibration(constants)
    assert measured.mean_response < 64
    assert measured.decode_overhead > 0


def test_every_evaluation_has_its_problems(whole):
    for name in ("before", "baseline", "after"):
        folder = whole / "evaluations" / name
        lines = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
        assert [line["way"] for line in lines] == ["sampled"] * 12 + ["greedy"] * 12
    summary = json.loads((whole / "summary.json").read_text())
    result = json.loads((whole / "evaluations" / "after" / "result.json").read_text())
    mean = result["ways"]["greedy"]["figures"]["avg@1"]["value"]
    assert mean == pytest.approx(summary["heldout"]["after"]["greedy"]["accuracy"])


def test_summary_has_held_out_accuracies_with_intervals(whole):
    summary = json.loads((whole / "summary.json").read_text())
    for when in ("before", "after"):
        for way in ("greedy", "sampled"):
            figures = summary["heldout"][when][way]
            assert figures["n"] == 12
            assert 0 <= figures["low"] <= figures["accuracy"] <= figures["high"] <= 1
    assert summary["seconds"]["training"] > 0
    assert len(summary["examples"]) == 3
    lines = [json.loads(line) for line in (whole / "evaluations" / "after" / "problems.jsonl").read_text().splitlines()]
    greedy = [line["correct"] for line in lines if line["way"] == "greedy"]  # as `ask` answers
    assert [[example["after_correct"]] for example in summary["examples"]] == greedy[:3]


def test_the_ledger_accounts_for_every_prompt(whole):
    events = read_ledger(whole / "ledger.jsonl")
    fates = check_ledger(events)
    assert set(fates.values()) <= {"trained", "filtered", "carried"}
    trained = [event["prompt"] for event in events if event["event"] == "trained"]
    assert len(trained) == len(set(trained)) == 6 * STEPS
    assert trained == sorted(trained)
    assert sum(event["event"] == "checkpoint" for event in events) == STEPS


def test_the_exported_model_is_new_and_loads(whole):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(whole / "model")
    assert weights(whole / "model") != weights(ROOT / "examples" / "quickstart" / "base")


def weights(folder: Path) -> dict[str, bytes]:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("then", ["", pytest.param("loses a rank", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_ends_with_the_same_weights_bit_for_bit(whole, tmp_path, then):
    """Law 4, with real parts: the same prompts in the same order, none lost, none trained twice, equal weights. Its
    checkpoints are those that time alone asks for."""
    run_dir = tmp_path / "run"
    running = start(run_dir, SHORT, *BY_TIME)
    running.wait_for(f"step 1/{STEPS}", 240)
    deadline = time.monotonic() + 60
    while not (run_dir / "checkpoints" / "latest").exists():  # written beside training
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert status_without_key(run_dir) == 401, "other users of the machine reach the same port"
    running.signal(signal.SIGKILL)
    killed = running.finish(60)
    assert killed.code == -signal.SIGKILL
    assert killed.left_behind == (), "a killed coordinator must not leave servers or ranks behind"

    running = start(run_dir, SHORT, *BY_TIME, "run.resume=true")
    if then == "loses a rank":
        deadline = time.monotonic() + 240
        while not running.named("ray::TrainerRank"):  # killed as soon as it is there: its start costs as much as a step
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running.kill_one("ray::TrainerRank")
    resumed = running.finish(300)
    assert resumed.code == ExitCode.FINISHED, resumed.output
    assert ("starting again after rollout step" in resumed.output) == (then == "loses a rank")
    assert resumed.left_behind == ()
    check_ledger(read_ledger(run_dir / "ledger.jsonl"))
    assert fates(run_dir) == fates(whole)
    assert weights(run_dir / "model") == weights(whole / "model")


def status_without_key(run_dir: Path) -> int:
    """What the run's server says to a caller without its key; its log does not hold the key either."""
    log = (run_dir / "logs" / "server0.log").read_text()
    assert (run_dir / ".server-key").read_text() not in log
    (port,) = re.findall(r"--port (\d+)", log)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info", timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def fates(folder: Path) -> list[tuple]:
    events = effective_events(read_ledger(folder / "ledger.jsonl"))
    return [(e["event"], e["prompt"], e["rollout_step"]) for e in events if e["event"] in ("trained", "filtered")]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["disk", "tensor"])
def test_colocated_trainer_and_server_end_with_the_same_weights_bit_for_bit(whole, tmp_path, sync):
    """Each side leaves its memory while the other works; what it computes is the same."""
    run_dir = tmp_path / "run"
    colocated = "run.mode=colocated", "actor.offload.between_phases=all", f"rollout.weight_sync={sync}"
    finished = start(run_dir, SHORT, *colocated).finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    assert fates(run_dir) == fates(whole)
    assert weights(run_dir / "model") == weights(whole / "model")
    assert all(step["timing/handover"] > 0.002 for step in lines(run_dir)), "servers were not told to leave"
    assert all(step["timing/handover"] < 0.002 for step in lines(whole))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken_bit_for_bit(whole, tmp_path):
    """A missing file stops the run before anything starts; one that the ranks find cut short is gone behind."""
    run_dir = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    newest = run_dir / "checkpoints" / f"step_{STEPS}"
    longer = ("run.resume=true", f"run.rollout_steps={STEPS + 1}")
    carried = (newest / "progress.npz").read_bytes()
    (newest / "progress.npz").unlink()
    stopped = start(run_dir, *longer).finish(60)
    assert stopped.code == ExitCode.CONFIG, stopped.output
    assert "progress.npz is missing" in stopped.output
    command = re.search(r"continue with: (megatron-dapo train .*)", stopped.output)
    assert command, stopped.output
    assert command[1].endswith(f"run.rollout_steps={STEPS + 1} run.resume=true run.resume_step={STEPS - 1}")

    (newest / "progress.npz").write_bytes(carried)
    shard = newest / "actor" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    resumed = start(run_dir, *longer, "run.on_damaged_checkpoint=take_older").finish(300)
    assert resumed.code == ExitCode.FINISHED, resumed.output
    assert f"{shard} is damaged" in resumed.output
    assert resumed.left_behind == ()
    check_ledger(read_ledger(run_dir / "ledger.jsonl"))
    assert [fate for fate in fates(run_dir) if fate[2] <= STEPS] == fates(whole)
    again = next(line for line in lines(run_dir)[STEPS:] if line["rollout_step"] == STEPS)
    before = lines(whole)[STEPS - 1]
    assert {name: again[name] for name in ("loss", "grad_norm", "reward/mean")} == {
        name: before[name] for name in ("loss", "grad_norm", "reward/mean")
    }
    assert (run_dir / "checkpoints" / f"set_aside.step_{STEPS}").is_dir()


def private_mounts() -> bool:
    """Whether this system lets its users have mount namespaces of their own."""
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-rm", "true"]).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not private_mounts(), reason="needs unshare -rm (user namespaces)")
def test_a_full_disk_ends_the_run_with_its_checkpoint_whole(whole, tmp_path):
    """The disk holds one checkpoint of 14 MB but not a second one; made larger, the run goes on as if nothing was."""
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.small_disk", str(tmp_path), "30", config, *SMALL, SHORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.split('"state": "failed"')
    assert f"exit code {ExitCode.TRAINER:d}, left behind: 0" in first
    # Two ranks write at once: either may find the disk full, or both.
    assert re.search(r"the checkpoint could not be written: rank [01]: \[Errno 28\] No space left on device", first), (
        first
    )
    assert f"exit code {ExitCode.FINISHED:d}, left behind: 0" in second
    assert fates(tmp_path / "run") == fates(whole)
    assert weights(tmp_path / "run" / "model") == weights(whole / "model")


def test_an_interrupt_ends_everything(tmp_path):
    run_dir = tmp_path / "run"
    running = start(run_dir)
    running.wait_for("starting trainer and servers", 60)
    running.signal(signal.SIGINT)
    finished = running.finish(60)
    assert finished.code == ExitCode.CONTINUE, finished.output
    assert finished.left_behind == ()
    assert "run.resume=true" in finished.output
