"""What is concluded from traces, and what is told where none can be made. Needs no CUDA wheels."""

import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.plan.memory import PHASES, trainer_memory
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions
from tests.symbolic import one_rank, rank_processes
from tests.symbolic.__main__ import report
from tests.symbolic.findings import (
    CAUTIOUS,
    CLOSE,
    SMALL,
    Call,
    Findings,
    Peak,
    RankTrace,
    Wait,
    disagreements,
    loop_waits,
    stand_ins,
)
from tests.symbolic.meter import Meter
from tests.symbolic.rank_processes import chosen_ranks, trace_ranks
from tests.symbolic.test_recipes import FOLDER as RECIPES


def call(op: str = "all_reduce SUM", tensors: str = "float32[8]", **fields: Any) -> Call:
    made = Call("nccl TP", (0, 1), op, tensors, None, "update", "megatron_dapo/actor/step.py:1 backward", False)
    return made._replace(**fields)


def trace(rank: int, *calls: Call, waits: Any = (), peak: int = 1) -> RankTrace:
    return RankTrace(
        rank=rank,
        place={"tensor": rank, "pipeline": 0, "context": 0, "data": 0},
        kernels="",
        calls=calls,
        waits=waits,
        peaks=dict.fromkeys(PHASES, peak),
    )


def test_equal_calls_and_matching_messages_are_no_fault() -> None:
    one = trace(0, call(), call("send", peer=1), call("broadcast from 0"))
    other = trace(1, call(), call("receive", peer=0), call("broadcast from 0"))
    assert disagreements([one, other]) == []


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


def test_waits_in_the_loop_are_told() -> None:
    loop = "forward_backward_pipelining_without_interleaving"
    waits = [
        Wait("a number read from the device", "megatron_dapo/actor/step.py:9 _loss", loop, 2),
        Wait("a copy to the host", "megatron_dapo/actor/step.py:117 log_probs", "", 2),
    ]
    found = loop_waits([trace(0, waits=waits), trace(1)])
    assert found == {("a number read from the device", "megatron_dapo/actor/step.py:9 _loss"): 2}


def test_the_tables_hold_peaks_waits_and_faults() -> None:
    config = load_config(RECIPES / "qwen2.5_1.5b_1gpu.yaml", [])
    hf = model_dimensions(config.model.path)[0]
    waits = [Wait("a number read from the device", "megatron_dapo/actor/step.py:9 _loss", "forward_backward_x", 2)]
    findings = Findings([trace(0, call(), waits=waits, peak=10**9)], config, hf, load_calibration())
    bare = dataclasses.replace(load_calibration(), framework_memory=0.0, fragmentation=0.0)  # no trace sees these
    planned = trainer_memory(Scenario(config, hf, bare))[0].peaks[PHASES[0]]
    assert f"| 0 | TP0 PP0 CP0 DP0 | 1.00 ({100 * (1e9 / planned - 1):+.1f}%) |" in findings.tables()
    assert "`megatron_dapo/actor/step.py:9 _loss`, 2 times." in findings.tables()
    assert len(findings.faults) == 1 + len(PHASES)
    assert Peak(rank=0, phase="update", traced=1e11 * (1 + 0.99 * CLOSE), planned=1e11).close
    assert not Peak(rank=0, phase="update", traced=1e11 * (1 + 1.01 * CLOSE), planned=1e11).close
    assert Peak(rank=0, phase="update", traced=1e11 * (1 - 0.99 * CAUTIOUS), planned=1e11).close
    assert not Peak(rank=0, phase="update", traced=1e11 * (1 - 1.01 * CAUTIOUS), planned=1e11).close
    assert Peak(rank=0, phase="rollout", traced=0.9 * SMALL, planned=0).close
    assert not Peak(rank=0, phase="rollout", traced=1.1 * SMALL, planned=0).close


def test_every_kind_of_group_has_two_traced_members() -> None:
    assert chosen_ranks("", LayoutConfig()) == [0]
    assert chosen_ranks("", LayoutConfig(tensor=8, pipeline=2, sequence_parallel=True)) == [0, 8, 9]
    assert chosen_ranks("", LayoutConfig(tensor=2, pipeline=3, context=2, data=4)) == [0, 16, 32, 33, 34, 36]


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
    torch_in: Callable[..., None],
) -> None:
    torch_in()
    with pytest.raises(ConfigError, match=r"needs a CUDA build of torch.* install the CUDA build"):
        report(RECIPES / "h100_32.yaml", [], ranks="", layers="te", jobs=1)


def traced(*ranks: int) -> list[RankTrace]:
    return trace_ranks(RECIPES / "h100_32.yaml", [], ranks, layers="te", jobs=1)


def test_a_cuda_build_without_its_headers_or_a_machine_without_gcc_is_told(
    torch_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch_in(CUDA_FILES[0])
    with pytest.raises(ConfigError, match="nvidia-cuda-runtime's headers"):
        rank_processes.stub_environment(tmp_path)
    torch_in(*CUDA_FILES)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="gcc"):
        rank_processes.stub_environment(tmp_path)


def test_what_the_compiler_refuses_is_shown(torch_in: Callable[..., None], tmp_path: Path) -> None:
    torch_in(*CUDA_FILES)  # an empty header
    with pytest.raises(ConfigError, match=r"cuda_stub\.c"):
        rank_processes.stub_environment(tmp_path)


