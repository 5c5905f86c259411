"""Responses on disk: none is lost, none is asked for twice, none of another evaluation is taken over."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.diagnostics.evaluation_session import (
    RESPONSES,
    EvaluationError,
    ResponseLog,
    answer_settings,
    evaluate,
    weight_labels,
)
from megatron_dapo.experience.evaluation import Answer
from megatron_dapo.monitor.console import Console
from megatron_dapo.storage.durable import FolderHeld, lock_folder
from tests.processes import ROOT
from tests.rollout.fleet_kit import fleet_of, run
from tests.rollout.standin import StandIn

QUICKSTART = ROOT / "examples" / "quickstart" / "dapo.yaml"
HELD = QUICKSTART.parent / "data" / "heldout.jsonl"

SETTINGS = {"weights": {"fingerprint": "a"}, "temperature": 1.0, "stop_token_ids": [2]}
ANSWER = Answer(text="so \ud800 Answer: 42", tokens=3, truncated=False, correct=True, extracted="42", error=None)


def write(folder, count):
    log = ResponseLog(folder, SETTINGS)
    for sample in range(count):
        log.add(("sampled", "p", sample), ANSWER)


def test_what_was_added_is_known_to_the_next_start(tmp_path):
    write(tmp_path, 2)
    known = {("sampled", "p", 0): ANSWER, ("sampled", "p", 1): ANSWER}
    assert ResponseLog(tmp_path, SETTINGS).known == known


def test_a_torn_last_line_is_asked_for_again(tmp_path):
    write(tmp_path, 3)
    file = tmp_path / RESPONSES
    file.write_bytes(file.read_bytes()[:-20])
    log = ResponseLog(tmp_path, SETTINGS)
    assert len(log.known) == 2
    log.add(("sampled", "p", 2), ANSWER)
    assert len(ResponseLog(tmp_path, SETTINGS).known) == 3


def test_a_broken_line_is_named(tmp_path):
    write(tmp_path, 2)
    file = tmp_path / RESPONSES
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(EvaluationError, match=r"responses\.jsonl:1: no response"):
        ResponseLog(tmp_path, SETTINGS)


@pytest.mark.parametrize("changed", [{"weights": {"fingerprint": "b"}}, {"temperature": 0.5}])
def test_responses_of_other_weights_or_settings_are_not_taken_over(tmp_path, changed):
    write(tmp_path, 1)
    with pytest.raises(EvaluationError, match=f"made with {next(iter(changed))} = .*another --out"):
        ResponseLog(tmp_path, SETTINGS | changed)


@pytest.mark.parametrize("content", [b'{"weights"', b"\xff", b"3"])
def test_damaged_settings_are_named_with_the_way_out(tmp_path, content):
    (tmp_path / "settings.json").write_bytes(content)
    words = r"settings\.json is damaged .*another --out"
    with pytest.raises(EvaluationError, match=words):
        ResponseLog(tmp_path, SETTINGS)


def test_one_process_writes_at_a_time(tmp_path):
    with lock_folder(tmp_path), pytest.raises(FolderHeld, match="another process writes there"), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize(
    "key", ["model.dtype=float32", "model.fp32_head=true", "rollout.extra_args=[--disable-radix-cache]"]
)
def test_numbers_of_another_kind_are_other_responses(key):
    sampling = SimpleNamespace(sampling=SimpleNamespace(stop_token_ids=(2,)))
    evaluator = SimpleNamespace(modes=[sampling], prompts=[])
    words = ["model.dtype=bfloat16"]
    one, other = (load_config(QUICKSTART, each) for each in (words, [*words, key]))
    assert answer_settings(one, evaluator, None, {}) != answer_settings(other, evaluator, None, {})


def test_two_models_that_servers_hold_under_one_name_are_told_apart():
    """SGLang calls the weights of any server that is started by hand "default"."""

    async def test():
        server = StandIn()
        async with fleet_of(server) as fleet:
            server.label, found = "default", []
            for server.model in ("a", "b"):
                found.append(await weight_labels(fleet))
            assert found[0] != found[1]
            server.label, server.loaded = "13", Path("/run/weights/v13")  # a run's: one server read it from disk
            assert (await weight_labels(fleet))["label"] == "13"

    run(test)


def test_other_settings_are_named_before_servers_are_started(tmp_path, monkeypatch):
    def never(*about, **more):
        raise AssertionError("servers are started")

    monkeypatch.setattr("megatron_dapo.diagnostics.evaluation_session.local_fleet", never)
    write(tmp_path, 1)
    config = load_config(QUICKSTART, [f"model.path={QUICKSTART.with_name('base')}", f"evaluation.path={HELD}"])
    with pytest.raises(EvaluationError, match="responses were made with weights"):
        asyncio.run(evaluate(config, tmp_path, Console(), None))
