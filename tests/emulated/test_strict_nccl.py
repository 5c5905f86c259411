"""Each rule of the strict group: what it lets pass, what it refuses, and that plain gloo lets that pass."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated.strict_ranks import START_S, full, join
from tools.rank_pool import RankPlace

PATIENCE_S = 1.0


def every_call(place: RankPlace, backend: str) -> dict[str, Any]:
    """All calls of two ranks, by all their names."""
    join(place, backend, bound=backend == "nccl")
    rank, other = place.rank, 1 - place.rank
    found: dict[str, Any] = {}
    mine = full(rank + 1, 3, backend=backend)
    reduced = mine.clone()
    dist.all_reduce(reduced)
    found["all_reduce"] = reduced.tolist()
    sent = mine.clone()
    dist.broadcast(sent, 1)
    found["broadcast"] = sent.tolist()
    gathered = full(0, 6, backend=backend)
    dist.all_gather_into_tensor(gathered, mine)
    found["all_gather_into_tensor"] = gathered.tolist()
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)
    found["all_gather"] = [part.tolist() for part in parts]
    half = torch.empty_like(mine)
    dist.reduce_scatter_tensor(half, gathered)
    found["reduce_scatter_tensor"] = half.tolist()
    dist.reduce_scatter(half, parts)
    found["reduce_scatter"] = half.tolist()
    whole = mine.clone()
    dist.reduce(whole, 1)
    found["reduce"] = whole.tolist() if rank == 1 else None
    exchanged = torch.empty(4, device=mine.device)
    dist.all_to_all_single(exchanged, torch.arange(4.0, device=mine.device) + 10 * rank)
    found["all_to_all_single"] = exchanged.tolist()
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    found["gather"] = [part.tolist() for part in parts]
    dist.scatter(half, parts if rank == 0 else None, src=0)
    found["scatter"] = half.tolist()
    dist.send(mine, other) if rank else dist.recv(half, other)
    found["send, recv"] = half.tolist() if rank == 0 else None
    work = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, half, other)]
    for request in dist.batch_isend_irecv(work):
        request.wait()
    found["batch_isend_irecv"] = half.tolist()
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=dist.new_group([0, 1]))
    found["all_reduce MAX in a new group"] = largest.tolist()
    names: list[Any] = [None, None]
    dist.all_gather_object(names, {"rank": rank})
    shared = [rank]
    dist.broadcast_object_list(shared, 1)
    dist.barrier()
    return found | {"all_gather_object": names, "broadcast_object_list": shared}


def test_every_call_gives_what_gloo_gives(strict, gloo):
    assert strict(2, every_call, "nccl") == gloo(2, every_call, "gloo")


def other_shapes(place: RankPlace, backend: str) -> None:
    """As many numbers, in other shapes."""
    join(place, backend)
    shape = (4, 1) if place.rank else (2, 2)
    dist.all_reduce(full(1, *shape, backend=backend))


def other_calls(place: RankPlace, backend: str) -> None:
    """A reduction here, a maximum there."""
    join(place, backend)
    op = dist.ReduceOp.MAX if place.rank else dist.ReduceOp.SUM
    dist.all_reduce(full(1, 3, backend=backend), op)


def other_types(place: RankPlace, backend: str) -> None:
    """Numbers of the same width and of different kinds."""
    join(place, backend)
    dtype = torch.int32 if place.rank else torch.float32
    dist.broadcast(full(1, 3, backend=backend, dtype=dtype), 0)


def other_order(place: RankPlace, backend: str) -> None:
    """A send here and a send there, each before its receive, in one communicator of the pair."""
    join(place, backend)
    mine, theirs = full(1, 3, backend=backend), full(0, 3, backend=backend)
    sent = dist.isend(mine, 1 - place.rank)
    received = dist.irecv(theirs, 1 - place.rank)
    sent.wait()
    received.wait()
    if backend == "nccl":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (other_shapes, ("float32[2, 2]", "float32[4, 1]")),
        (other_calls, ("all_reduce SUM of float32[3]", "all_reduce MAX of float32[3]")),
        (other_types, ("broadcast from 0 of float32[3]", "broadcast from 0 of int32[3]")),
        (other_order, ("a transfer of float32[3] from 0", "a transfer of float32[3] from 1")),
    ],
)
def test_calls_that_differ_over_ranks_name_both(strict, gloo, case, named):
    assert gloo(2, case, "gloo") == [None, None], "plain gloo takes it"
    first, second = strict(2, _read_at_once, case)
    assert {first.kind, second.kind} == {"Mismatch"}
    for broken in (first, second):
        assert all(text in broken.text for text in (*named, "rank 0", "rank 1")), broken.text


def _read_at_once(place: RankPlace, case: Any) -> None:
    """A case over the strict group; an error of a call that only was enqueued shows at the next synchronisation."""
    case(place, "nccl")
    torch.cuda.synchronize()


def first_call_of_one(place: RankPlace, backend: str, call: str) -> str:
    """Rank 0 makes the group's first call, the other one comes only after rank 0 has been blocked for long."""
    join(place, backend)
    store = dist.PrefixStore("order", dist.distributed_c10d._get_default_store())
    if place.rank == 0:
        tensor = full(1, 3, backend=backend)
        dist.isend(tensor, 1) if call == "isend" else dist.broadcast(tensor, 0, async_op=True)
        store.set("rank 0 went on", "")
        store.wait(["rank 1 came"], timedelta(seconds=START_S))  # a rank that leaves closes its peer's connections
        return "went on"
    store.set("rank 1 came", "")
    deadline = time.monotonic() + 3 * PATIENCE_S
    while time.monotonic() < deadline and not store.check(["rank 0 went on"]):
        time.sleep(0.05)
    return "went on" if store.check(["rank 0 went on"]) else "saw rank 0 hang"


