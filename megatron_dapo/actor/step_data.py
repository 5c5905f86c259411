"""What goes into the actor and comes out: responses, mini-batches and their plan, learning rate, log-probs, metrics of
an update.

Everything is a flat numpy array, response after response without padding, so that a message crosses Ray's object
store without a copy. Such arrays are read-only, and nothing here writes to them. No torch, no Megatron in this file.

R responses of a message, N response tokens of all of them together: tokens that the policy drew. Tokens that were
*given* to it within a response (the phrase that ends its thinking) are context, as the prompt is: no column has them.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from megatron_dapo.config.actor_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """R prompts with their responses.

    Two of them, prompt [5, 6] with response [7, 8, 2] and prompt [9] with response [2]:
    token_ids [5, 6, 7, 8, 2, 9, 2], sequence_lengths [5, 2], prompt_lengths [2, 1]; N = 4 response tokens: 7, 8, 2, 2.
    """

    token_ids: np.ndarray
    """int32 [sum of sequence_lengths]: each prompt directly followed by its response, the end token included."""

    sequence_lengths: np.ndarray
    """int32 [R]: tokens of prompt and response."""

    prompt_lengths: np.ndarray
    """int32 [R]: at least 1, for the first response token is predicted from the prompt's last one."""

    given_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [K]: where in `token_ids` each run of given tokens starts, ascending; none in a prompt. With 8 given in the
    example above, given_starts [3] and given_lengths [1]: N = 3 response tokens, 7, 2, 2."""

    given_lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [K]: tokens of each run."""

    routing: np.ndarray | None = None
    """uint8 [sum of sequence_lengths, layers, k]: the experts of each token, each once; of a response's last one, whose
    output predicts nothing, 0 .. k-1. None: the routers choose."""

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[np.ndarray, np.ndarray]],
        given: Sequence[Sequence[tuple[int, int]]] = (),
        routing: Sequence[np.ndarray] = (),
    ) -> "Responses":
        """Of token ids of prompts and of the response to each.

        Args:
            given: for each response (first token, tokens) of each run in it that was given; none: all were drawn.
            routing: for each response uint8 [its tokens and the prompt's, without the last one, layers, k].

        Raises:
            ValueError: a response has more or fewer rows of routing; names it.
        """
        lengths = np.array([len(prompt) + len(response) for prompt, response in pairs], np.int32)
        prompts = np.array([len(prompt) for prompt, _ in pairs], np.int32)
        starts = exclusive_sum(lengths) + prompts
        runs = [(int(starts[at]) + first, tokens) for at, each in enumerate(given) for first, tokens in each]
        given_starts, given_lengths = np.array(runs, np.int64).reshape(-1, 2).T
        return cls(
            token_ids=np.concatenate([ids for pair in pairs for ids in pair]).astype(np.int32),
            sequence_lengths=lengths,
            prompt_lengths=prompts,
            given_starts=given_starts,
            given_lengths=given_lengths,
            routing=_joined_routing(routing, lengths) if routing else None,
        )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def response_lengths(self) -> np.ndarray:
        """int32 [R]: response tokens of each."""
        given = np.bincount(self._given_owners, self.given_lengths, minlength=len(self)).astype(np.int32)
        return self.sequence_lengths - self.prompt_lengths - given

    @property
    def _given_owners(self) -> np.ndarray:
        """int64 [K]: which response each run of given tokens is in; R: none."""
        return np.searchsorted(np.cumsum(self.sequence_lengths, dtype=np.int64), self.given_starts, side="right")

    @property
    def num_response_tokens(self) -> int:
        """N."""
        return int(self.response_lengths.sum(dtype=np.int64))

    def select(self, indices: np.ndarray) -> "Responses":
        """The responses at `indices` [any number], in that order."""
        lengths = self.sequence_lengths[indices]
        starts, owners = exclusive_sum(self.sequence_lengths)[indices], self._given_owners
        first = np.searchsorted(owners, indices)
        runs = np.searchsorted(owners, indices, side="right") - first
        kept = ranges(first, runs)
        return Responses(
            token_ids=self.token_ids[ranges(starts, lengths)],
            sequence_lengths=lengths,
            prompt_lengths=self.prompt_lengths[indices],
            given_starts=self.given_starts[kept] + np.repeat(exclusive_sum(lengths) - starts, runs),
            given_lengths=self.given_lengths[kept],
            routing=None if self.routing is None else self.routing[ranges(starts, lengths)],
        )

    def response_token_indices(self, indices: np.ndarray) -> np.ndarray:
        """int64: where the response tokens of the responses at `indices` stand in an [N] column of this message."""
        return ranges(exclusive_sum(self.response_lengths)[indices], self.response_lengths[indices])


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPlan:
    """Responses by data-parallel rank and micro-batch.

    Two ranks, five responses: micro_batches = (([0, 3], [1]), ([2], [4])). Every rank has equally many micro-batches
    (the pipeline and the gradient all-reduce need that); a micro-batch may be empty.
    """

    micro_batches: tuple[tuple[np.ndarray, ...], ...]
    """[data-parallel rank][micro-batch]: int64 indices of responses, ascending."""

    num_responses: int
    """R: each of 0..R-1 stands in exactly one micro-batch."""

    def micro_batch_index(self) -> np.ndarray:
        """int64 [R]: a number of the micro-batch that holds the response; 0, 1, ... without gaps, over all ranks."""
        index = np.empty(self.num_responses, dtype=np.int64)
        filled = (indices for rank in self.micro_batches for indices in rank if len(indices))
        for number, indices in enumerate(filled):
            index[indices] = number
        return index


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """One optimizer step: its loss is sum(weights * token loss) over all N response tokens."""

    responses: Responses
    weights: np.ndarray
    """float32 [N]: `algorithm.aggregation.token_weights` of the whole mini-batch; 0 where a token carries no loss."""

    plan: MicroBatchPlan
    """Which responses go through the model together, and on which data-parallel rank."""

    advantages: np.ndarray | None = None
    """float32 [N], eq. 9; None only for a supervised objective, as `old_log_probs`."""

    old_log_probs: np.ndarray | None = None
    """float32 [N]: log pi_old, from `MegatronActor.log_probs`."""

    reference_log_probs: np.ndarray | None = None
    """float32 [N]: log ref, with a KL term."""

    correction: np.ndarray | None = None
    """float32 [N]: `algorithm.importance.correction_weights`; None: 1."""

    rollout_log_probs: np.ndarray | None = None
    """float32 [N]: log mu by the engine, for a loss that takes its ratio to it."""

    kl_scale: np.ndarray | None = None
    """float32 [N]: `algorithm.aggregation.kl_scale`; None: 1."""

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The [N] arrays that are there, by name."""
        names = ("weights", "advantages", "old_log_probs", "reference_log_probs", "correction", "rollout_log_probs")
        return {name: getattr(self, name) for name in (*names, "kl_scale") if getattr(self, name) is not None}


ROUTER_SUMS = 3
"""Columns of `LogProbs.expert_counts` after the experts' own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbs:
    """The model's view of N response tokens, in the order of the responses asked for."""

    log_probs: np.ndarray
    """float32 [N]: log pi(token), at the temperature asked for, in nats."""

    entropy: np.ndarray
    """float32 [N]: entropy of the distribution that the token was drawn from, in nats."""

    expert_counts: np.ndarray | None = None
    """float64 [layers, experts + 3], of a mixture of experts. Sums over all tokens but each response's last, whose
    output predicts nothing: how many went to each expert; how many there are; the entropies of the router's softmax
    over all experts, in nats; how many the router itself would have sent to other experts (routing replay)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateMetrics:
    """One optimizer step, the same on every rank. Sums and their count, never means: add up first, divide last."""

    optimizer_step: int
    """How many steps the optimizer has made, this one included."""

    loss: float
    """sum(weights * token loss)."""

    grad_norm: float
    """Global L2 norm before clipping."""

    lr: float
    """Learning rate of this step."""

    tokens: int
    """Response tokens that carry loss (weight not 0)."""

    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums over those tokens: `log_prob`, `entropy` and each of the objective's `stat_names`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Linear warm-up, then constant, or a cosine down to `final_fraction` of the peak.

    Optimizer step k = 1, 2, ... of a warm-up of W steps has the rate peak * k / W: no step is spent at rate 0.
    """

    peak: float
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Optimizer step, warm-up included, at which the cosine reaches its end; None: constant after the warm-up."""

    final_fraction: float = 0.1

    @classmethod
    def of(cls, config: OptimizerConfig, *, steps_per_rollout: int) -> "LearningRate":
        """The paper's: warm-up over rollout steps, each of `steps_per_rollout` optimizer steps, then constant."""
        return cls(peak=config.lr, warmup_steps=round(config.warmup_rollout_steps * steps_per_rollout))

    @property
    def final(self) -> float:
        """Rate after the decay; the peak without one."""
        return self.peak if self.decay_steps is None else self.peak * self.final_fraction


