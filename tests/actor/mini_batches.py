"""A mini-batch for the actor's tests, and what eq. 8 says about it: transformers' forward in float64 and autograd."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import MiniBatch, Responses
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, OptimizerConfig
from megatron_dapo.config.run_config import ModelConfig
from tests.actor.gloo import RankPlace
from tests.actor.tiny import load_reference

TEMPERATURE = 0.9
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LENGTHS = ((5, 9), (3, 30), (1, 1), (8, 17), (2, 4), (6, 21), (4, 13), (7, 2), (3, 11))
"""(prompt, response) tokens of the responses."""

TRUNCATED = 6
"""This response carries no loss (overlong filtering)."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The numbers of a mini-batch, without the plan, which depends on the layout."""

    responses: Responses
    columns: dict[str, np.ndarray]


def columns(folder: Path, *, seed: int = 3) -> Columns:
    """Nine responses of very different lengths; old log-probs near the model's own, so that both clips cut tokens."""
    rng = np.random.default_rng(seed)
    prompts, lengths = np.array(LENGTHS, dtype=np.int32).T
    responses = Responses(
        token_ids=rng.integers(0, 101, (prompts + lengths).sum()).astype(np.int32),
        sequence_lengths=(prompts + lengths).astype(np.int32),
        prompt_lengths=prompts.astype(np.int32),
    )
    mask = np.repeat(np.arange(len(lengths)) != TRUNCATED, lengths)
    with torch.no_grad():
        log_probs, _ = reference_log_probs(load_reference(folder), responses)
    noise = rng.normal(0, 0.25, len(mask))
    return Columns(
        responses=responses,
        columns={
            "weights": (mask / mask.sum()).astype(np.float32),
            "advantages": np.repeat(rng.normal(0, 1, len(lengths)), lengths).astype(np.float32),
            "old_log_probs": (log_probs.numpy() + noise).astype(np.float32),
            "reference_log_probs": (log_probs.numpy() - noise).astype(np.float32),
            "correction": rng.uniform(0.5, 2, len(mask)).astype(np.float32),
        },
    )


def mini_batch(data: Columns, config: ActorConfig, *, without: tuple[str, ...] = ()) -> MiniBatch:
    """The mini-batch planned for a layout."""
    kept = {name: column for name, column in data.columns.items() if name not in without}
    plan = plan_for_actor(data.responses.sequence_lengths, config, hidden_size=64)
    return MiniBatch(responses=data.responses, plan=plan, **kept)


def reference_log_probs(model: torch.nn.Module, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probs and entropies at TEMPERATURE, each sequence by itself, in float64."""
    model = model.double()
    log_probs, entropies = [], []
    start = 0
    for length, prompt in zip(responses.sequence_lengths.tolist(), responses.prompt_lengths.tolist(), strict=True):
        ids = torch.from_numpy(responses.token_ids[start : start + length].astype(np.int64))
        log_pi = torch.log_softmax(model(ids[None]).logits[0, prompt - 1 : -1] / TEMPERATURE, dim=-1)
        log_probs.append(log_pi.gather(1, ids[prompt:, None])[:, 0])
        entropies.append(-(log_pi.exp() * log_pi).sum(-1))
        start += length
    return torch.cat(log_probs), torch.cat(entropies)


def eq8_loss(log_probs: torch.Tensor, data: Columns) -> torch.Tensor:
    """Eq. 8 over the responses that carry loss, negated: mean over all their tokens of the clipped objective."""
    old, advantages, weights = (
        torch.from_numpy(data.columns[name]).double() for name in ("old_log_probs", "advantages", "weights")
    )
    kept = weights > 0
    ratio = torch.exp(log_probs - old)
    clipped = torch.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.min(ratio * advantages, clipped * advantages)[kept].sum() / kept.sum()


def reference_gradient(folder: Path, data: Columns) -> dict[str, torch.Tensor]:
    """Gradient of `eq8_loss` by Hugging Face name, float64."""
    model = load_reference(folder).double()
    log_probs, _ = reference_log_probs(model, data.responses)
    eq8_loss(log_probs, data).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def actor_config(layout: dict[str, Any] | None = None, *, optimizer: dict[str, Any] | None = None, **fields: Any):
    """ActorConfig with a budget that makes several micro-batches of the mini-batch above."""
    optimizer_fields = {"warmup_rollout_steps": 0, "lr": 1e-3} | (optimizer or {})
    return ActorConfig(
        layout=LayoutConfig(**(layout or {})),
        optimizer=OptimizerConfig(**optimizer_fields),
        device="cpu",
        **{"micro_batch_tokens": 40, "logprob_chunk_tokens": 7} | fields,
    )


def start_actor(
    place: RankPlace,
    folder: Path,
    config: ActorConfig,
    *,
    dtype: str = "float32",
    fp32_head: bool = False,
    **options: Any,
):
    """The actor of one rank."""
    from megatron_dapo.actor.actor import MegatronActor

    return MegatronActor(
        config,
        ModelConfig(path=str(folder), context_length=256, dtype=dtype, fp32_head=fp32_head),
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        **{"steps_per_rollout": 2, "seed": 1, "timeout_s": 60} | options,
    )


def relative_error(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """For each tensor |got - wanted| / |wanted| in the L2 norm; `` is the whole gradient's."""
    assert got.keys() == wanted.keys()
    pairs = {name: (got[name].double(), wanted[name].double()) for name in wanted}
    errors = {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}
    total = sum(float((a - b).norm() ** 2) for a, b in pairs.values()) / sum(
        float(b.norm() ** 2) for _, b in pairs.values()
    )
    return errors | {"": total**0.5}
