"""Peak memory and time of forward and backward of token log-probs and entropies, against the plain way.

python -m tools.benchmarks.measure_logprob            prints a Markdown table (docs/measurements/actor.md)

Each way runs in a process of its own. Its peak is the growth of the process's largest resident set over what was
resident before (inputs included); its time the CPU's (user and system) in the fastest of a few repeats, which other
load on the machine changes little. The ways take turns, so that a ratio of two times is of one run.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.actor.model.log_prob import VocabularyShard, linear_token_log_probs, token_log_probs
from tools.benchmarks.peak_memory import begin_peak, peak_resident

ROOT = Path(__file__).parents[2]
MIB = 2**20
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FROM_LOGITS = ("plain", "chunked")
FROM_HIDDEN = ("linear, plain", "linear, chunked", "fused linear")


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies the usual way: log_softmax in float32, gather, autograd for the rest."""
    log_pi = torch.log_softmax(logits.float(), dim=-1)
    return log_pi.gather(1, targets[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)


def way_of(name: str, options: argparse.Namespace) -> tuple[Callable[[], tuple[Tensor, Tensor]], list[Tensor]]:
    """The forward of a way, and the tensors that get a gradient."""
    torch.manual_seed(0)
    dtype = DTYPES[options.dtype]
    every, targets = torch.arange(options.tokens), torch.randint(options.vocabulary, (options.tokens,))
    shard = VocabularyShard(start=0, size=options.vocabulary)
    if name in FROM_LOGITS:
        # Drawn in place: a float32 draft of them would be the largest resident set.
        logits = torch.empty(options.tokens, options.vocabulary, dtype=dtype).normal_().requires_grad_()
        if name == "plain":
            return lambda: plain(logits, targets), [logits]
        return lambda: token_log_probs(logits, every, targets, shard), [logits]
    hidden = torch.empty(options.tokens, options.hidden, dtype=dtype).normal_().requires_grad_()
    weight = torch.empty(options.vocabulary, options.hidden, dtype=dtype).normal_(std=0.03).requires_grad_()
    forwards: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "linear, plain": lambda: plain(hidden @ weight.T, targets),
        "linear, chunked": lambda: token_log_probs(hidden @ weight.T, every, targets, shard),
        "fused linear": lambda: linear_token_log_probs(hidden, weight, every, targets, shard),
    }
    return forwards[name], [hidden, weight]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Peak in MiB above the inputs, and CPU seconds of the fastest repeat, of `options.way`."""
    torch.set_num_threads(options.threads)
    forward, inputs = way_of(options.way, options)
    before = begin_peak()  # not ru_maxrss, which a process inherits from the one that started it
    seconds = []
    for _ in range(options.repeats):
        began = time.process_time()
        log_probs, entropy = forward()
        (log_probs.sum() - 0.1 * entropy.sum()).backward()
        seconds.append(time.process_time() - began)
        del log_probs, entropy
        for tensor in inputs:
            tensor.grad = None
    return {"peak_mib": (peak_resident() - before) / MIB, "seconds": min(seconds)}


def rounds_of(names: tuple[str, ...], dtype: str, arguments: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Largest peak and least time of each way over the rounds."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name in names:
            call = [
                sys.executable,
                "-m",
                "tools.benchmarks.measure_logprob",
                *arguments,
                "--dtype",
                dtype,
                "--way",
                name,
            ]
            answer = subprocess.run(call, capture_output=True, text=True, check=False, cwd=ROOT)
            if answer.returncode:
                raise SystemExit(f"{name}, {dtype}: exit code {answer.returncode}\n{answer.stderr}")
            found = json.loads(answer.stdout)
            old = best.get(name, found)
            best[name] = {
                "peak_mib": max(found["peak_mib"], old["peak_mib"]),
                "seconds": min(found["seconds"], old["seconds"]),
            }
    return best


def main() -> None:
    """Print the table; with --way, one measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--way", choices=(*FROM_LOGITS, *FROM_HIDDEN))
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    shape = {name: getattr(options, name) for name in ("tokens", "vocabulary", "hidden", "threads", "repeats")}
    arguments = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    sizes = ", ".join(f"{name} {value}" for name, value in shape.items())
    print(f"{sizes}; torch {torch.__version__}, {platform.machine()}\n")
    print("| from | type | way | peak above the inputs, MiB | of plain | CPU seconds | of plain |")
    print("|---|---|---|---|---|---|---|")
    for dtype in DTYPES:
        for source, names in (("logits", FROM_LOGITS), ("hidden states", FROM_HIDDEN)):
            found = rounds_of(names, dtype, arguments, options.rounds)
            base = found[names[0]]
            for name in names:
                peak, seconds = found[name]["peak_mib"], found[name]["seconds"]
                shares = f"{peak:.0f} | {peak / base['peak_mib']:.2f} | {seconds:.2f} | {seconds / base['seconds']:.2f}"
                print(f"| {source} | {dtype} | {name} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