class NonFiniteUpdateError(ArithmeticError):
    """A loss or a gradient is not a finite number. Raised on every rank; the weights are as before the step."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, not whole, damaged, or of another kind, or cannot be written; the message names the
    file. On every rank."""

    exit_code = 2


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is missing or does not have its checksum: an earlier checkpoint may be whole."""


def ranges(starts: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]) -> Int[np.ndarray, " total"]:
    """int64: start, start + 1, ... for each, one after the other. ([5, 0], [2, 3]): 5 6 0 1 2."""
    lengths = np.asarray(lengths, dtype=np.int64)
    shift = np.asarray(starts, dtype=np.int64) - exclusive_sum(lengths)
    return np.repeat(shift, lengths) + np.arange(int(lengths.sum()))


def exclusive_sum(lengths: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """int64: where each piece starts when pieces of these lengths lie one after the other."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def unrouted(tokens: int, layers: int, top_k: int) -> np.ndarray:
    """uint8 [tokens, layers, top_k]: experts 0 .. top_k - 1 for tokens that nobody has routed."""
    return np.tile(np.arange(top_k, dtype=np.uint8), (tokens, layers, 1))


def _joined_routing(routing: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """uint8 [sum of lengths, layers, k]."""
    for at, (rows, length) in enumerate(zip(routing, lengths.tolist(), strict=True)):
        if len(rows) != length - 1:
            told = f"response {at} has {len(rows)} rows of routing for {length} tokens with its prompt's"
            raise ValueError(f"Responses: {told}; each but the last needs one")
    last = unrouted(1, *routing[0].shape[1:])
    return np.concatenate([part for rows in routing for part in (rows, last)])
