"""Forward and backward of packed micro-batches through Megatron's schedules, on every layout.

    loss of a mini-batch = sum over its micro-batches and data-parallel ranks of sum(weights * token loss)

Micro-batches only sum, and so do ranks (`optimizer.sum_gradients`): the gradient is that of the whole mini-batch,
however it is cut. Under context parallelism every rank has the log-probs of whole responses when the loss is taken
(`log_prob.GatherOverContext`), so an objective never knows about ranks.

T tokens of a rank's row, n response tokens predicted there, N_mb of the whole micro-batch, N of the whole message.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_dapo.actor.model import log_prob
from megatron_dapo.actor.model.model_chunks import output_weight
from megatron_dapo.actor.model.packed_attention import PackedSequences
from megatron_dapo.actor.packing import MicroBatchPlan, PackedMicroBatch, pack_micro_batch, row_length
from megatron_dapo.actor.pass_timer import PassClock
from megatron_dapo.actor.step_data import ROUTER_SUMS, LogProbs, MiniBatch, Responses
from megatron_dapo.algorithm.policy_loss import Objective
from megatron_dapo.algorithm.token_loss import LossColumns
from megatron_dapo.config.actor_config import ActorConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class _Input:
    """A packed micro-batch on the device."""

    packed: PackedMicroBatch
    tokens: Tensor
    """int64 [2, 1, T]: token ids and positions."""

    sequences: PackedSequences
    index: Tensor
    """int64 [3, n]: rows, targets and places."""

    weights: Tensor
    """float32 [N_mb]; [0] where only log-probs are wanted."""

    columns: LossColumns | None
    """None for a supervised objective, and where only log-probs are wanted."""


class ForwardBackward:
    """The model chunks of a rank, ready for micro-batches. Every rank makes each call, with equal arguments."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], config: ActorConfig, *, vocabulary: int, device: torch.device
    ) -> None:
        """`chunks`: as `optimizer.ActorOptimizer` has wrapped them, built by `config`. `vocabulary`: tokens, without
        padding."""
        self.chunks: list[Any] = list(chunks)
        self.config, self.layout = config, config.layout
        self.row_multiple, self.device = config.row_multiple, device
        self.tell(None)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.context_rank = parallel_state.get_context_parallel_rank()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.context_group = parallel_state.get_context_parallel_group()
        columns = -(-vocabulary // self.layout.tensor)  # of each rank, padding included
        start = self.tensor_rank * columns
        size = min(columns, vocabulary - start)
        self.shard = log_prob.VocabularyShard(start=start, size=size, group=self.tensor_group)
        # One rank of those that end up with the same numbers speaks for them.
        last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.speaks = last_stage and self.tensor_rank == self.context_rank == 0

    def tell(self, clock: PassClock | None) -> None:
        """Let Megatron's schedules tell `clock` when each pass begins and ends; None: nobody."""
        self.clock = get_model_config(self.chunks[0]).timers = clock

    @torch.no_grad()
    def log_probs(self, responses: Responses, plan: MicroBatchPlan, temperature: float) -> LogProbs | None:
        """Log-probs and entropies of all N response tokens, on global rank 0; None on the others. Experts are counted
        here: this pass sees each token of a rollout step once."""
        model, counts = get_model_config(self.chunks[0]), None
        if model.num_moe_experts is not None:
            shape = model.num_layers, model.num_moe_experts + ROUTER_SUMS
            counts = torch.zeros(shape, dtype=torch.float64, device=self.device)
        inputs = self._inputs(responses, plan, {}, counts)

        def collect(item: _Input, output: Tensor, non_loss_data: bool = True) -> Tensor:
            return torch.stack(self._token_log_probs(item, output, temperature, False))

        results = self._run(inputs, collect, forward_only=True, collect_non_loss_data=True)
        whole = np.zeros((2, responses.num_response_tokens), dtype=np.float32)
        if self.speaks:
            for item, result in zip(inputs, results, strict=True):
                whole[:, item.packed.columns] = result.cpu().numpy()
        if self.layout.data * self.layout.pipeline > 1:
            # Every token comes from one rank; to all the others' zeros it is added exactly.
            total = torch.from_numpy(whole).to(self.device)
            dist.reduce(total, dst=0)
            whole = total.cpu().numpy()
        if counts is not None:
            dist.reduce(counts, dst=0)
        if dist.get_rank() != 0:
            return None
        numbers = None if counts is None else counts.cpu().numpy()
        return LogProbs(log_probs=whole[0], entropy=whole[1], expert_counts=numbers)

    def backward(
        self, mini_batch: MiniBatch, objective: Objective, temperature: float, *, whole_gradients: bool = False
    ) -> dict[str, float]:
        """Add the gradient of the mini-batch's loss to the chunks' gradient buffers.

        Returns sums over the whole mini-batch, the same on every rank: its loss; tokens, those with a weight other
        than 0; and over these log_prob, entropy and the objective's statistics.

        `whole_gradients`: leave the whole sum on every data-parallel rank, also with the distributed optimizer, whose
        ranks otherwise get the sum of their own part only.
        """
        inputs = self._inputs(mini_batch.responses, mini_batch.plan, mini_batch.columns, None)
        loss = partial(self._loss, objective=objective, temperature=temperature)
        for chunk in self.chunks:
            # Reductions that overlap with backward are begun by the wrapper, which asks itself and not the schedule.
            chunk.force_all_reduce = whole_gradients
        results = self._run(inputs, loss, forward_only=False, force_all_reduce=whole_gradients)
        names = ("loss", "tokens", "log_prob", "entropy", *objective.stat_names)
        totals = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if self.speaks:
            totals += torch.stack(results).sum(dim=0)
        dist.all_reduce(totals)
        return dict(zip(names, totals.tolist(), strict=True))

    def _inputs(
        self, responses: Responses, plan: MicroBatchPlan, columns: Mapping[str, np.ndarray], counts: Tensor | None
    ) -> list[_Input]:
        """This rank's micro-batches. `columns`: what the loss reads, [N] each; none for log-probs alone. `counts`: as
        `PackedSequences`."""
        own, least = plan.micro_batches[self.data_rank], 0
        if self.layout.pipeline > 1:  # a stage knows what it receives without being told
            lengths = responses.sequence_lengths
            least = max(row_length(lengths[indices], self.layout, self.row_multiple) for indices in own)
        place = {"context_rank": self.context_rank, "row_multiple": self.row_multiple, "least": least}
        packed = (pack_micro_batch(responses, indices, self.layout, **place) for indices in own)
        return [self._input(each, columns, counts) for each in packed]

    def _input(
        self, packed: PackedMicroBatch, columns: Mapping[str, np.ndarray], expert_counts: Tensor | None
    ) -> _Input:
        given: dict[str, Tensor] = {}
        if columns:
            stacked = np.stack([column[packed.columns] for column in columns.values()])
            given = dict(zip(columns, self._to_device(stacked).unbind(), strict=True))
        weights, loss_columns = given.pop("weights", torch.empty(0)), None
        if given:
            index, lengths = self._to_device(packed.sequence_index), self._to_device(packed.response_lengths)
            loss_columns = LossColumns(sequence_index=index, sequence_lengths=lengths, **given)
        return _Input(
            packed=packed,
            tokens=self._to_device(np.stack([packed.input_ids, packed.position_ids])[:, None]),
            sequences=PackedSequences(
                padded_lengths=np.diff(packed.sequence_bounds).tolist(),
                device=self.device,
                context_parallel=self.layout.context,
                context_rank=self.context_rank,
                counted=None if expert_counts is None else self._to_device(packed.continued.astype(np.float64)),
                counts=expert_counts,
            ),
            index=self._to_device(np.stack([packed.rows, packed.targets, packed.places])),
            weights=weights,
            columns=loss_columns,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _run(self, inputs: list[_Input], loss: Callable[..., Any], **options: Any) -> list[Any]:
        """What `loss` gave for each micro-batch on the last pipeline stage; nothing on the other stages."""

        def forward(data: Iterator[_Input], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            item = next(data)
            if self.clock is not None:
                self.clock.describe(tokens=item.packed.input_ids.size)
            (ids, positions), sequences = item.tokens.unbind(), item.sequences
            if item.packed.routing is not None:
                # By micro-batch, in an object that Megatron drops after backward: all rows at once are gigabytes.
                sequences = copy.copy(sequences)
                sequences.routing = self._to_device(item.packed.routing)
            return chunk(ids, positions, None, packed_seq_params=sequences), partial(loss, item)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(inputs) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(inputs),
            seq_length=inputs[0].packed.input_ids.size * self.layout.context,
            micro_batch_size=1,
            **options,
        )

    def _token_log_probs(
        self, item: _Input, output: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """[N_mb] each, from the last stage's output [1, T, ...]: this rank's columns of the logits, or hidden
        states."""
        rows, targets, places = item.index.unbind()
        wanted, chunk = (rows, targets, self.shard), self.config.logprob_chunk_tokens or 0
        # An index [0] would write the whole gradient once more in backward. A squeeze(0) gives it strides of which
        # matmul makes a product for each token, where the weight below has no gradient (LoRA).
        output, weight = output.transpose(0, 1).squeeze(1), output_weight(self.chunks[-1])
        if weight is None:
            log_probs, entropy = log_prob.token_log_probs(output, *wanted, temperature=temperature, chunk=chunk)
        else:
            log_probs, entropy = log_prob.linear_token_log_probs(output, weight, *wanted, temperature=temperature)
        if not entropy_gradient:
            entropy = entropy.detach()
        if self.layout.context > 1:
            values = torch.stack([log_probs, entropy])
            whole = log_prob.GatherOverContext.apply(values, places, len(item.packed.columns), self.context_group)
            log_probs, entropy = whole.unbind()
        return log_probs, entropy

    def _loss(
        self, item: _Input, output: Tensor, *, objective: Objective, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, 0, sums): Megatron's triple; with `calculate_per_token_loss` it leaves the loss as it is."""
        log_probs, entropy = self._token_log_probs(item, output, temperature, objective.uses_entropy_gradient)
        token_loss = objective(log_probs, entropy, item.columns)
        counted = item.weights.ne(0)
        loss = torch.where(counted, item.weights * token_loss.loss, 0).sum()
        with torch.no_grad():
            values = [log_probs, entropy, *(token_loss.stats[name] for name in objective.stat_names)]
            sums = torch.where(counted, torch.stack(values), 0).sum(dim=1, dtype=torch.float64)
            sums = torch.cat([torch.stack([loss.double(), counted.sum().double()]), sums])
        return loss, torch.zeros((), dtype=torch.int, device=self.device), sums
