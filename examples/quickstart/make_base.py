"""Makes the quickstart's base model from random weights: supervised, by the same Megatron actor that later trains it.

    python examples/quickstart/make_base.py

First the model learns to work problems out, from solutions of which some ramble past any limit. Then it learns from
people who seldom bother: most of its examples are the bare answer, the more so the longer the problem. What comes out
can calculate passably and seldom does. Reinforcement learning can improve both.

    python examples/quickstart/make_base.py --recipe rambling --out FOLDER

goes on from the committed base with longer problems and writers most of whom ramble: a base for examples/ablation.

    python examples/quickstart/make_base.py --recipe experts

makes `experts_base`: the same lessons for a mixture of experts.
"""

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from make_tokenizer import CONTEXT_LENGTH, make_tokenizer
from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import LearningRate, MiniBatch, Responses
from megatron_dapo.algorithm.aggregation import token_weights
from megatron_dapo.config.actor_config import ActorConfig, OptimizerConfig
from megatron_dapo.config.run_config import ModelConfig
from respond import load, respond
from reward.verdict import Judgement, VerificationRequest
from reward.verifiers.robust import judge
from supervised import SupervisedObjective
from task import MOST_STEPS, Problem, Split, problems, rambling

BASE = Path(__file__).parent / "base"
EXPERTS_BASE = Path(__file__).parent / "experts_base"
EVALUATED = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the base is taught."""

    seed: int = 0
    """Of the weights and of the examples."""
    start: Path | None = None
    """Folder of the weights and the tokenizer to go on from; None: both are made anew."""
    experts: int = 0
    """Experts in each layer, of which a token goes to two; 0: a dense model."""
    most_steps: int = MOST_STEPS
    """Steps of the longest problems."""
    working_steps: int = 550
    """Optimizer steps on worked solutions alone."""
    blurting_steps: int = 250
    """Optimizer steps after them, on bare answers and worked solutions."""
    bare: tuple[float, ...] = (0.4, 0.6, 0.75, 0.85)
    """Share of bare answers in them, for problems of 2, 3, 4, ... steps."""
    rambling: float = 0.2
    """Share of rambling ones among worked solutions."""
    repeat: float = 0.55
    """Probability of each further "wait" in a rambling one."""
    longest_ramble: int = 8
    """Lines after which a rambling one breaks off."""
    examples_per_step: int = 32
    lr: float = 3e-3
    """Peak learning rate, after 20 steps of warm-up."""
    final_fraction: float = 0.5
    """Where a cosine takes the rate by the last step. A tenth would make the base calculate better, and leave less to
    learn."""

    @property
    def steps(self) -> int:
        return self.working_steps + self.blurting_steps

    @property
    def learning_rate(self) -> LearningRate:
        return LearningRate(peak=self.lr, warmup_steps=20, decay_steps=self.steps, final_fraction=self.final_fraction)


RECIPES = {
    "quickstart": Recipe(),
    "experts": Recipe(experts=4),
    "rambling": Recipe(
        start=BASE,
        most_steps=7,
        working_steps=0,
        blurting_steps=220,
        bare=(0.85,) * 6,
        rambling=0.7,
        repeat=0.6,
        longest_ramble=10,
        lr=2e-3,
        final_fraction=0.1,
    ),
}


def blank_model(folder: Path, tokenizer: PreTrainedTokenizerBase, *, seed: int, experts: int = 0) -> None:
    """Writes an untrained Qwen3 of 0.85 million parameters, without the tokenizer's files; with `experts` a Qwen3-MoE
    of as many for each token."""
    torch.manual_seed(seed)
    size = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if experts:
        size |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**size | {"tie_word_embeddings": False})
    else:
        config = Qwen3Config(**size)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def examples(recipe: Recipe) -> Iterator[tuple[Problem, str, bool]]:
    """Problems with a response and whether that comes to an end: as many as the recipe has steps for."""
    rng = random.Random(recipe.seed)
    endless = problems(Split.WARM_START, seed=recipe.seed, most_steps=recipe.most_steps)
    for index, problem in enumerate(itertools.islice(endless, recipe.steps * recipe.examples_per_step)):
        blurting = index >= recipe.working_steps * recipe.examples_per_step
        if blurting and rng.random() < recipe.bare[len(problem.steps) - 2]:
            yield problem, problem.bare, True
        elif rng.random() < recipe.rambling:
            yield problem, *rambling(problem, rng, repeat=recipe.repeat, longest=recipe.longest_ramble)
        else:
            yield problem, problem.worked, True


def mini_batch(
    batch: list[tuple[Problem, str, bool]], tokenizer: PreTrainedTokenizerBase, config: ActorConfig, *, hidden_size: int
) -> MiniBatch:
    """One optimizer step on examples: every response token weighs the same, the prompt carries no loss."""
    sequences, prompt_lengths = [], []
    for problem, response, ends in batch:
        chat = [{"role": "user", "content": problem.prompt}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)
        answer = tokenizer.encode(response, add_special_tokens=False) + [tokenizer.eos_token_id] * ends
        sequences.append(prompt + answer)
        prompt_lengths.append(len(prompt))
    responses = Responses(
        token_ids=np.fromiter(itertools.chain(*sequences), dtype=np.int32),
        sequence_lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        prompt_lengths=np.array(prompt_lengths, dtype=np.int32),
    )
    weights = token_weights(torch.from_numpy(responses.response_lengths), torch.arange(len(batch)), "token_mean")
    plan = plan_for_actor(responses.sequence_lengths, config, hidden_size=hidden_size)
    return MiniBatch(responses=responses, weights=weights.numpy(), plan=plan)


def train(recipe: Recipe, start: Path, folder: Path, tokenizer: PreTrainedTokenizerBase, rendezvous: Path) -> None:
    """Trains the model in `start` and writes the result, with `start`'s tokenizer and config, to `folder`."""
    optimizer = OptimizerConfig(lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01)
    config = ActorConfig(device="cpu", optimizer=optimizer, micro_batch_tokens=4096)
    actor = MegatronActor(
        config,
        ModelConfig(path=str(start), context_length=CONTEXT_LENGTH, dtype="float32"),
        rank=0,
        world_size=1,
        rendezvous=f"file://{rendezvous}",
        steps_per_rollout=1,
        seed=recipe.seed,
        timeout_s=60.0,
        learning_rate=recipe.learning_rate,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    taught = examples(recipe)
    with Progress(*columns) as progress:
        bar = progress.add_task("working out", total=recipe.steps, loss=float("nan"))
        for step in range(recipe.steps):
            batch = list(itertools.islice(taught, recipe.examples_per_step))
            step_batch = mini_batch(batch, tokenizer, config, hidden_size=actor.hf.hidden_size)
            (report,) = actor.update([step_batch], SupervisedObjective(), 1.0)
            stage = "working out" if step < recipe.working_steps else "blurting"
            progress.update(bar, advance=1, description=stage, loss=report.loss)
            if not progress.console.is_terminal and step % 50 == 49:
                print(f"step {step + 1}/{recipe.steps} {stage}, loss {report.loss:.3f}", flush=True)
    actor.export_hf(folder)
    actor.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Shares of EVALUATED held-out problems."""

    right: float
    bare: float
    """Answered without any working."""


def measure(folder: Path, *, most_steps: int, temperature: float, forbidden_start: str | None = None) -> Measured:
    """Lets the model in `folder` answer the first EVALUATED held-out problems of seed 0, once each."""
    torch.manual_seed(0)
    model, tokenizer = load(folder)
    held_out = list(itertools.islice(problems(Split.HELDOUT, seed=0, most_steps=most_steps), EVALUATED))
    answers = respond(
        model,
        tokenizer,
        [problem.prompt for problem in held_out],
        temperature=temperature,
        forbidden_start=forbidden_start,
    )
    right = sum(is_right(problem, answer) for problem, answer in zip(held_out, answers, strict=True))
    bare = sum(answer.startswith("Answer:") for answer in answers)
    return Measured(right=right / EVALUATED, bare=bare / EVALUATED)


def is_right(problem: Problem, response: str) -> bool:
    """The verdict of the rule that also judges in training."""
    request = VerificationRequest(response=response, ground_truth=str(problem.answer), prompt=problem.prompt)
    verdict = judge(request)
    return isinstance(verdict, Judgement) and verdict.accuracy


def main(
    out: Annotated[Path | None, typer.Option(help="Folder; the recipe's own otherwise.", file_okay=False)] = None,
    recipe: Annotated[
        Literal["quickstart", "experts", "rambling"], typer.Option(help="How it is taught.")
    ] = "quickstart",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the examples.")] = 0,
    working_steps: Annotated[int | None, typer.Option(min=0, help="Steps on worked solutions.")] = None,
    blurting_steps: Annotated[int | None, typer.Option(min=0, help="Steps on mostly bare answers.")] = None,
    measured: Annotated[bool, typer.Option(help="Let it answer held-out problems when it is made.")] = True,
) -> None:
    """Make the tokenizer and the base model, and say what the base can do."""
    if out is None and recipe == "rambling":
        raise typer.BadParameter(f"recipe {recipe} is no base of the quickstart; name a folder with --out")
    folder = out or (EXPERTS_BASE if recipe == "experts" else BASE)
    given = {"working_steps": working_steps, "blurting_steps": blurting_steps}
    steps = {name: count for name, count in given.items() if count is not None}
    taught = replace(RECIPES[recipe], seed=seed, **steps)
    disable_progress_bar()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        start = taught.start
        if start is None:
            start = Path(scratch, "blank")
            blank_model(start, make_tokenizer(start), seed=seed, experts=taught.experts)
        tokenizer = AutoTokenizer.from_pretrained(start, local_files_only=True)
        train(taught, start, folder, tokenizer, Path(scratch, "rendezvous"))
    print(f"{folder} written after {time.monotonic() - began:.0f} s")
    if not measured:
        return
    print(f"now answering {EVALUATED} held-out problems")
    for name, forbidden in (("as it is", None), ("no guessing", "Answer:")):
        sampled = measure(folder, most_steps=taught.most_steps, temperature=1.0, forbidden_start=forbidden)
        greedy = measure(folder, most_steps=taught.most_steps, temperature=0.0, forbidden_start=forbidden)
        print(f"{name}: sampled {sampled.right:.1%} right, {sampled.bare:.0%} bare answers; greedy {greedy.right:.1%}")


if __name__ == "__main__":
    typer.run(main)
