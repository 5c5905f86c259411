"""Weight sync in the plan: seconds and bytes of each way, against sums done here."""

import dataclasses

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.plan import sync
from megatron_dapo.plan.memory import host_memory, trainer_memory
from megatron_dapo.plan.planner import make_plan
from megatron_dapo.plan.rank_state import model_parameters
from megatron_dapo.plan.scenario import BUILT_IN, Scenario, changed, load_calibration
from tests.plan.conftest import RECIPES

HF = BUILT_IN["Qwen2.5-32B"]
MODEL = 2.0 * model_parameters(HF)
EMBEDDING = 2.0 * 152064 * 5120


def recipe(way: str, **changes):
    config = load_config(RECIPES / "h100_32.yaml")
    return changed(config, {"rollout.weight_sync": way} | {f"rollout.{key}": value for key, value in changes.items()})


def seconds(way: str, constants, **changes) -> float:
    return sync.sync_seconds(Scenario(recipe(way, **changes), HF, constants))


def test_by_disk_weights_are_gathered_written_and_read_in_turn(constants):
    usual = seconds("disk", constants)
    fewest = MODEL / constants.gather_bandwidth + MODEL / constants.disk_write + MODEL / constants.disk_read
    assert usual >= fewest * (1 - 1e-9)
    slow = dataclasses.replace(constants, disk_write=constants.disk_write / 2)
    assert seconds("disk", slow) - usual == pytest.approx(MODEL / constants.disk_write)


def test_in_memory_only_links_count(constants):
    """By hand: in each stage (1 - 1/shards) of its weights over the trainer's link; the stages' broadcasts in turn; of
    the shorter one only the first bucket's share is waited for."""
    config = recipe("distributed")
    shards, stages = config.actor.layout.tensor, config.actor.layout.pipeline
    assert (shards, stages) == (8, 2)
    link = constants.nvlink_bandwidth * constants.communication_efficiency
    gather = MODEL / stages * (shards - 1) / shards / link
    first = stages * max(config.rollout.sync_bucket_mb << 20, EMBEDDING) / MODEL  # of each stage
    broadcast = MODEL / constants.send_bandwidth
    assert seconds("distributed", constants) == pytest.approx(broadcast + first * gather)
    assert seconds("distributed", constants) < seconds("disk", constants)
    wide = dataclasses.replace(constants, send_bandwidth=1e15)
    broadcast = MODEL / (constants.network_bandwidth * constants.communication_efficiency)
    longer, shorter = max(gather, broadcast), min(gather, broadcast)
    assert seconds("distributed", wide) == pytest.approx(longer + first * shorter)
    no_disk = dataclasses.replace(constants, disk_write=1.0, disk_read=1.0)
    assert seconds("distributed", no_disk) == seconds("distributed", constants)


def test_changes_cost_the_slowest_of_gathering_hashing_sending_them_and_fetching_what_is_held(constants):
    """By hand, with each of them in turn the slowest."""
    fast = {"network_bandwidth": 1e15, "nvlink_bandwidth": 1e15, "hash_bandwidth": 1e15, "host_bandwidth": 1e15}
    free = dataclasses.replace(constants, send_bandwidth=1e15, **fast)
    slow_wire = dataclasses.replace(free, send_bandwidth=2e9)
    encoded = MODEL * constants.changed_share + MODEL / 2 / 8
    assert seconds("delta", slow_wire) == pytest.approx(encoded / 2e9, rel=1e-3)
    assert seconds("distributed", slow_wire) == pytest.approx(MODEL / 2e9, rel=1e-3)
    for name in ("hash_bandwidth", "host_bandwidth"):
        half = MODEL / 2 / 5e9  # of two stages at once
        assert seconds("delta", dataclasses.replace(free, **{name: 5e9})) == pytest.approx(half, rel=1e-3)
    near = {"actor.layout": LayoutConfig(tensor=8, pipeline=1, data=1, sequence_parallel=True)}
    slow = dataclasses.replace(free, nvlink_bandwidth=1e9)
    case = Scenario(changed(recipe("delta"), near), HF, slow)
    assert sync.sync_seconds(case) == pytest.approx(MODEL * 7 / 8 / 1e9 / constants.communication_efficiency, rel=1e-3)
    assert seconds("delta", constants) >= MODEL / 2 / constants.host_bandwidth


