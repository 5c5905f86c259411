"""Tokens per second of the actor's update against a plain Hugging Face + PyTorch loop.

python -m tests.actor.measure_actor_speed     prints a Markdown table (docs/measurements/actor.md)

Both train the same model on the same mini-batch with the same loss (eq. 8), gradient clipping and AdamW, in float32, in
one process with the same number of threads. They take turns, and each turn gives one ratio: the table holds the median
of the ratios and their quartiles. With one thread the time is the process's CPU time, which other load on the machine
changes little. The plain loop is at its best: fused AdamW, PyTorch's attention kernels, no entropy and no statistics,
and micro-batches of responses of similar length, padded to the longest.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor

from megatron_dapo.actor.step_data import MiniBatch
from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig
from tests.actor.actor_update import QUICKSTART, Lengths, actor_config, spread, start
from tools.rank_pool import RankPlace, RankPool

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its mini-batch."""

    name: str
    folder: Path
    lengths: Lengths
    micro_batch_tokens: int


def cases(folder: Path) -> list[Case]:
    """The quickstart's base and a random model of about 20 million parameters, with equal and with ragged lengths."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16384,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "20M")
    small: dict[str, Any] = {"folder": QUICKSTART, "micro_batch_tokens": 4096}
    large: dict[str, Any] = {"folder": folder / "20M", "micro_batch_tokens": 1024}
    return [
        Case(name="quickstart base, equal lengths", lengths=Lengths(responses=64, shortest=96, longest=96), **small),
        Case(name="quickstart base, ragged", lengths=Lengths(responses=64, shortest=24, longest=128), **small),
        Case(name="20M, equal lengths", lengths=Lengths(responses=12, shortest=256, longest=256), **large),
        Case(name="20M, ragged", lengths=Lengths(responses=12, shortest=64, longest=512), **large),
    ]


class PlainLoop:
    """What one writes first: transformers' model, padded micro-batches, torch's AdamW. On CUDA too (`tests/gpu`)."""

    def __init__(
        self,
        folder: Path,
        batch: MiniBatch,
        config: ActorConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
        self.model.train()
        optimizer = config.optimizer
        self.adamw = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.clip_norm = optimizer.clip_norm
        self.micro_batches = [
            [None if tensor is None else tensor.to(device) for tensor in _padded(batch, indices)]
            for indices in _similar(batch.responses.sequence_lengths, config.micro_batch_tokens)
        ]

    def update(self) -> tuple[float, float]:
        """One optimizer step: loss and gradient norm."""
        self.adamw.zero_grad()
        loss = sum(self._backward(*micro_batch) for micro_batch in self.micro_batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.adamw.step()
        return float(loss), float(norm)

    def _backward(self, ids: Any, mask: Any, rows: Any, weights: Any, advantages: Any, old: Any) -> float:
        """The tensors of `_padded`."""
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][rows]
        log_probs = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[:, 1:][rows][:, None])[:, 0]
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss = -(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum()
        loss.backward()
        return float(loss.detach())


def _similar(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Responses by length, cut where a padded micro-batch would exceed the budget."""
    groups: list[list[int]] = [[]]
    for index in np.argsort(-lengths, kind="stable").tolist():
        if groups[-1] and lengths[groups[-1][0]] * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(index)
    return [np.array(group) for group in groups]


def _padded(batch: MiniBatch, indices: np.ndarray) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Token ids [R, L], attention mask (None: nothing is padded), which of [R, L - 1] positions predict a response
    token, and weights, advantages and old log-probs of those."""
    responses = batch.responses.select(indices)
    lengths, prompts = responses.sequence_lengths, responses.prompt_lengths
    position = np.arange(int(lengths.max()))
    real = position < lengths[:, None]
    ids = np.zeros(real.shape, dtype=np.int64)
    ids[real] = responses.token_ids
    rows = (position[1:] >= prompts[:, None]) & (position[1:] < lengths[:, None])
    places = batch.responses.response_token_indices(indices)
    columns = (batch.weights, batch.advantages, batch.old_log_probs)
    weights, advantages, old = (torch.from_numpy(np.asarray(column)[places]) for column in columns)
    mask = None if real.all() else torch.from_numpy(real.astype(np.int64))
    return torch.from_numpy(ids), mask, torch.from_numpy(rows), weights, advantages, old


def compare(place: RankPlace, case: Case, turns: int, threads: int) -> dict[str, Any]:
    """Seconds of an update of both, turn by turn, and how far their first loss and gradient norm differ."""
    config = actor_config(micro_batch_tokens=case.micro_batch_tokens, threads=threads)
    actor, batch = start(place, case.folder, case.lengths, config)
    plain = PlainLoop(case.folder, batch, config)
    clock = time.process_time if threads == 1 else time.perf_counter
    objective = PolicyObjective(loss=Clipped(low=CLIP_LOW, high=CLIP_HIGH))
    (report,), (loss, norm) = actor.update([batch], objective, 1.0), plain.update()  # the first is also the warm-up
    seconds: list[tuple[float, float]] = []
    for _ in range(turns):
        began = clock()
        actor.update([batch], objective, 1.0)
        between = clock()
        plain.update()
        seconds.append((between - began, clock() - between))
    return {
        "parameters": sum(parameter.numel() for parameter in plain.model.parameters()),
        "tokens": int(batch.responses.sequence_lengths.sum()),
        "seconds": seconds,
        "loss": abs(report.loss - loss) / abs(loss),
        "norm": abs(report.grad_norm - norm) / norm,
    }


def table(*, turns: int, threads: int, only: str) -> Iterator[str]:
    """The Markdown table, line by line as it is measured.

    Args:
        turns: measured updates of each of the two loops.
        threads: of the process.
        only: cases whose name holds this.
    """
    with tempfile.TemporaryDirectory() as folder, RankPool("cpu") as pool:
        yield "| model and batch | parameters | tokens | actor, tokens/s | plain loop, tokens/s | ratio | loss, norm |"
        yield "|---|---|---|---|---|---|---|"
        for case in cases(Path(folder)):
            if only not in case.name:
                continue
            [found] = pool.run(1, compare, case, turns, threads, timeout_s=3600)
            ours, plain = zip(*found["seconds"], strict=True)
            speeds = " | ".join(f"{found['tokens'] / median(seconds):.0f}" for seconds in (ours, plain))
            ratio = spread([b / a for a, b in found["seconds"]])
            yield (
                f"| {case.name} | {found['parameters'] / 1e6:.1f}M | {found['tokens']} | {speeds} | {ratio} "
                f"| {found['loss']:.0e}, {found['norm']:.0e} |"
            )


def main(turns: int = 9, threads: int = 1, only: str = "") -> None:
    """Print the table. TURNS: measured updates of each loop; ONLY: cases whose name holds this."""
    for line in table(turns=turns, threads=threads, only=only):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
