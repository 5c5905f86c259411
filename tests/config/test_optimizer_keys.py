"""`actor.optimizer.on_cpu`, `compact` and `actor.offload`: what they contradict; why moments in bfloat16 need faster
decay."""

import pytest
import torch

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.root import _LARGEST_DECAY
from tests.plan.conftest import RECIPES

RECIPE = RECIPES / "h100_32.yaml"
ON_CPU, COMPACT = "actor.optimizer.on_cpu=true", "actor.optimizer.compact=weights"
OFFLOAD = "actor.offload.optimizer_state"
PLAIN = f"{OFFLOAD}=false"
SUSPENDED = "actor.offload.communicators=true"


@pytest.mark.parametrize(
    "overrides",
    [
        [ON_CPU, PLAIN],
        [COMPACT, PLAIN],
        [COMPACT, f"{OFFLOAD}=true"],
        ["actor.optimizer.compact=all", "actor.optimizer.betas=[0.9,0.99]"],
        [ON_CPU, PLAIN, "actor.offload.between_phases=all"],
        [ON_CPU, PLAIN, "actor.device=cpu"],
    ],
    ids=" ".join,
)
def test_what_goes_together(overrides):
    load_config(RECIPE, overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([ON_CPU, PLAIN, "actor.optimizer.distributed=false"], ["on_cpu", "actor.optimizer.distributed"]),
        ([COMPACT, "actor.optimizer.distributed=false"], ["compact = weights", "actor.optimizer.distributed"]),
        ([ON_CPU, PLAIN, "model.dtype=float32", "actor.fp8=none"], ["on_cpu = true: not with this model.dtype"]),
        ([COMPACT, "model.dtype=float32", "actor.fp8=none"], ["compact = weights: not with this model.dtype"]),
        ([ON_CPU, PLAIN, "actor.lora.rank=8"], ["on_cpu", "actor.lora.rank"]),
        ([COMPACT, "actor.lora.rank=8"], ["compact", "actor.lora.rank"]),
        ([COMPACT, "actor.device=cpu"], ["compact", "actor.device", "CUDA"]),
        ([ON_CPU, COMPACT, PLAIN], ["on_cpu", "actor.optimizer.compact"]),
        ([ON_CPU, f"{OFFLOAD}=true"], ["on_cpu", OFFLOAD, "nothing to bring back"]),
        (["actor.optimizer.compact=all"], ["compact = all: betas has 0.999", "0.99", "set weights"]),
        ([SUSPENDED], ["actor.offload.communicators", "run.mode=colocated on CUDA", "remove it"]),
        ([SUSPENDED, "run.mode=colocated", "actor.device=cpu"], ["actor.offload.communicators", "on CUDA"]),
        (["actor.optimizer.compact=half"], ["actor.optimizer.compact", "'none', 'weights' or 'all'"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_contradiction_names_both_keys(overrides, words):
    with pytest.raises(ConfigError) as error:
        load_config(RECIPE, overrides)
    for word in words:
        assert word in str(error.value)


def test_communicators_can_leave_a_shared_gpu():
    assert load_config(RECIPES / "h100_32_colocated.yaml", [SUSPENDED]).actor.offload.communicators


def halved_after(decay: float, dtype: torch.dtype) -> torch.Tensor:
    """Updates with a gradient of zero until a moment is half of what it was, at most 2000; for moments of a binade."""
    start = torch.linspace(1, 2, 129, dtype=torch.float64)[:-1].to(dtype)
    moment, found = start.clone(), torch.full((128,), 2000.0)
    for step in range(1, 2000):
        moment = (decay * moment.float()).to(dtype)
        found = torch.where((moment <= start / 2) & (found == 2000), float(step), found)
    return found


def test_above_the_bound_a_moment_in_bfloat16_never_decays():
    usual = halved_after(0.999, torch.float32)
    assert usual.max() < 700, "it halves in 693 updates"
    assert halved_after(0.999, torch.bfloat16).min() == 2000
    at_the_bound = halved_after(_LARGEST_DECAY, torch.bfloat16)
    assert at_the_bound.max() < 1.5 * 69
    assert at_the_bound.min() > 69 / 1.5
