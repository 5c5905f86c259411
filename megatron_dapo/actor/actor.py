"""The actor: one rank of the trainer.

Every rank holds a MegatronActor and makes every call with the same arguments; it takes its own share from the plan. In
a run each rank is a Ray actor process, in the tests a plain one.

Nothing here imports Megatron before the constructor has prepared the device for it.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_dapo.actor import device, step_data
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.offload import PARTS, ReferenceWeights, parts_at_rest
from megatron_dapo.actor.pass_timer import PassClock
from megatron_dapo.actor.step_data import LearningRate, LogProbs, MicroBatchPlan, MiniBatch, Responses, UpdateMetrics
from megatron_dapo.algorithm.policy_loss import Objective
from megatron_dapo.config.actor_config import ActorConfig
from megatron_dapo.config.run_config import ModelConfig

if TYPE_CHECKING:
    from megatron_dapo.actor.checkpoint.checkpoint import PendingSave


class MegatronActor:
    """Model, optimizer and their place among the ranks.

    Example, one process:
        actor = MegatronActor(ActorConfig(), model, rank=0, world_size=1, rendezvous="tcp://127.0.0.1:29500",
                              steps_per_rollout=16, seed=1, timeout_s=600)
        old = actor.log_probs(responses, plan, temperature=1.0)
        reports = actor.update(mini_batches, PolicyObjective(), temperature=1.0)
    """

    def __init__(
        self,
        config: ActorConfig,
        model: ModelConfig,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        steps_per_rollout: int,
        seed: int,
        timeout_s: float,
        learning_rate: LearningRate | None = None,
        keep_reference: bool = False,
    ) -> None:
        """Meet the other ranks and load the model's weights.

        Args:
            rendezvous: where the ranks meet, "tcp://host:port" or "file:///path".
            steps_per_rollout: optimizer steps of a rollout step, in which the warm-up is configured.
            timeout_s: longest wait for another rank, in any collective.
            learning_rate: a schedule instead of the one that `config.optimizer` describes.
            keep_reference: keep a copy of the model's weights on the host, for `reference_log_probs`.
        """
        self.config = config
        self.model, self._dtype, self.rank = model, getattr(torch, model.dtype), rank
        self.device = device.prepare_for(config, model.dtype)
        # From here on Megatron may be imported.
        from megatron_dapo.actor.checkpoint import checkpoint
        from megatron_dapo.actor.device import communicators, process_groups
        from megatron_dapo.actor.model.model_chunks import build_model
        from megatron_dapo.actor.optimizer import ActorOptimizer
        from megatron_dapo.actor.step import ForwardBackward
        from megatron_dapo.actor.weights import hf_weights, lora

        self._checkpoint, self._weights, self._groups = checkpoint, hf_weights, process_groups
        torch.set_num_threads(config.threads)
        folder = Path(model.path)
        self.hf = HFModelConfig.load(folder)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "rendezvous": rendezvous}
        process_groups.initialise(config.layout, **place, device=self.device, timeout_s=timeout_s, seed=seed)
        chunks = build_model(self.hf, config, model.dtype, self.device, upcasts_head=model.upcasts_head)
        hf_weights.load_hf_weights(chunks, self.hf, folder)
        adapters = lora.Adapters(chunks, self.hf, config.lora, folder, seed=seed) if config.lora.rank else None
        rate = learning_rate or LearningRate.of(config.optimizer, steps_per_rollout=steps_per_rollout)
        options: dict[str, Any] = {"overlap": self.device.overlap_grad_reduce, "adapters": adapters}
        self.optimizer = ActorOptimizer(chunks, config.optimizer, rate, **options)
        self._chunks = self.optimizer.chunks
        self.reference = ReferenceWeights(self._chunks) if keep_reference else None
        self.passes = ForwardBackward(self._chunks, config, vocabulary=self.hf.vocab_size, device=self.device.device)
        self._pending: PendingSave | None = None
        self.communicators = communicators.Communicators(config.offload.communicators)
        self.memory = self.optimizer.memory
        self.memory.offload(*parts_at_rest(config.offload))

    def place(self) -> dict[str, int]:
        """This rank's place in the layout: {"tensor": 1, "pipeline": 0, "context": 0, "data": 0, "expert": 0}."""
        from megatron.core import parallel_state

        return {
            "tensor": self.passes.tensor_rank,
            "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
            "context": self.passes.context_rank,
            "data": self.passes.data_rank,
            "expert": parallel_state.get_expert_model_parallel_rank(),
        }

    @contextmanager
    def timed(self) -> Iterator[PassClock]:
        """The passes made meanwhile are timed: `clock.times()`, once it is over."""
        clock = PassClock(self.device.device)
        self.passes.tell(clock)
        try:
            yield clock
        finally:
            self.passes.tell(None)

    def time_tensor_parallel(self, tokens: int) -> dict[str, Any] | None:
        """Seconds, the median of five, and bytes of an all-reduce of so many tokens' hidden states over the
        tensor-parallel ranks, which communicate inside the passes, where no clock stands; None without such. Every rank
        calls, with equal `tokens` within a group."""
        if self.config.layout.tensor == 1:
            return None
        states = torch.zeros(tokens, self.hf.hidden_size, dtype=self._dtype, device=self.device.device)
        clock = PassClock(states.device)
        for _ in range(6):  # the first one opens connections
            with clock.measure("all-reduce"):
                torch.distributed.all_reduce(states, group=self.passes.tensor_group)
        seconds = statistics.median([end - start for _, start, end, _ in clock.times()][1:])
        return {"bytes": states.nbytes, "ranks": self.config.layout.tensor, "seconds": seconds}

    def describe(self) -> dict[str, Any]:
        """What this rank is made of, for the start of a run; JSON-able, of equal keys on every rank."""
        return {
            "layout": dataclasses.asdict(self.config.layout),
            "device": str(self.device.device),
            "collectives": self.device.backend,
            "kernels": dict(self.device.kernels),
            "parameters": sum(map(math.prod, self._weights.hf_shapes(self.hf).values())),
            "parameters_here": sum(one.numel() for chunk in self._chunks for one in chunk.module.parameters()),
        }

    def log_probs(self, responses: Responses, plan: MicroBatchPlan, temperature: float) -> LogProbs | None:
        """Log-probs and entropies of all N response tokens at `temperature`: on rank 0 in the order of `responses`,
        whatever the plan; None on the other ranks."""
        with self.memory.resident("parameters"):
            return self.passes.log_probs(responses, plan, temperature)

    def reference_log_probs(self, responses: Responses, plan: MicroBatchPlan, temperature: float) -> LogProbs | None:
        """The same under the reference: the weights that the actor was built with, or that a reset made it. Its routers
        choose for themselves.

        Raises:
            ValueError: it was built without `keep_reference`.
        """
        with self.memory.resident("parameters"), self._kept_reference().swapped_in():
            return self.passes.log_probs(dataclasses.replace(responses, routing=None), plan, temperature)

    def reset_reference(self, *, optimizer: bool) -> None:
        """The reference becomes the weights that the actor holds. `optimizer`: moments begin anew too."""
        with self.memory.resident("parameters", "optimizer"):
            self._kept_reference().take()
            if optimizer:
                self.optimizer.reset()

    def load_reference(self, folder: Path) -> None:
        """The reference becomes the weights in `folder`, in Hugging Face format."""
        reference = self._kept_reference()
        with self.memory.resident("parameters"), reference.swapped_in():
            self._weights.load_hf_weights(self._chunks, self.hf, folder)
            reference.take()

    def _kept_reference(self) -> ReferenceWeights:
        if self.reference is None:
            raise ValueError("the actor keeps no reference weights; build it with keep_reference")
        return self.reference

    def update(
        self, mini_batches: Iterable[MiniBatch], objective: Objective, temperature: float
    ) -> list[UpdateMetrics]:
        """One optimizer step a mini-batch, in order. The same report on every rank.

        Raises:
            NonFiniteUpdateError: on every rank, if a loss or gradient is not finite. That step was not made; the ones
                before it were.
        """
        with self.memory.resident(*(PARTS[:2] if self.config.offload.optimizer_state else PARTS)):
            reports = [self._optimizer_step(mini_batch, objective, temperature) for mini_batch in mini_batches]
            self.optimizer.gather_weights()
            return reports

    def _optimizer_step(self, mini_batch: MiniBatch, objective: Objective, temperature: float) -> UpdateMetrics:
        self.optimizer.zero_grad()
        sums = self.passes.backward(mini_batch, objective, temperature)
        step = self.optimizer.optimizer_steps + 1
        loss, tokens = sums.pop("loss"), int(sums.pop("tokens"))
        if not math.isfinite(loss):
            culprits = [f"{name} = {value}" for name, value in sums.items() if not math.isfinite(value)]
            why = ", ".join(culprits) or "every statistic is finite, so a weight or an advantage is too large"
            told = f"optimizer step {step}: the loss is {loss}; over {tokens} tokens {why}"
            raise step_data.NonFiniteUpdateError(told)
        clock = self.passes.clock
        with nullcontext() if clock is None else clock.measure("optimizer"):
            grad_norm, lr = self.optimizer.step()
        return UpdateMetrics(optimizer_step=step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens, sums=sums)

    def export_hf(
        self,
        folder: Path,
        watch: Callable[[str, Tensor], None] | None = None,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the weights to `folder` in Hugging Face format, with the config and tokenizer of the model's folder;
        LoRA's are merged, and `folder/adapter` has them for PEFT. Rank 0 writes, and hands each tensor to `watch`
        before. `quantization`: as `hf_weights.export_hf`."""
        source, adapters = Path(self.model.path), self.optimizer.adapters
        with self.memory.resident("parameters"):
            besides = adapters.files(self._chunks, self.hf, str(source.absolute())) if adapters else None
            places = self._chunks, self.hf, folder, source
            more: dict[str, Any] = {"watch": watch, "besides": besides, "quantization": quantization}
            self._weights.export_hf(*places, dtype=self._dtype, **more)

    def stream_weights(self, sink: Any, bucket_bytes: int, *, quantize: bool = False, by_stage: bool = False) -> None:
        """Hand the weights to `sink` on rank 0, in buckets of at most `bucket_bytes`; None on the other ranks.
        `quantize`: to FP8. `by_stage`: each pipeline stage's to one on its first rank."""
        with self.memory.resident("parameters"):
            how: dict[str, Any] = {"bucket_bytes": bucket_bytes, "quantize": quantize, "by_stage": by_stage}
            self._weights.stream_weights(self._chunks, self.hf, dtype=self._dtype, sink=sink, **how)

    def save_checkpoint(self, folder: Path) -> None:
        """Write model, optimizer, step count and random state to `folder`, which then is a whole checkpoint or is not
        there.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """
        self.begin_checkpoint(folder, background=False)
        self.finish_checkpoint()

    def begin_checkpoint(self, folder: Path, *, background: bool = True) -> bool:
        """The same, written while training goes on: returns when the state is copied to host memory. `folder` is there
        after `finish_checkpoint`; one that was begun before is finished first, so that one copy exists at a time.

        Returns:
            False if a host had no room for the copies of its ranks: then everything is written already.
        """
        self.finish_checkpoint()
        with self.memory.resident("parameters", "optimizer"):
            self._pending = self._checkpoint.begin(folder, self.optimizer, self.config.layout, background=background)
        return self._pending.in_background

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Put the checkpoint that was begun in its place, once every rank has written its part.

        Args:
            wait: for the slowest rank; else return False if one is still writing.

        Returns:
            Whether no checkpoint is under way any more.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """
        if self._pending is None:
            return True
        if not wait and not self._pending.done():
            return False
        pending, self._pending = self._pending, None
        pending.finish()
        return True

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint, also of another layout.

        Raises:
            CheckpointError: on every rank, with the file's name; the actor is unchanged. After any other exception it
                is of no use.
        """
        with self.memory.resident("parameters", "optimizer"):
            self._checkpoint.load(folder, self.optimizer, self.config.layout)

    def close(self) -> None:
        """Leave the process groups; the actor is of no use afterwards."""
        self._groups.shutdown()
