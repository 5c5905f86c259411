"""What is concluded from traces, and what is told where none can be made. Traces themselves: tests/symbolic."""

import dataclasses
import importlib.machinery
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.cli.trace import trace_command
from megatron_dapo.config import load_config
from megatron_dapo.config.actor import LayoutConfig
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.memory import PHASES
from megatron_dapo.plan.shapes import model_shape
from megatron_dapo.plan.trace import cuda_stub
from megatron_dapo.plan.trace.agreement import Call, RankTrace, Shard, covered, disagreements
from megatron_dapo.plan.trace.findings import CLOSE, SMALL, Findings, Peak, loop_waits
from megatron_dapo.plan.trace.meter import Meter
from megatron_dapo.plan.trace.orchestrate import telling_ranks
from tests.plan.conftest import RECIPES


def call(op: str = "all_reduce SUM", tensors: str = "float32[8]", **fields: Any) -> Call:
    made = Call("nccl TP", (0, 1), op, tensors, None, "update", "megatron_dapo/actor/step.py:1 backward", False)
    return made._replace(**fields)


def trace(rank: int, *calls: Call, shards: tuple[Shard, ...] = (), waits: Any = (), peak: int = 1) -> RankTrace:
    return RankTrace(
        rank=rank,
        world_size=2,
        place={"tensor": rank, "pipeline": 0, "context": 0, "data": 0},
        kernels="",
        calls=calls,
        waits=waits,
        peaks=dict.fromkeys((*PHASES, "update, optimizer step"), peak),
        shards=shards,
    )


def shard(start: int, stop: int, **fields: Any) -> Shard:
    return Shard("w", "float32", (8, 4), (start, 0), (stop - start, 4))._replace(**fields)


def test_equal_calls_matching_messages_and_whole_shards_are_no_fault() -> None:
    one = trace(0, call(), call("send", peer=1), call("broadcast from 0"), shards=(shard(0, 4),))
    other = trace(1, call(), call("receive", peer=0), call("broadcast from 0"), shards=(shard(4, 8),))
    assert disagreements([one, other]) == []
    assert covered([one, other]) == 1
    assert covered([one]) == 0.5


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        ([call(), call()], [call()], "call 1 is all_reduce SUM .* on rank 0 and missing on rank 1"),
        ([call()], [call("broadcast from 0")], "call 0 is all_reduce SUM .* and broadcast from 0"),
        ([call()], [call(tensors="float32[9]")], r"float32\[8\] .* float32\[9\]"),
        ([call()], [call(tensors="bfloat16[8]")], r"float32\[8\] .* bfloat16\[8\]"),
        ([call(), call("barrier", "")], [call("barrier", ""), call()], "call 0 is all_reduce SUM"),
        ([call("send", peer=1)], [], "message 0 is send .* on rank 0 and missing on rank 1"),
        ([], [call("receive", peer=0)], "message 0 is missing on rank 0 and receive .* on rank 1"),
        ([call("send", peer=1)], [call("receive", "int64[3]", peer=0)], r"send float32\[8\] .* receive int64\[3\]"),
        (
            [call(on_cpu=True)],
            [call()],
            "rank 0: all_reduce SUM of a CPU tensor .* over NCCL at megatron_dapo/actor/step",
        ),
    ],
)
def test_a_disagreement_names_the_call_on_both_ranks(mine: list[Call], theirs: list[Call], told: str) -> None:
    found = disagreements([trace(0, *mine), trace(1, *theirs)])
    assert len(found) == 1
    assert re.search(told, found[0]), found


def test_groups_that_the_ranks_do_not_share_are_not_compared() -> None:
    assert disagreements([trace(0, call(ranks=(0, 2))), trace(1, call(ranks=(1, 3), op="barrier"))]) == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (shard(3, 8), "ranks 0 and 1 both write"),
        (shard(4, 9), "rank 1 writes up to"),
        (shard(4, 8, shape=(9, 4)), "on rank 0, float32"),
        (shard(4, 8, dtype="bfloat16"), "bfloat16"),
    ],
)
def test_blocks_of_a_checkpoint_that_do_not_fit_together_are_told(other: Shard, told: str) -> None:
    [line] = disagreements([trace(0, shards=(shard(0, 4),)), trace(1, shards=(other,))])
    assert told in line


def test_waits_in_the_loop_are_accepted_only_where_a_reason_is_known() -> None:
    loop = "forward_backward_pipelining_without_interleaving"
    known = "megatron/core/pipeline_parallel/p2p_communication.py:267 _communicate_shapes"
    waits = [
        ("a copy to the host", known, loop, 6),
        ("a number read from the device", "megatron_dapo/actor/step.py:9 _loss", loop, 2),
        ("a copy to the host", "megatron_dapo/actor/step.py:117 log_probs", "", 2),
    ]
    found = loop_waits([trace(0, waits=waits)])
    assert [(place, reason is None) for (_, place), (_, reason) in found.items()] == [
        (known, False),
        ("megatron_dapo/actor/step.py:9 _loss", True),
    ]


