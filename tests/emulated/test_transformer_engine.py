"""TransformerEngine there, absent, broken: what the actor does about it, without a GPU.

Where TransformerEngine's Python files are installed its own layers are built, over stubs of its compiled parts
(te_session); everywhere modules with the same state stand in for them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

import pytest
import torch

from megatron_dapo.config.actor_config import ActorConfig, OffloadConfig
from tests.actor.checkpoint.test_checkpoint import train
from tests.actor.gloo import ROOT, RankPlace, end_workers, run_ranks
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import MIXTURE, save_tiny
from tests.emulated import te_stub


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    end_workers()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=False)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def in_a_process(*arguments: str, folders: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=280)


@contextmanager
def layers_like_transformer_engines() -> Iterator[None]:
    """Norms and attention get what TransformerEngine's have besides: an extra state, empty, that refuses a pickle."""
    from megatron_dapo.actor.model.model_chunks import RMSNorm
    from megatron_dapo.actor.model.packed_attention import PackedAttention

    def get_extra_state(self: torch.nn.Module) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self: torch.nn.Module, state: torch.Tensor | None) -> None:
        assert state is None or state.numel() == 0, "a pickle"

    with mock.patch.multiple(RMSNorm, get_extra_state=get_extra_state, set_extra_state=set_extra_state):
        # In a checkpoint's plan Megatron leaves out the attention's.
        shards: dict[str, Any] = {"sharded_state_dict": lambda self, *args, **kwargs: {}}
        methods = {"get_extra_state": get_extra_state, "set_extra_state": set_extra_state}
        with mock.patch.multiple(PackedAttention, **methods, **shards):
            yield


def train_with(place: RankPlace, folder: Path, data: Columns, extra: bool, save: Path | None, load: Path | None):
    if not extra:
        return train(place, folder, {}, data, {}, save=save, load=load)
    with layers_like_transformer_engines():
        return train(place, folder, {}, data, {}, save=save, load=load)


@pytest.mark.parametrize("written_with", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_with_and_without_transformer_engine(written_with, model, data, tmp_path):
    [without_break] = run_ranks(1, train_with, model, data, written_with, tmp_path / "step", None)
    [resumed] = run_ranks(1, train_with, model, data, not written_with, None, tmp_path / "step")
    assert resumed == without_break[2:]


@pytest.fixture(scope="module", params=["qwen3", MIXTURE])
def real(request, tmp_path_factory) -> dict[str, Any]:
    model = save_tiny(tmp_path_factory.mktemp(request.param), request.param, tied=False)
    if not te_stub.python_is_there():
        pytest.skip("TransformerEngine's Python files are not installed")
    ran = in_a_process("-m", "tests.emulated.te_session", str(model), str(tmp_path_factory.mktemp("session")))
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("written", ["with", "without"])
def test_a_checkpoint_of_its_own_layers_goes_on_without_them_and_back(real, written):
    """The layers differ in nothing but extra states, or this would not show a thing."""
    assert real["only with"]
    renamed = ("norm", ".experts.linear_fc")  # experts in a group
    assert all(key.endswith("_extra_state") for key in real["only with"] if not any(part in key for part in renamed))
    assert len(real[written]["all"]) > 20
    assert real[written]["equal"] == real[written]["all"]


def test_its_own_layers_have_the_names_and_shapes_of_the_weights(real):
    assert len(real["names"]) > 20


def test_no_fp8_recipe_of_the_config_has_a_state_in_its_own_layers(real):
    assert sorted(real["stateless recipes"]) == sorted(get_args(get_type_hints(ActorConfig)["fp8_recipe"]))


def test_its_own_layers_give_up_their_fp8_weights(real):
    assert real["workspaces"]["places"] > 8
    assert real["workspaces"]["left"] == 0


def fp8_weights_after(place: RankPlace, folder: Path, data: Columns, between_phases: str) -> int:
    """Kept FP8 weights after log-probs; each layer keeps one, as TransformerEngine's do, in `_fp8_workspaces`."""
    config = actor_config(offload=OffloadConfig(between_phases=between_phases))
    actor = start_actor(place, folder, config)
    layers = [module for module in actor.optimizer.chunks[0].modules() if type(module).__name__.endswith("Linear")]
    for layer in layers:
        layer._fp8_workspaces = {}
        layer.register_forward_hook(lambda layer, *_: layer._fp8_workspaces.update(weight=layer.weight))
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    actor.log_probs(data.responses, batch.plan, TEMPERATURE)
    return sum(len(layer._fp8_workspaces) for layer in layers)


def test_fp8_weights_leave_the_device_with_the_weights(model, data):
    assert run_ranks(1, fp8_weights_after, model, data, "optimizer") == [17]
    assert run_ranks(1, fp8_weights_after, model, data, "all") == [0]


KERNELS = """
def _called(*args, **kwargs):
    raise AssertionError("a CUDA kernel was called on the CPU")
multi_tensor_applier = multi_tensor_l2norm = multi_tensor_scale = _called
class FusedAdam:
    __init__ = step = _called
class FusedSGD(FusedAdam):
    pass
"""
"""What Megatron's optimizers take from TransformerEngine, and from Apex."""

ONE_UPDATE = """
import sys
from pathlib import Path
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, actor_config, columns, mini_batch, start_actor
folder, meeting = sys.argv[1:]
config = actor_config()
place = RankPlace(rank=0, world_size=1, rendezvous=f"file://{meeting}")
actor = start_actor(place, Path(folder), config)
batch = mini_batch(columns(Path(folder)), config, without=("reference_log_probs", "correction"))
[report] = actor.update([batch], PolicyObjective(), TEMPERATURE)
print(report.optimizer_step, actor.describe()["kernels"]["optimizer"])
"""


def write_package(folder: Path, modules: dict[str, str]) -> Path:
    for name, text in modules.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.slow
def test_a_cpu_rank_trains_where_cuda_kernels_are_installed(model, tmp_path):
    packages = write_package(
        tmp_path / "packages",
        {
            "transformer_engine/__init__.py": "__version__ = '2.19.0'",
            "transformer_engine/pytorch/__init__.py": "",
            "transformer_engine/pytorch/optimizers.py": KERNELS,
            "apex/__init__.py": "",
            "apex/multi_tensor_apply.py": KERNELS,
            "apex/optimizers.py": KERNELS,
            "amp_C.py": KERNELS,
        },
    )
    ran = in_a_process("-c", ONE_UPDATE, str(model), str(tmp_path / "meeting"), folders=(packages,))
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1].startswith("1 AdamW of this package")


ON_A_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda index: None
torch.cuda.get_device_capability = lambda index: (9, 0)
from megatron_dapo.actor.device import prepare
try:
    prepare("auto")
except RuntimeError as error:
    print(error)
"""


def test_a_broken_transformer_engine_is_named_with_its_cause(tmp_path):
    packages = write_package(
        tmp_path,
        {
            "transformer_engine/__init__.py": "try:\n    from . import pytorch\nexcept ImportError:\n    pass",
            "transformer_engine/pytorch.py": "raise ImportError('libcudart.so.12: cannot open shared object file')",
        },
    )
    ran = in_a_process("-c", ON_A_GPU, folders=(packages,))
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "TransformerEngine is installed but cannot be imported with torch" in ran.stdout
    assert "ImportError: libcudart.so.12: cannot open shared object file. Build it again for this torch" in ran.stdout