@pytest.mark.parametrize("call", ["broadcast", "isend"])
def test_the_first_call_blocks_until_all_have_come(strict, gloo, call):
    assert gloo(2, first_call_of_one, "gloo", call) == ["went on", "went on"]
    first, second = strict(2, first_call_of_one, "nccl", call, patience_s=PATIENCE_S)
    assert first.kind == "Hang"
    communicator = "'0-1'" if call == "isend" else "'all'"
    assert f"rank 0 hangs in the making of communicator {communicator} by its first call" in first.text
    assert f"{call.removeprefix('i')} " in first.text
    assert "waits for ranks [1]" in first.text
    assert "rank 1 has made no call of this group" in first.text
    assert second == "saw rank 0 hang"


def batch_of_two(place: RankPlace, rest: bool) -> str:
    """Ranks 0 and 1 exchange in one batch, the group's first call; `rest`: rank 2 has made a call of it with them."""
    join(place, "nccl")
    if rest:
        dist.all_reduce(full(1, 1, backend="nccl"))
    if place.rank < 2:
        mine, theirs = full(place.rank, 3, backend="nccl"), full(-1, 3, backend="nccl")
        work = [dist.P2POp(dist.isend, mine, 1 - place.rank), dist.P2POp(dist.irecv, theirs, 1 - place.rank)]
        for request in dist.batch_isend_irecv(work):
            request.wait()
        return str(theirs.tolist())
    time.sleep(0 if rest else 2 * PATIENCE_S)
    return "out of it"


def test_a_batch_uses_the_whole_groups_communicator(strict):
    assert strict(3, batch_of_two, True) == [str([1.0] * 3), str([0.0] * 3), "out of it"]
    first, second, third = strict(3, batch_of_two, False, patience_s=PATIENCE_S)
    assert (first.kind, second.kind, third) == ("Hang", "Hang", "out of it")
    assert "communicator 'all' by its first call, batched" in first.text
    assert "waits for ranks [2]" in first.text


def group_of_one(place: RankPlace, bound: bool) -> str:
    """Rank 0 alone makes a group for itself and a rank from outside, as a publish does with a server."""
    join(place, "nccl", bound=bound)
    if place.rank > 0:
        time.sleep(2 * PATIENCE_S)
        return "never asked"
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("nccl"), dist.HashStore(), group_name="weights", timeout=c10d.default_pg_timeout
    )
    group.broadcast(full(1, 3, backend="nccl"), 0)
    return "sent"


