"""What the ranks of a certificate run: the reference in one process, and each layout against it.

Reference gradients lie in files, one for each aggregation: only rank 0 of a layout reads them, one tensor at a time.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.device import prepare
from megatron_dapo.actor.packing import MicroBatchPlan
from megatron_dapo.actor.ranks import RankPlace
from megatron_dapo.actor.step_data import LogProbs, MiniBatch, Responses
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.config.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """What stays the same over all calls: the model, how it is trained, how long a rank may wait for another."""

    actor: ActorConfig
    model: ModelConfig
    objective: PolicyObjective
    temperature: float
    seed: int
    timeout_s: float

    def start(self, place: RankPlace) -> MegatronActor:
        """The actor of one rank."""
        return MegatronActor(
            self.actor,
            self.model,
            rank=place.rank,
            world_size=place.world_size,
            rendezvous=place.rendezvous,
            steps_per_rollout=1,
            seed=self.seed,
            timeout_s=self.timeout_s,
        )

    def on(self, layout: LayoutConfig) -> "Job":
        """The same on another layout."""
        return dataclasses.replace(self, actor=dataclasses.replace(self.actor, layout=layout))

    def reference(self) -> "Job":
        """The same in one process, in float32, every saving of memory switched off."""
        actor = dataclasses.replace(self.actor, layout=LayoutConfig(), recompute="none", fused_linear_log_prob=False)
        return dataclasses.replace(self, actor=actor, model=dataclasses.replace(self.model, dtype="float32"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One mini-batch on one layout against the reference."""

    loss: float
    """|loss - reference| / |reference|."""

    gradient: float
    """|gradient - reference| / |reference| of all parameters together, L2 norms."""

    worst: float
    """Largest such difference of a single parameter, against that parameter's own gradient."""

    parameter: str
    """Which one, by its Hugging Face name."""

    def within(self, bounds: "Bounds") -> bool:
        """Whether all are at most the bounds; never for a number that is not finite."""
        return self.loss <= bounds.loss and self.gradient <= bounds.gradient and self.worst <= bounds.parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Largest relative differences that are rounding."""

    loss: float
    gradient: float
    parameter: float


def sampled_responses(place: RankPlace, job: Job, responses: Responses) -> Responses:
    """The same prompts and lengths with response tokens drawn from the model, as in training.

    Tokens at random would not do: a trained model gives some of them exp(-30), and one such token is the largest part
    of the gradient and of its rounding.
    """
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = prepare(job.actor.device).device
    torch.set_num_threads(job.actor.threads)
    set_seed(job.seed)
    network = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32, local_files_only=True)
    sequences = np.split(responses.token_ids, np.cumsum(responses.sequence_lengths)[:-1])
    prompts = [ids[:length] for ids, length in zip(sequences, responses.prompt_lengths, strict=True)]
    longest = max(len(prompt) for prompt in prompts)
    # Padded on the left: all responses begin at the same place.
    padded = torch.tensor(np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])).long()
    mask = torch.arange(longest) >= longest - torch.tensor(responses.prompt_lengths)[:, None]
    tokens = int(responses.response_lengths.max())
    drawn = network.to(device).generate(
        padded.to(device),
        attention_mask=mask.long().to(device),
        do_sample=True,
        temperature=job.temperature,
        top_p=1.0,
        top_k=0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )[:, longest:]
    answers = drawn.cpu().numpy().astype(np.int32)
    parts = [
        part
        for prompt, answer, length in zip(prompts, answers, responses.response_lengths, strict=True)
        for part in (prompt, answer[:length])
    ]
    return dataclasses.replace(responses, token_ids=np.concatenate(parts))


def current_log_probs(place: RankPlace, job: Job, responses: Responses, plan: MicroBatchPlan) -> LogProbs | None:
    """The model's log-probs of the responses."""
    return job.start(place).log_probs(responses, plan, job.temperature)


def write_reference(
    place: RankPlace, job: Job, mini_batches: Mapping[str, MiniBatch], folder: Path
) -> dict[str, float]:
    """The loss of each mini-batch by its name; its gradient goes to `folder`."""
    actor = job.start(place)
    losses = {}
    for name, mini_batch in mini_batches.items():
        result = actor.loss_and_gradients(mini_batch, job.objective, job.temperature)
        assert result is not None
        losses[name], gradients = result
        save_file(gradients, _file(folder, name))
    return losses


def compare(
    place: RankPlace, job: Job, mini_batches: Sequence[tuple[str, MiniBatch]], losses: Mapping[str, float], folder: Path
) -> list[Difference] | None:
    """On rank 0 each mini-batch's difference from the reference of its name; None on the other ranks."""
    actor = job.start(place)
    differences = []
    for name, mini_batch in mini_batches:
        result = actor.loss_and_gradients(mini_batch, job.objective, job.temperature)
        if result is not None:
            differences.append(_difference(*result, losses[name], _file(folder, name)))
    return differences if place.rank == 0 else None


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _difference(loss: float, gradients: Mapping[str, Tensor], reference_loss: float, file: Path) -> Difference:
    worst, parameter, distance, size = -1.0, "", 0.0, 0.0
    with safe_open(file, framework="pt") as reference:
        if set(reference.keys()) != set(gradients):
            missing = sorted(set(reference.keys()) ^ set(gradients))
            raise ValueError(f"parameters with a gradient on one side only: {', '.join(missing)}")
        for name in reference.keys():  # noqa: SIM118  (no mapping)
            wanted = reference.get_tensor(name).double()
            error = relative_error(gradients[name], wanted)
            # Not max(): it would pass over a nan.
            if not (error <= worst or math.isnan(worst)):
                worst, parameter = error, name
            distance = math.hypot(distance, float((gradients[name] - wanted).norm()))
            size = math.hypot(size, float(wanted.norm()))
    return Difference(
        loss=relative_error(torch.tensor(loss), torch.tensor(reference_loss)),
        gradient=distance / size,
        worst=worst,
        parameter=parameter,
    )


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted| in the L2 norm, in float64; 0 if both are 0, infinite if only `wanted` is."""
    distance, size = float((got.double() - wanted.double()).norm()), float(wanted.double().norm())
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / size