@pytest.mark.parametrize(("way", "sends"), [("distributed", 2), ("delta", 2), ("disk", 1)])
def test_half_of_the_servers_after_the_other_costs_the_trainer_two_sends_and_a_server_one(constants, way, sends):
    """By hand, from the plan that stops all. Only where the trainer limits the step is it longer."""
    assert seconds(way, constants, on_publish="keep") == pytest.approx(sends * seconds(way, constants))
    assert seconds(way, constants, on_publish="keep", servers=1) == seconds(way, constants, servers=1)
    for servers, trainer_limits in ((2, False), (8, True)):
        case = Scenario(changed(recipe(way, servers=servers), {"run.mode": "async"}), HF, constants)
        together = make_plan(case, steps=1).step
        halves = make_plan(case.changed({"rollout.on_publish": "recompute"}), steps=1).step
        stop, training = together.sync_s, together.log_prob_s + together.update_s
        assert halves.stopped_s == together.stopped_s == pytest.approx(stop)
        assert (together.rollout_s - together.tail_s < training) == trainer_limits
        assert halves.seconds - together.seconds == pytest.approx((sends - 1) * stop if trainer_limits else 0, abs=1e-6)


def colocated(**changes) -> Scenario:
    recipe = changed(load_config(RECIPES / "h100_32_colocated.yaml"), changes)
    return Scenario(recipe, HF, load_calibration())


def test_in_turn_every_gpu_has_the_buckets_and_no_disk_is_waited_for(constants):
    """By hand: gathered, then broadcast to all ranks, while servers load the bucket before."""
    case, by_disk = colocated(), colocated(**{"rollout.weight_sync": "disk"})
    layout, link = case.config.actor.layout, constants.network_bandwidth * constants.communication_efficiency
    shards, load = layout.tensor * layout.pipeline, MODEL / constants.load_bandwidth
    ready = MODEL * (shards - 1) / shards / link + MODEL / link
    assert (case.weight_sync, layout.world_size > 8, ready < load) == ("tensor", True, True)
    bucket = max(case.config.rollout.sync_bucket_mb << 20, EMBEDDING)
    assert sync.sync_seconds(case) == pytest.approx(load + bucket / MODEL * ready)
    assert sync.sync_seconds(case) < sync.sync_seconds(by_disk) / 5
    servers = MODEL / case.config.rollout.tensor_parallel
    first, *others = trainer_memory(case)
    for rank, own in ((first, EMBEDDING), *((rank, 0) for rank in others)):
        held = rank.items["weight sync"]
        assert (held["sync bucket"], held["servers' weights"]) == (own + 2 * bucket, servers)
        kept = next(each for each in trainer_memory(by_disk) if each.stage == rank.stage)
        assert "servers' weights" not in kept.items["weight sync"]
    assert not any("bucket" in name or "cache" in name for name in host_memory(case, 5000.0))


def test_loading_from_memory_is_what_was_published(constants):
    """slime, Qwen3-30B-A3B, 8 H100 that trainer and servers share: 7 s."""
    hf = BUILT_IN["Qwen3-30B-A3B"]
    layout = LayoutConfig(tensor=4, data=2, sequence_parallel=True, expert=8)
    case = Scenario(
        colocated(**{"actor.layout": layout, "rollout.servers": 2, "rollout.tensor_parallel": 4}).config, hf, constants
    )
    assert sync.sync_seconds(case) == pytest.approx(7.0, rel=0.03)


@pytest.mark.parametrize(
    ("way", "megabytes", "expected"),
    [
        ("disk", 4096, 2 * EMBEDDING),
        ("distributed", 4096, EMBEDDING + 2 * (4096 << 20)),
        ("distributed", 16, 3 * EMBEDDING),  # the embedding is larger than a bucket
        ("delta", 4096, EMBEDDING + 4 * (4096 << 20)),
    ],
)
def test_what_a_rank_that_gathers_holds(way, megabytes, expected, constants):
    """Rank 0, or the first rank of each stage."""
    [first, *others] = trainer_memory(Scenario(recipe(way, sync_bucket_mb=megabytes), HF, constants))
    held = [rank.items["weight sync"].get("sync bucket") for rank in (first, *others)]
    assert held == [expected, None if way == "disk" else expected]


