"""The first rank of each pipeline stage sends what the stage holds, in turn, and nothing is sent twice."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rollout.weights.checksums import expected_checksums
from rollout.weights.sender import Turns
from rollout.weights.transport import Failure
from tests.actor.gloo import run_ranks
from tests.actor.tiny import MIXTURE, save_tiny
from tests.actor.weights.test_hf_weights import assert_same_tensors, ranks_of, read_folder
from tests.cluster.test_rank_weights import BUCKET, ONE, peers, request
from tests.coordinator.sync_kit import send

pytestmark = pytest.mark.timeout(300)
NO_MORE = ("cpu", "float32", None)
CASES = [
    ("qwen2", False, {"pipeline": 2}),
    ("qwen3", True, {"pipeline": 2, "tensor": 2}),
    ("qwen2", True, {"pipeline": 2, "virtual_pipeline": 2}),
    ("qwen2", False, {"pipeline": 2, "data": 2}),
    (MIXTURE, False, {"pipeline": 2, "data": 2, "expert": 2}),
]


@pytest.mark.parametrize(
    ("family", "tied", "layout", "transport"),
    [
        # By default each once, by turns with either transport.
        pytest.param(*case, transport, marks=[] if at % 2 == turn else [pytest.mark.slow])
        for at, case in enumerate(CASES)
        for turn, transport in enumerate(("distributed", "delta"))
    ],
    ids=str,
)
def test_every_peer_is_sent_every_tensor_once(tmp_path, transport, family, tied, layout):
    folder = save_tiny(tmp_path / "model", family, tied=tied)
    whole = read_folder(folder)
    with peers(tmp_path, (), ()) as started:
        requests = [request(transport, started, "7"), request(transport, started, "8")]
        first, *others = run_ranks(
            ranks_of(layout), send, folder, requests, [ONE], BUCKET, *NO_MORE, layout, timeout_s=200
        )
        assert others == [[None, None]] * len(others)
        for sent in first:
            assert sent.failures == {}
            assert sent.checksums == {ONE: expected_checksums(folder, ONE)}
            assert sent.size == sum(tensor.nbytes for tensor in whole.values())
        for each in started:
            held, tensors = each.held()
            assert held == "8"
            assert_same_tensors(tensors, whole)
            assert set(each.times().values()) == {2}


CHANGED = "model.layers.3.mlp.down_proj.weight"


def test_what_a_stage_sends_again_is_what_has_changed_in_it(tmp_path):
    """By `delta`: each stage has a base of its own. The share is that of all values, however many a stage has."""
    folder = save_tiny(tmp_path / "model", "qwen2", tied=False)
    expected = read_folder(folder)
    expected[CHANGED].view(-1)[5] += 1
    other = tmp_path / "changed"
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(expected, other / "model.safetensors", {"format": "pt"})
    with peers(tmp_path, ()) as started:
        first = request("delta", started, "1")
        targets = tuple(replace(target, holds="1") for target in first.targets)
        requests = [first, replace(first, targets=targets, label="2", id="second")]
        sent, _ = run_ranks(2, send_changed, folder, other, requests, timeout_s=200)
        assert [each.changed for each in sent] == [1.0, pytest.approx(4 / sent[1].size)]
        held, tensors = started[0].held()
        assert held == "2"
        assert_same_tensors(tensors, expected)


def send_changed(place, folder, other, requests):
    """The second request with the weights of `other`."""
    from megatron_dapo.actor.actor import MegatronActor
    from megatron_dapo.actor.weights.hf_weights import load_hf_weights

    folders, own = iter((folder, other)), MegatronActor.stream_weights

    def of_the_next(actor, *args, **options):
        load_hf_weights(actor._chunks, actor.hf, next(folders))
        own(actor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronActor, "stream_weights", of_the_next)
        return send(place, folder, requests, [ONE], BUCKET, *NO_MORE, {"pipeline": 2})


def test_groups_that_are_left_end_at_all_peers_in_turn(tmp_path):
    """Else one peer would wait in the end of one stage's group, and another in that of the other's."""
    folder, layout = save_tiny(tmp_path / "model", "qwen2", tied=False), {"pipeline": 2}
    with peers(tmp_path, ("meet",), ("meet",)) as started:
        first = request("distributed", started, deadline_s=10.0)
        requests = [first] + [
            replace(first, targets=(first.targets[0], replace(first.targets[1], restarts=at)), id=str(at))
            for at in range(1, 5)
        ]
        sent, _ = run_ranks(2, send, folder, requests, [ONE], BUCKET, *NO_MORE, layout, timeout_s=200)
        assert [dict(each.failures) for each in sent] == [{}] * 5
        ended = [{path.name for path in each.folder.glob("weights-*")} for each in started]
        assert ended[0] == ended[1]
        assert len(ended[0]) == 2 * 4


def in_threads(store, works):
    """What each of `works` (publish, send) comes to, each with a loop of its own, begun in this order."""

    def one(at, publish, work):
        time.sleep(0.1 * at)
        return asyncio.run(Turns(store).take(publish, work))

    with ThreadPoolExecutor(len(works)) as pool:
        return [each.result(20) for each in [pool.submit(one, at, *work) for at, work in enumerate(works)]]


def test_turns_are_taken_one_at_a_time_in_the_order_of_asking():
    log = []

    def send_as(name):
        async def work():
            log.append(f"{name} begins")
            await asyncio.sleep(0.3)
            log.append(f"{name} ends")
            return {}

        return work

    assert in_threads(dist.HashStore(), [("p", send_as(name)) for name in "abc"]) == [{}, {}, {}]
    assert log == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


def test_the_first_failure_is_that_of_all_senders_of_the_publish_and_of_no_other():
    failure, calls, store = {"http://a:1": Failure(reason="planted", answers=True)}, Counter(), dist.HashStore()

    def send_as(name, result):
        async def work():
            calls[name] += 1
            return result

        return work

    works = [("p", send_as("first", failure)), ("p", send_as("second", {})), ("q", send_as("third", {}))]
    assert in_threads(store, works) == [failure, failure, {}]
    assert calls == {"first": 1, "third": 1}


def test_a_send_that_raises_gives_its_turn_away():
    store = dist.HashStore()

    async def breaks():
        raise RuntimeError("planted")

    async def works():
        return {}

    with pytest.raises(RuntimeError, match="planted"):
        asyncio.run(Turns(store).take("p", breaks))
    assert in_threads(store, [("p", works)]) == [{}]


def test_stages_share_the_model_out(tmp_path):
    """Each tensor is of one stage; a tied head is the embedding's, of the first."""
    folder = save_tiny(tmp_path / "model", "qwen2", tied=True)
    results = run_ranks(4, stage_names, folder, {"pipeline": 2, "tensor": 2}, timeout_s=120)
    first, last = (set(results[rank]) for rank in (0, 2))
    assert (set(results[1]), set(results[3])) == (first, last)
    assert not first & last
    assert first | last == read_folder(folder).keys()
    assert "model.embed_tokens.weight" in first


def stage_names(place, folder: Path, layout: dict) -> list[str]:
    from megatron_dapo.actor.weights.hf_weights import stage_shards
    from megatron_dapo.actor.weights.model_tensors import hf_shapes
    from tests.actor.ranks import build

    torch.manual_seed(0)
    built = build(place, folder, layout)
    return list(hf_shapes(built.hf, shards=stage_shards(built.chunks, built.hf)))
