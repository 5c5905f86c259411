"""Experts of tokens between servers and trainer: in checkpoints, in messages, in a resume, in what is planned."""

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.actor.model.hf_config import Experts
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.coordinator.batch import LogProbStream, mini_batches, responses_of, step_arrays
from megatron_dapo.coordinator.inputs import routing_room, routing_shape
from megatron_dapo.plan.memory import disk_bytes, host_memory
from megatron_dapo.plan.scenario import BUILT_IN, Scenario, load_calibration
from megatron_dapo.storage.group_files import load_groups, save_groups
from rollout.generation import RoutingShape
from tests.coordinator.test_batch import GROUP, LogProbs, config, make_groups
from tests.coordinator.test_progress import plain
from tests.processes import ROOT

__all__ = ["config"]
SHAPE = RoutingShape(layers=3, top_k=2, experts=6)
REPLAY, CARRIED = "actor.routing_replay=true", "algorithm.dynamic_sampling.max_staleness=1"


def routed(groups, rows=lambda number, tokens: tokens - 1):
    """With random rows; `rows`: (number of the response, its tokens with the prompt's) -> how many; None: none."""
    random, number, made = np.random.default_rng(2), 0, []
    for group in groups:
        responses = []
        for response in group.responses:
            count = rows(number, group.prompt_ids.size + response.generation.token_ids.size)
            routing = None if count is None else random.integers(0, 6, (count, 3, 2)).astype(np.uint8)
            generation = dataclasses.replace(response.generation, routing=routing)
            responses.append(dataclasses.replace(response, generation=generation))
            number += 1
        made.append(dataclasses.replace(group, responses=tuple(responses)))
    return tuple(made)


@pytest.mark.parametrize("rows", [lambda number, tokens: tokens - 1, lambda number, tokens: [None, 0, 5][number % 3]])
def test_group_files_hold_them_bit_for_bit(tmp_path, rows):
    groups = routed(make_groups(2), rows)
    save_groups(tmp_path, "g", groups, {})
    loaded, _ = load_groups(tmp_path, "g")
    assert plain(loaded) == plain(groups)
    for one, other in zip(groups, loaded, strict=True):
        for mine, theirs in zip(one.responses, other.responses, strict=True):
            if mine.generation.routing is not None:
                assert mine.generation.routing.shape == theirs.generation.routing.shape


def test_files_without_them_are_those_of_before(tmp_path):
    save_groups(tmp_path, "g", make_groups(1), {})
    with np.load(tmp_path / "g.npz") as arrays:
        assert set(arrays) == {"prompt_ids", "token_ids", "log_probs", "weight_versions"}
    (entry,) = json.loads((tmp_path / "g.json").read_text().splitlines()[0])["groups"]
    assert all("routed" not in response for response in entry["responses"])


def test_each_mini_batch_has_the_rows_of_its_responses(config):
    groups = routed(make_groups())
    arrays = step_arrays(groups, config(REPLAY))
    old = LogProbs(log_probs=arrays.rollout_log_probs, entropy=np.abs(arrays.rollout_log_probs))
    wanted = {}
    for group in groups:
        for response in group.responses:
            ids = np.concatenate([group.prompt_ids, response.generation.token_ids])
            wanted[ids.tobytes()] = response.generation.routing
    for batch in mini_batches(arrays, old, None, None, config(REPLAY), 1, hidden_size=64):
        ends = np.cumsum(batch.responses.sequence_lengths)[:-1]
        pairs = zip(np.split(batch.responses.token_ids, ends), np.split(batch.responses.routing, ends), strict=True)
        for ids, rows in pairs:
            np.testing.assert_array_equal(rows[:-1], wanted.pop(ids.tobytes()))
            assert (rows[-1] == [0, 1]).all()
    assert not wanted


def test_without_replay_no_message_has_them(config):
    assert responses_of(routed(make_groups()), config()).routing is None


@pytest.mark.parametrize("count", [None, 3])
def test_a_response_without_all_rows_is_named(config, count):
    groups = routed(make_groups(), lambda number, tokens: count if number == 6 else tokens - 1)
    with pytest.raises(ValueError, match=f"response 6 has {count or 0} rows of routing for"):
        responses_of(groups, config(REPLAY))


