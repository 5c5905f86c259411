"""Peak memory and time of forward and backward of token log-probs and entropies, against the plain way.

python -m tests.actor.model.measure_logprob            prints a Markdown table (docs/measurements/actor.md)

Each way runs in a process of its own. Its peak is the growth of the process's largest resident set over what was
resident before (inputs included); its time the CPU's (user and system) in the fastest of a few repeats, which other
load on the machine changes little. The ways take turns, so that a ratio of two times is of one run.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import typer
from torch import Tensor

from megatron_dapo.diagnostics.rank_pool import RankPlace, RankPool
from tests.actor.peak_memory import begin_peak, peak_resident

MIB = 2**20
DTYPES = (torch.bfloat16, torch.float32)
FROM_LOGITS = ("plain", "chunked")
FROM_HIDDEN = ("linear, plain", "linear, chunked", "fused linear")
Forward = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the tensors, and how they are measured."""

    tokens: int
    vocabulary: int = 152064
    hidden: int = 1024
    threads: int = 1
    repeats: int = 2


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies the usual way: log_softmax in float32, gather, autograd for the rest."""
    log_pi = torch.log_softmax(logits.float(), dim=-1)
    return log_pi.gather(1, targets[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)


def way_of(name: str, shape: Shape, dtype: torch.dtype) -> tuple[Forward, list[Tensor]]:
    """The forward of a way, and the tensors that get a gradient."""
    from megatron_dapo.actor.model.log_prob import VocabularyShard, linear_token_log_probs, token_log_probs

    torch.manual_seed(0)
    every, targets = torch.arange(shape.tokens), torch.randint(shape.vocabulary, (shape.tokens,))
    shard = VocabularyShard(start=0, size=shape.vocabulary)
    if name in FROM_LOGITS:
        # Drawn in place: a float32 draft of them would be the largest resident set.
        logits = torch.empty(shape.tokens, shape.vocabulary, dtype=dtype).normal_().requires_grad_()
        if name == "plain":
            return lambda: plain(logits, targets), [logits]
        return lambda: token_log_probs(logits, every, targets, shard), [logits]
    hidden = torch.empty(shape.tokens, shape.hidden, dtype=dtype).normal_().requires_grad_()
    weight = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype).normal_(std=0.03).requires_grad_()
    forwards: dict[str, Forward] = {
        "linear, plain": lambda: plain(hidden @ weight.T, targets),
        "linear, chunked": lambda: token_log_probs(hidden @ weight.T, every, targets, shard),
        "fused linear": lambda: linear_token_log_probs(hidden, weight, every, targets, shard),
    }
    return forwards[name], [hidden, weight]


def measure(place: RankPlace, name: str, shape: Shape, dtype: torch.dtype) -> tuple[float, float]:
    """Peak in MiB above the inputs, and CPU seconds of the fastest repeat."""
    torch.set_num_threads(shape.threads)
    forward, inputs = way_of(name, shape, dtype)
    before = begin_peak()  # not ru_maxrss, which a process inherits from the one that started it
    seconds = []
    for _ in range(shape.repeats):
        began = time.process_time()
        log_probs, entropy = forward()
        (log_probs.sum() - 0.1 * entropy.sum()).backward()
        seconds.append(time.process_time() - began)
        del log_probs, entropy
        for tensor in inputs:
            tensor.grad = None
    return (peak_resident() - before) / MIB, min(seconds)


def rounds_of(names: tuple[str, ...], dtype: torch.dtype, shape: Shape, rounds: int) -> dict[str, tuple[float, float]]:
    """Largest peak and least time of each way over the rounds, in a fresh process each."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            with RankPool() as pool:
                found[name] += pool.run(1, measure, name, shape, dtype, timeout_s=3600)
    return {name: (max(peak for peak, _ in all_), min(s for _, s in all_)) for name, all_ in found.items()}


def main(tokens: int = 1024, threads: int = 1, rounds: int = 2) -> None:
    """Print the table."""
    shape = Shape(tokens=tokens, threads=threads)
    print(f"{shape}; torch {torch.__version__}, {platform.machine()}\n")
    print("| from | type | way | peak above the inputs, MiB | of plain | CPU seconds | of plain |")
    print("|---|---|---|---|---|---|---|")
    for dtype in DTYPES:
        for source, names in (("logits", FROM_LOGITS), ("hidden states", FROM_HIDDEN)):
            found = rounds_of(names, dtype, shape, rounds)
            base_peak, base_seconds = found[names[0]]
            for name, (peak, seconds) in found.items():
                shares = f"{peak:.0f} | {peak / base_peak:.2f} | {seconds:.2f} | {seconds / base_seconds:.2f}"
                print(f"| {source} | {dtype} | {name} | {shares} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