@pytest.mark.parametrize("name", ["with blank", "with:colon"])
def test_a_temporary_folder_that_ld_preload_cannot_take_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        traced(0)
    assert not list((tmp_path / name).iterdir())


def test_a_temporary_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="absent"):
        traced(0)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_stub_lies_in_the_folder_of_the_trace(
    torch_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch_in(*CUDA_FILES)
    source, folder = tmp_path / "stub.c", tmp_path / "folder"
    source.write_text("int stub;\n")
    monkeypatch.setattr(rank_processes, "SOURCE", source)
    folder.mkdir()
    variables = rank_processes.stub_environment(folder)
    assert [str(file) for file in folder.iterdir()] == [variables["LD_PRELOAD"]]
    assert variables["TMPDIR"] == str(folder)


@pytest.mark.parametrize(
    ("ranks", "overrides", "told"),
    [
        ("99", [], "--ranks 99: give ranks of 0 to 15"),
        ("0,-1", [], "--ranks 0,-1: give ranks of 0 to 15"),
        ("0,,1", [], "--ranks 0,,1: give ranks of 0 to 15"),
        ("a", [], "--ranks a: give ranks of 0 to 15"),
        ("", ["actor.fp8=e4m3"], "actor.fp8 = e4m3: cannot be traced; give actor.fp8=none"),
        ("", ["actor.layout.context=2"], "actor.layout.context = 2: cannot be traced"),
    ],
)
def test_what_cannot_be_traced_is_told(ranks: str, overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        report(RECIPES / "h100_32.yaml", overrides, ranks=ranks, layers="te", jobs=1)


def test_experts_cannot_be_traced() -> None:
    recipe, overrides = RECIPES.parent / "qwen3_30b_a3b" / "h100_32.yaml", ["actor.layout.context=1"]
    with pytest.raises(ConfigError, match="a mixture of experts cannot be traced"):
        report(recipe, overrides, ranks="", layers="te", jobs=1)


def test_transformer_engine_keeps_a_tensor_for_each_shape_of_a_weight() -> None:
    config = load_config(RECIPES / "h100_32.yaml", ["actor.layout.tensor=8", "actor.layout.pipeline=1"])
    hf = model_dimensions(config.model.path)[0]
    layer = 40 * 128 + 2 * 8 * 128 + 40 * 128 + 3 * 27648  # queries, keys and values, their output, the MLP
    assert stand_ins(config, hf, last=False) == layer // 8 * 5120 * 2
    assert stand_ins(config, hf, last=True) == (layer + 152064) // 8 * 5120 * 2


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


def test_a_rank_that_is_given_twice_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def trace_ranks(path: Path, overrides: list[str], ranks: list[int], **rest: Any) -> list[RankTrace]:
        asked.extend(ranks)
        return [trace(rank) for rank in ranks]

    monkeypatch.setattr(rank_processes, "trace_ranks", trace_ranks)
    report(RECIPES / "h100_32.yaml", [], ranks="1, 0,1,0", layers="te", jobs=1)
    assert asked == [0, 1]


COMMAND = """
import sys
from tests.symbolic import rank_processes
from tests.symbolic.__main__ import main
rank_processes.stub_environment = lambda folder: {"TMPDIR": str(folder)}
sys.executable = sys.argv[1]
main([sys.argv[2], "--ranks", "0,1,2", "--jobs", "1"])
"""


def test_a_trace_that_is_ended_ends_its_ranks_and_leaves_no_files(tmp_path: Path) -> None:
    rank, job, temporary = tmp_path / "rank", tmp_path / "job.json", tmp_path / "temporary"
    rank.write_text(
        f'#!/bin/sh\nprintf %s "$5" > {job}.new\necho $$ >> {tmp_path}/pids\nmv {job}.new {job}\nexec sleep 1000\n'
    )
    rank.chmod(0o755)
    temporary.mkdir()
    command = [sys.executable, "-c", COMMAND, str(rank), str(RECIPES / "h100_32.yaml")]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(temporary)}) as process:
        try:
            end = time.monotonic() + 120
            while not job.is_file() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            process.terminate()
            assert process.wait(60) == 143
        finally:
            process.kill()
    assert json.loads(job.read_text())["parent"] == process.pid
    assert list(temporary.iterdir()) == []
    [pid] = (tmp_path / "pids").read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_rank_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_with(parent: int) -> None:
        raise SystemExit(f"ends with {parent}")

    monkeypatch.setattr(one_rank, "end_with", end_with)
    monkeypatch.setattr(sys, "argv", ["one_rank", '{"parent": 7}'])
    with pytest.raises(SystemExit, match="ends with 7"):
        one_rank.main()


@pytest.mark.parametrize(
    ("context", "budget", "lengths"), [(128, 4096, [128] * 32), (22528, 32768, [22528, 10240]), (22528, 4096, [22528])]
)
def test_a_traced_row_is_full_and_no_response_is_longer_than_the_context(
    context: int, budget: int, lengths: list[int]
) -> None:
    sizes = [f"model.context_length={context}", f"actor.micro_batch_tokens={budget}"]
    rest = ["data.max_prompt_tokens=64", "rollout.max_new_tokens=64", "algorithm.overlong.buffer=12"]
    config = load_config(RECIPES / "h100_32.yaml", [*sizes, *rest])
    responses = one_rank._mini_batch(config, reference=False).responses
    assert responses.sequence_lengths.tolist() == lengths * 2
