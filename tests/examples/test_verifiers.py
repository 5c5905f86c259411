"""One small example for each verifier beyond mathematics: data, truths, commands, and a run over all of them."""

import itertools
import json
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

import forms
import make_verifier_data
import service
from examples.verifiers import shown_work
from forms import Kind
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config, load_config
from megatron_dapo.storage.ledger import read_ledger
from reward.registry import load
from reward.verdict import Judgement, VerificationRequest, VerifierError
from task import Split
from tests.ledger_check import check_ledger
from tests.processes import ROOT, Running

FOLDER = ROOT / "examples" / "verifiers"
VERIFIERS = load_config(FOLDER / "mixture.yaml").reward.by_source


def judged(kind: Kind, response: str, truth: object) -> bool:
    """The verdict that a run would give."""
    text = truth if isinstance(truth, str) else json.dumps(truth)
    if kind is Kind.SERVICE:
        return bool(service.verdict("", response, text)["accuracy"])
    verdict = load(VERIFIERS[kind])(VerificationRequest(response=response, ground_truth=text))
    assert isinstance(verdict, Judgement)
    return verdict.accuracy


def test_every_source_has_a_verifier_of_its_own():
    assert set(VERIFIERS) == set(Kind)
    assert len(set(VERIFIERS.values())) == len(Kind)


def test_the_files_come_out_the_same_again(tmp_path):
    for written in make_verifier_data.make_data(tmp_path):
        assert written.read_bytes() == (FOLDER / "data" / written.name).read_bytes()


@pytest.mark.parametrize("kind", Kind)
def test_the_good_response_is_right_and_others_are_wrong(kind):
    made = list(itertools.islice(forms.forms(kind, Split.HELDOUT, seed=1), 4))
    for form, other in itertools.pairwise(made):
        assert judged(kind, form.response, form.truth), form
        if form.truth != other.truth:
            assert not judged(kind, other.response, form.truth), (form, other)
        assert not judged(kind, "", form.truth)
        assert not judged(kind, form.response[: len(form.response) // 2], form.truth)


def test_a_program_is_tested_beyond_the_number_of_its_story():
    form = next(forms.forms(Kind.PROGRAMS, Split.TRAIN, seed=0))
    result = re.search(r"== (-?\d+)$", form.truth["tests"], re.MULTILINE)[1]
    assert not judged(Kind.PROGRAMS, f"```\ndef f(n):\n return {result}\n```", form.truth)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("16-5=11\n11+2=13\nAnswer: 13", True),
        ("Answer: 13", False),
        ("16-5=12\n11+2=13\nAnswer: 13", False),
        ("16-5=11\nAnswer: 13", False),
        ("wait\n11+2=13\nAnswer: 13", False),
        ("11+2=13\nAnswer: 12", False),
        ("11+2=13", False),
    ],
)
def test_work_must_be_shown_and_true(response, right):
    assert shown_work.judge(VerificationRequest(response=response, ground_truth="13")).accuracy is right


def test_a_truth_that_the_function_cannot_use_is_an_error():
    with pytest.raises(VerifierError, match="no whole number"):
        shown_work.judge(VerificationRequest(response="Answer: 1", ground_truth="one"))


def commands() -> list[list[str]]:
    """Every training command of the README, word by word."""
    lines = (FOLDER / "README.md").read_text().replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines if " train " in line and line.startswith(("megatron-dapo", "python"))]


def configured(words: list[str]) -> Config:
    at = words.index("train")
    assert words[at - 1] == "megatron-dapo"
    return load_config(ROOT / words[at + 1], words[at + 2 :])


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[-1])
def test_every_command_of_the_readme_has_a_valid_config_and_files(words):
    config = configured(words)
    files = [config.evaluation.path, *([config.data.path] if config.data.path else [])]
    files += [source.path for source in config.data.mixture]
    for name in [*files, f"{config.model.path}/model.safetensors"]:
        assert (ROOT / name).is_file(), name
    served = "remote" in (config.reward.verifier, *config.reward.by_source.values())
    assert served == (words[:2] == ["python", "examples/verifiers/service.py"])
    if served:
        assert config.reward.remote.url == f"http://127.0.0.1:{service.PORT}"


def test_the_readme_has_a_command_for_each_verifier():
    configs = [configured(words) for words in commands()]
    assert {config.reward.verifier for config in configs} == {*VERIFIERS.values(), "robust"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_mixture_trains_every_source(tmp_path):
    """Two rollout steps with real parts: no source is all right or all wrong, and no verdict fails."""
    port = free_port()
    overrides = (
        f"run.dir={tmp_path / 'run'}",
        "run.rollout_steps=2",
        "algorithm.prompts_per_step=12",
        "algorithm.mini_batch_responses=48",
        "evaluation.limit=5",
        "monitor.sample_responses=200",
        f"reward.remote.url=http://127.0.0.1:{port}",
    )
    config = FOLDER / "mixture.yaml"
    command = ["-m", "megatron_dapo.cli.main", "train", str(config), *overrides]
    serve = ("--port", str(port), sys.executable, *command)
    running = Running(*serve, module="examples.verifiers.service", log=tmp_path / "log.txt")
    steps = trained(running, tmp_path / "run", limit_s=500)
    assert [step["sampling/kept"] for step in steps] == [12, 12]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["source"]: sample["verifier"] for sample in samples} == VERIFIERS


def trained(running: Running, run: Path, limit_s: float) -> list[dict[str, float]]:
    """The metrics of every step of a run that has ended well, each with a gradient and without a failed verdict."""
    finished = running.finish(limit_s)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    check_ledger(read_ledger(run / "ledger.jsonl"))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(step["verdict_errors"] == 0 and step["grad_norm"] > 0 for step in steps)
    return steps


ALONE = [words for words in commands() if "examples/quickstart/dapo.yaml" in words]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", ALONE, ids=[configured(words).reward.verifier for words in ALONE])
def test_each_source_trains_alone(words, tmp_path):
    """The README's command for one source, word by word but for its size: one step in the quickstart's frame."""
    port = free_port()
    size = (
        f"run.dir={tmp_path / 'run'}",
        "run.rollout_steps=1",
        "algorithm.prompts_per_step=8",
        "algorithm.mini_batch_responses=32",
        "evaluation.limit=5",
        "monitor.sample_responses=200",
    )
    at = words.index("train")
    if words[0] == "python":
        command = (sys.executable, "-m", "megatron_dapo.cli.main", *words[at:], *size)
        serve = ("--port", str(port), *command, f"reward.remote.url=http://127.0.0.1:{port}")
        running = Running(*serve, module="examples.verifiers.service", log=tmp_path / "log.txt")
    else:
        running = Running(*words[at:], *size, log=tmp_path / "log.txt")
    steps = trained(running, tmp_path / "run", limit_s=800)
    assert [step["sampling/kept"] for step in steps] == [8]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["verifier"] for sample in samples} == {configured(words).reward.verifier}
    assert {sample["accuracy"] for sample in samples} == {True, False}