def test_old_log_probs_are_asked_for_with_them(config):
    asked = {"true": [], "false": []}

    async def test(value):
        async def log_probs(responses, temperature):
            asked[value].append(responses)
            return LogProbs(log_probs=np.zeros(1, np.float32), entropy=np.zeros(1, np.float32))

        trainer = SimpleNamespace(log_probs=log_probs)
        stream = LogProbStream(trainer, config(f"actor.routing_replay={value}"), pytest.fail)
        async with stream:
            for group in routed(make_groups()):
                stream.add(group)
            await stream.finish()

    for value in asked:
        asyncio.run(test(value))
        assert sum(map(len, asked[value])) == 6 * GROUP
    assert all(responses.routing is not None for responses in asked["true"])
    assert all(responses.routing is None for responses in asked["false"])


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


def test_they_are_planned_and_asked_for_only_under_replay():
    """64 layers x 8 experts: 512 bytes a token; a batch of 8192 responses of 5000 tokens, four times in memory."""
    file = ROOT / "examples" / "qwen2.5_32b" / "h100_32.yaml"
    plain_config, replay = load_config(file), load_config(file, [REPLAY, "actor.fp8=none"])
    hf = BUILT_IN["Qwen2.5-32B"].model_copy(update={"experts": None})
    moe = hf.model_copy(update={"experts": Experts.model_validate(EXPERTS)})
    assert routing_shape(plain_config, moe) is routing_shape(replay, hf) is None
    assert routing_shape(replay, moe) == RoutingShape(layers=64, top_k=8, experts=128)
    constants = load_calibration()
    before, after = (Scenario(each, moe, constants) for each in (plain_config, replay))
    host = [host_memory(case, 5000.0) for case in (before, after)]
    assert set(host[1]) - set(host[0]) == {"coordinator: routing of a batch"}
    assert host[1]["coordinator: routing of a batch"] == 4 * 8192 * 5000 * 512
    assert host[1]["a server process"] > host[0]["a server process"] + 1e8
    assert disk_bytes(after) == disk_bytes(before), "no group is carried"
    before, after = (
        Scenario(load_config(file, [*more, CARRIED]), moe, constants) for more in ((), (REPLAY, "actor.fp8=none"))
    )
    length, more = replay.model.context_length, disk_bytes(after) - disk_bytes(before)
    assert more == (replay.run.keep_checkpoints + 1) * 8192 * length * 512


def test_a_start_says_where_a_batch_may_have_no_room(monkeypatch, tmp_path):
    """8192 responses of 22528 tokens of 512 bytes are 94.5 GB: four times that in memory; with three checkpoints kept
    and one being written as much on disk, where groups are carried."""
    file, moe = ROOT / "examples" / "qwen2.5_32b" / "h100_32.yaml", BUILT_IN["Qwen2.5-32B"]
    moe = moe.model_copy(update={"experts": Experts.model_validate(EXPERTS)})
    keys = [REPLAY, "actor.fp8=none", CARRIED, "run.keep_checkpoints=3", f"run.dir={tmp_path / 'run'}"]

    def said(memory: float, disk: float, *more: str) -> list[str]:
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=memory))
        monkeypatch.setattr("shutil.disk_usage", lambda folder: {tmp_path: SimpleNamespace(free=disk)}[folder])
        return list(routing_room(load_config(file, [*keys, *more]), moe))

    assert said(379e9, 379e9) == said(0, 0, "actor.routing_replay=false") == []
    [memory] = said(377e9, 379e9)
    assert "may take 378.0 GB of memory; 377.0 free" in memory
    [disk] = said(379e9, 377e9)
    assert f"may take 378.0 GB of disk ({tmp_path}); 377.0 free" in disk
    assert len(said(0, 0)) == 2
    assert len(said(0, 0, "algorithm.dynamic_sampling.max_staleness=0")) == 1, "no group is carried"


def test_client_processes_would_copy_them(config):
    with pytest.raises(ConfigError, match=r"client_processes = 4: would copy the experts of actor.routing_replay"):
        config(REPLAY, "rollout.client_processes=4")