def test_without_a_disk_no_file_is_held_in_host_memory(constants):
    ways = ("disk", "distributed", "delta")
    kept = {way: set(host_memory(Scenario(recipe(way), HF, constants), 5000.0)) for way in ways}
    assert kept["delta"] - kept["distributed"] == {"first ranks of stages: the weights that servers hold"}
    assert kept["disk"] - kept["distributed"] == {
        "rank 0: one file of an export and one tensor",
        "page cache that one weight version fills",
    }


@pytest.mark.parametrize(("layout", "share"), [((8, 1, 1), 1), ((8, 2, 1), 1 / 2), ((2, 4, 1), 1), ((4, 4, 2), 1 / 4)])
def test_each_stage_holds_its_part_of_what_servers_hold_on_its_own_host(layout, share, constants):
    """TP, PP, DP on nodes of 8 GPUs; how much of the model the first ranks of stages on the first node hold."""
    sizes = dict(zip(("tensor", "pipeline", "data"), layout, strict=True))
    case = Scenario(changed(recipe("delta"), {"actor.layout": LayoutConfig(**sizes)}), HF, constants)
    [held] = sync.host_bytes(case).values()
    assert held == pytest.approx(case.model_bytes * share)


def test_buckets_that_do_not_fit_beside_the_servers_cache_are_named(constants):
    config = recipe("distributed", sync_bucket_mb=8192, memory_fraction=0.8)
    plan = make_plan(Scenario(config, HF, constants), steps=1)
    [misfit] = plan.misfits
    outside = constants.framework_memory + constants.communicator_memory + 2 * (8192 << 20)  # a second stage's group
    assert (misfit.part, misfit.needed) == ("server", outside)
    assert not make_plan(plan.case.changed({"rollout.sync_bucket_mb": 1024}), steps=1).misfits


def test_experts_are_gathered_from_the_ranks_that_hold_them(constants):
    """Qwen3-30B-A3B on one node, by hand: dense weights from TP 2, experts from EP 8; gate and up projections of a
    layer, which servers fuse, are kept on rank 0."""
    hf = BUILT_IN["Qwen3-30B-A3B"]
    layout = {"actor.layout": LayoutConfig(tensor=2, data=4, sequence_parallel=True, expert=8)}
    case = Scenario(changed(recipe("distributed"), layout), hf, constants)
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    dense = 2 * model_parameters(hf) - experts
    link = constants.nvlink_bandwidth * constants.communication_efficiency
    gather, send = (dense * 1 / 2 + experts * 7 / 8) / link, (dense + experts) / constants.send_bandwidth
    first = max(case.config.rollout.sync_bucket_mb << 20, 2 * 151936 * 2048) / (dense + experts)
    assert sync.sync_seconds(case) == pytest.approx(send + first * gather)
    embedding, held = 2 * 151936 * 2048, 2 * 128 * 2 * 768 * 2048
    bucket = max(case.config.rollout.sync_bucket_mb << 20, embedding)
    assert trainer_memory(case)[0].items["weight sync"]["sync bucket"] == embedding + 2 * bucket + held


def test_one_bucket_after_the_other_would_take_what_was_published(constants):
    """miles, Qwen3-30B-A3B, 2 + 2 nodes of H100 over NCCL, TP4 EP8: 2.67 s for gathering and sending in turn."""
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    dense = 2 * model_parameters(BUILT_IN["Qwen3-30B-A3B"]) - experts
    gather = (dense * 3 / 4 + experts * 7 / 8) / (constants.nvlink_bandwidth * constants.communication_efficiency)
    assert gather + (dense + experts) / constants.send_bandwidth == pytest.approx(2.67, rel=0.01)


@pytest.mark.parametrize(("way", "least", "most"), [("distributed", 2, 6), ("delta", 1, 3)])
def test_the_target_size_in_less_than_was_published(constants, way, least, most):
    """Qwen2.5-32B on 2 + 2 nodes; verl published 14.2 s, and 6.2 s for changes alone."""
    layout = {"actor.layout": LayoutConfig(tensor=8, pipeline=2, sequence_parallel=True), "rollout.servers": 4}
    case = Scenario(changed(recipe(way, tensor_parallel=4), layout), HF, constants)
    assert (case.config.actor.layout.world_size, case.server_gpus) == (16, 16)
    assert least < sync.sync_seconds(case) < most