def test_a_split_needs_every_rank_of_the_parent(strict):
    broken, other = strict(2, group_of_one, True, patience_s=PATIENCE_S)
    assert (broken.kind, other) == ("Hang", "never asked")
    assert "hangs in ncclCommSplit #1 (for group weights: broadcast from 0" in broken.text
    assert "waits for ranks [1]" in broken.text


def test_a_split_from_one_rank_is_not_a_group_of_two(strict):
    (broken,) = strict(1, group_of_one, True, patience_s=PATIENCE_S)
    assert broken.kind == "StrictError"
    assert "whose ranks [0] of 1 take part; the group has 2 ranks" in broken.text


def test_without_a_bound_parent_the_group_waits_for_its_own_ranks(strict):
    (broken,) = strict(1, group_of_one, False, patience_s=PATIENCE_S)
    assert broken.kind == "Hang"
    assert "the making of communicator 'all' by its first call, broadcast from 0" in broken.text


def aborted(place: RankPlace) -> tuple[str, float]:
    """Rank 0 aborts a call for which rank 1 never comes; rank 1 learns nothing of it."""
    join(place, "nccl", bound=True)
    group = dist.new_group([0, 1])
    tensor = full(1, 3, backend="nccl")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()  # else abort may come before the first call has ended
    if place.rank == 1:
        time.sleep(0.5)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="hangs in call #2"):
            dist.broadcast(tensor, 1, group=group, async_op=True).finish()
        return "hung", time.monotonic() - began
    work = dist.broadcast(tensor, 1, group=group, async_op=True)
    began = time.monotonic()
    group.abort()
    with pytest.raises(RuntimeError, match="aborted on this rank"):
        work.finish()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="after abort"):
        dist.all_reduce(tensor, group=group)
    return "free", time.monotonic() - began


def test_abort_is_local(strict):
    (first, seconds), (second, hung_s) = strict(2, aborted, patience_s=2 * PATIENCE_S)
    assert (first, second) == ("free", "hung")
    assert seconds < PATIENCE_S
    assert hung_s > PATIENCE_S


def ends_at_once(place: RankPlace) -> list[float]:
    """Rank 0 leaves the group right after it has enqueued what rank 1 comes for later."""
    join(place, "nccl", bound=True)
    tensor = full(1 - place.rank, 3, backend="nccl")
    dist.barrier()
    if place.rank == 1:
        time.sleep(0.5)
    dist.broadcast(tensor, 0)
    if place.rank == 0:
        dist.destroy_process_group()
    return tensor.tolist()


def test_what_is_enqueued_is_carried_out_before_a_group_ends(strict):
    assert strict(2, ends_at_once, patience_s=10) == [[1.0] * 3] * 2


DEATH = """
import os, sys, time
from tests.emulated import strict_nccl
strict_nccl.install()
import torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("nccl", init_method=sys.argv[2], rank=rank, world_size=2)
tensor = torch.ones(3)
dist.all_reduce(tensor)
if rank == 1:
    os.kill(os.getpid(), 9)
began = time.monotonic()
try:
    dist.all_reduce(tensor)
except strict_nccl.Hang as error:
    print(f"{time.monotonic() - began:.1f}|{error}")
"""


def test_a_rank_that_dies_leaves_the_others_hanging(tmp_path):
    """gloo tells the others at once; NCCL does not. Here without the emulated device."""
    patience_s = 4 * PATIENCE_S  # one process of the two may start that much later
    environment = os.environ | {"STRICT_NCCL_PATIENCE_S": str(patience_s), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DEATH, str(rank), f"file://{tmp_path}/rendezvous"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out, _ = ranks[0].communicate(timeout=120)
    assert ranks[1].wait(30) == -signal.SIGKILL
    seconds, _, text = out.partition("|")
    assert float(seconds) > patience_s * 0.9, "nobody told it"
    assert "rank 0 hangs in call #2 of communicator 'all', all_reduce SUM of float32[3]: waits for ranks [1]" in text
    assert "rank 1 made call #1 of communicator 'all', all_reduce SUM of float32[3]" in text
