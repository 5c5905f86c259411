"""`rollout.speculative` as SGLang takes it: its own argument parser, and its classes with our hooks in place."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dapo.cluster.engines import own_engines
from megatron_dapo.cluster.placement import PlacementError
from megatron_dapo.config import load_config
from rollout.config import RolloutConfig, SpeculativeConfig
from rollout.cpu import KEEP_DRAFTS
from rollout.cpu.plugin import DRAFTS, keep_draft, update_model_alone
from rollout.server import launch_server
from rollout.server.server_command import ServerSpec, server_arguments
from tests.config.test_load import MINIMAL

SPEC = ServerSpec(
    model_path=Path("/models/tiny"),
    device="cuda",
    dtype="bfloat16",
    context_length=1024,
    seed=11,
    log_path=Path("log"),
)
GIVEN = {
    "plain": SpeculativeConfig(),
    "ngram": SpeculativeConfig(method="ngram"),
    "ngram of 4": SpeculativeConfig(method="ngram", draft_tokens=4),
    "eagle": SpeculativeConfig(method="eagle", draft_model="/models/draft"),
    "eagle3 of 3": SpeculativeConfig(method="eagle3", draft_model="/models/draft", draft_tokens=3),
}
ASK = """
import argparse, json, pkgutil, sys
from rollout.cpu import standins
standins.install()
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
given, hooked = json.loads(sys.argv[1])
names = ["algorithm", "draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens", "ngram_max_bfs_breadth"]
parsed = {name: vars(parser.parse_args(arguments)) for name, arguments in given.items()}
found = {name: [values[f"speculative_{key}"] for key in names] for name, values in parsed.items()}
print(json.dumps([found, [hasattr(pkgutil.resolve_name(name), "__wrapped__") for name in hooked]]))
"""


def test_sglang_takes_what_it_is_told_and_drafts_keep_their_weights() -> None:
    commands = {name: server_arguments(RolloutConfig(speculative=each), SPEC, 31000) for name, each in GIVEN.items()}
    asked = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps([commands, list(DRAFTS)])],
        env=os.environ | {KEEP_DRAFTS: "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    found, hooked = json.loads(asked.stdout.splitlines()[-1])
    assert found == {
        "plain": [None, None, None, None, None, 10],
        "ngram": ["NGRAM", None, None, None, None, 10],
        "ngram of 4": ["NGRAM", None, None, None, 5, 1],
        "eagle": ["EAGLE", "/models/draft", None, None, None, 10],
        "eagle3 of 3": ["EAGLE3", "/models/draft", 3, 1, 4, 10],
    }
    assert hooked == [True, True]


def test_the_launcher_keeps_drafts_only_where_there_are_some() -> None:
    for name, each in GIVEN.items():
        variables = launch_server.environment(server_arguments(RolloutConfig(speculative=each), SPEC, 31000))
        assert (KEEP_DRAFTS in variables) == (name != "plain")


def test_drafts_leave_and_come_back_with_the_memory() -> None:
    for each in GIVEN.values():
        arguments = server_arguments(RolloutConfig(speculative=each), replace(SPEC, shares_memory=True), 31000)
        assert ("--enable-draft-weights-cpu-backup" in arguments) == (each.draft_model is not None)


def test_an_update_reaches_the_model_alone() -> None:
    class Model:
        def update_weights_from_tensor(self, request: str) -> tuple[bool, str]:
            return True, f"the model got {request}"

    class Worker:
        target_worker = Model()

    assert keep_draft(Worker(), "a folder")[0]
    assert update_model_alone(Worker(), "tensors") == (True, "the model got tensors")


def test_servers_that_would_be_on_a_cpu_are_not_started(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MINIMAL)
    config = load_config(tmp_path / "config.yaml", ["rollout.speculative.method=ngram", "model.dtype=bfloat16"])
    with pytest.raises(PlacementError, match=r"rollout.speculative.method = ngram: needs servers on GPUs"):
        own_engines(config, tmp_path, gpus=())
    assert len(own_engines(config, tmp_path, gpus=("0",))) == 1