def test_the_tables_hold_peaks_waits_and_faults(constants: Calibration) -> None:
    config = load_config(RECIPES / "qwen2.5_1.5b_1gpu.yaml", [])
    hf = model_shape(config.model.path).hf
    waits = [("a number read from the device", "megatron_dapo/actor/step.py:9 _loss", "forward_backward_x", 2)]
    findings = Findings.of([trace(0, call(), waits=waits, peak=10**9)], config, hf, constants)
    assert "| 0 | TP0 PP0 CP0 DP0 | 1.00 (-96.4%) |" in findings.tables()
    assert "`megatron_dapo/actor/step.py:9 _loss`, 2 times (not accepted)" in findings.tables()
    assert len(findings.faults) == 1 + len(PHASES)
    assert Peak(rank=0, phase="update", traced=1e11 * (1 + 0.99 * CLOSE), planned=1e11).close
    assert not Peak(rank=0, phase="update", traced=1e11 * (1 + 1.01 * CLOSE), planned=1e11).close
    assert Peak(rank=0, phase="rollout", traced=0.9 * SMALL, planned=0).close
    assert not Peak(rank=0, phase="rollout", traced=1.1 * SMALL, planned=0).close


def test_every_kind_of_group_has_two_traced_members() -> None:
    assert telling_ranks(LayoutConfig()) == [0]
    assert telling_ranks(LayoutConfig(tensor=8, pipeline=2, sequence_parallel=True)) == [0, 8, 9]
    assert telling_ranks(LayoutConfig(tensor=2, pipeline=3, context=2, data=4)) == [0, 16, 32, 33, 34, 36]


@pytest.fixture
def torch_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def put(*files: str) -> None:
        for file in ("torch/__init__.py", *files):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "torch" / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return put


CUDA_FILES = ("torch/lib/libtorch_cuda.so", "nvidia/cu13/include/cuda_runtime_api.h")


def test_without_a_cuda_build_the_build_and_the_remedy_are_named(
    torch_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    torch_in()
    code = trace_command(RECIPES / "h100_32.yaml", [], None, ranks="", layers="te", jobs=1)
    assert code == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert f"torch {torch.__version__.split('+')[0]}" in told
    assert "is a build for the CPU; install the CUDA build" in told


def test_a_cuda_build_without_its_headers_or_a_machine_without_gcc_is_told(
    torch_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch_in(CUDA_FILES[0])
    with pytest.raises(cuda_stub.TraceError, match="nvidia-cuda-runtime"):
        cuda_stub.stub_environment(tmp_path)
    torch_in(*CUDA_FILES)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(cuda_stub.TraceError, match="no gcc; install gcc"):
        cuda_stub.stub_environment(tmp_path)


def test_what_the_compiler_refuses_is_shown(torch_in: Callable[..., None], tmp_path: Path) -> None:
    torch_in(*CUDA_FILES)  # an empty header
    with pytest.raises(cuda_stub.TraceError, match=r"cuda_stub\.c"):
        cuda_stub.stub_environment(tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "overrides", "told"),
    [
        ({"ranks": "99"}, [], "--ranks: 99: the config's layout has ranks 0 to 15"),
        ({"ranks": "a"}, [], "--ranks a: give numbers"),
        ({"layers": "x"}, [], "--layers x: te or local"),
        ({}, ["actor.fp8=e4m3"], "actor.fp8 = e4m3: FP8 cannot be traced"),
        ({}, ["actor.layout.context=2"], "actor.layout.context above 1 cannot be traced with --layers te"),
    ],
)
def test_what_cannot_be_traced_is_told(
    options: dict[str, str], overrides: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"ranks": "", "layers": "te"} | options
    code = trace_command(
        RECIPES / "h100_32.yaml", overrides, None, ranks=asked["ranks"], layers=asked["layers"], jobs=1
    )
    assert code == ExitCode.CONFIG
    assert told in capsys.readouterr().err


def test_the_meter_counts_what_is_alive_and_keeps_cpu_tensors_real() -> None:
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        kept = torch.empty(1000, device="cuda")
        with meter.measured("update"):
            torch.empty(500, device="cuda").add(1)
        view = kept.narrow(0, 0, 10)
        assert (meter.bytes, meter.peaks["update"]) == (4000, 8000)
        assert torch.arange(3).tolist() == [0, 1, 2]
        del kept
        assert meter.bytes == 4000
        del view
        assert meter.bytes == 0


def test_a_wait_in_the_loop_over_micro_batches_is_told_from_others() -> None:
    source = "def forward_backward_planted(value):\n    return value.item()\n"
    space: dict[str, Any] = {}
    exec(compile(source, "/x/megatron/core/pipeline_parallel/schedules.py", "exec"), space)
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        value = torch.ones((), device="cuda")
        space["forward_backward_planted"](value)
        value.cpu()
    assert dict(meter.waits) == {
        (
            "a number read from the device",
            "megatron/core/pipeline_parallel/schedules.py:2 forward_backward_planted",
            "forward_backward_planted",
        ): 1,
        ("a copy to the host", "?", ""): 1,
    }


def test_traces_are_dataclasses_that_json_holds() -> None:
    assert dataclasses.asdict(trace(0, call()))["calls"][0] == call()
