"""A real SGLang server on the CPU with a tiny mixture of experts: deterministic, and its weights verified."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.errors import WeightMismatch
from rollout.weights.checksums import expected_checksums, verify
from tests.rollout.folders import save_model
from tests.rollout.real_kit import START_S, Place, all_of, assert_log_probs, make_place, requests_of

pytestmark = [
    pytest.mark.slow,  # test_real_experts_told starts such a server by default
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this server is started for the CPU"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root, loop = tmp_path_factory.mktemp("servers"), asyncio.new_event_loop()
    made = make_place(loop, root, "qwen3_moe", deterministic=True)
    try:
        made.run(made.fleet.start(START_S))
        yield made
    finally:
        made.run(made.fleet.close())
        loop.close()


def test_log_probs_are_those_of_the_model(place: Place) -> None:
    asked = requests_of(16, seed=1)
    assert_log_probs(place.model, asked, place.run(all_of(place.fleet, asked)))


def test_a_response_does_not_depend_on_what_shares_its_experts(place: Place) -> None:
    asked = requests_of(16, seed=6)

    async def work() -> None:
        alone = [await place.fleet.generate(one) for one in asked[:6]]
        for first, second in zip(alone, await all_of(place.fleet, asked), strict=False):
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_array_equal(first.log_probs.view(np.int32), second.log_probs.view(np.int32))

    place.run(work())


def test_other_weights_are_published_and_one_wrong_number_of_one_expert_is_found(place: Place, tmp_path: Path) -> None:
    """Also where the weights' folder has the published name of the number of experts."""
    changed = save_model(tmp_path / "new", "qwen3_moe", seed=9)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    tensors["model.layers.2.mlp.experts.4.down_proj.weight"][5, 7] += 1e-6
    (tmp_path / "wrong").mkdir()
    save_file(tensors, tmp_path / "wrong" / "model.safetensors", {"format": "pt"})
    (tmp_path / "wrong" / "config.json").write_text((tmp_path / "new" / "config.json").read_text())
    member, asked = place.fleet.members[0], requests_of(8, seed=3)

    async def work() -> None:
        report = await place.fleet.publish(tmp_path / "new", 1)
        assert list(report.servers.values()) == [39]
        assert_log_probs(changed, asked, await all_of(place.fleet, asked))
        await member.client.update_weights("disk", {"model_path": str(tmp_path / "wrong")}, "wrong", 60)
        assert member.info is not None
        with pytest.raises(WeightMismatch) as caught:
            verify(expected_checksums(tmp_path / "new", member.info), await member.client.checksums(60), "here")
        assert [problem.split()[0] for problem in caught.value.problems] == ["model.layers.2.mlp.experts.w2_weight"]

    place.run(work())
