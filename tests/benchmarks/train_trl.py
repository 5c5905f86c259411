"""TRL's GRPOTrainer with loss_type="dapo" on the data and hyperparameters of one of our configs.

python -m tests.benchmarks.train_trl examples/quickstart/dapo.yaml --out trl.json --threads 2 run.rollout_steps=16

Needs tests/benchmarks/trl_requirements.txt. Two things of the config have no counterpart in TRL: dynamic sampling
(groups that are all right or all wrong stay in the batch, with advantage 0) and the choice of the divisor of the
standard deviation (TRL's is the sample's, as ours by default). Held-out accuracy is measured every `evaluation.every`
steps with the project's verifier, out of the training clock, which runs from the first step on.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from megatron_dapo.config import Config, load_config
from reward.verdict import Judgement, VerificationRequest
from reward.verifiers.robust import judge

EVALUATION_BATCH = 250


def main() -> None:
    """Train, and write {"curve": [[rollout step, seconds, accuracy], ...], "phases": {...}} to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2, help="torch threads while training (default: 2)")
    options = parser.parse_intermixed_args()
    config = load_config(options.config, options.overrides)
    assert config.data.path is not None, "data.path: give a file of prompts"
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, local_files_only=True)
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(config, tokenizer)
        trainer = TimedTrainer(
            model=model,
            processing_class=tokenizer,
            args=settings(config, folder),
            reward_funcs=[
                correctness,
                get_soft_overlong_punishment(config.rollout.max_new_tokens, config.algorithm.overlong.buffer),
            ],
            train_dataset=Dataset.from_list(problems(config.data.path)),
            callbacks=[watch],
        )
        trainer.watch = watch
        trainer.train()
    phases = watch.phases | {"training": watch.seconds}
    phases["update"] = watch.seconds - watch.phases["rollout"]
    options.out.write_text(json.dumps({"curve": watch.curve, "phases": phases}))


def settings(config: Config, folder: str) -> GRPOConfig:
    """The config in TRL's words, and what makes it fast: no recomputation, no logs, no checkpoints."""
    algorithm, optimizer = config.algorithm, config.actor.optimizer
    updates = algorithm.mini_batches_per_step
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=config.run.seed,
        loss_type="dapo",
        beta=0.0,
        epsilon=algorithm.clip.low,
        epsilon_high=algorithm.clip.high,
        scale_rewards="group",
        num_generations=algorithm.group_size,
        per_device_train_batch_size=algorithm.mini_batch_responses,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_iterations=1,
        max_steps=config.run.rollout_steps * updates,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=round(optimizer.warmup_rollout_steps * updates),
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm,
    )


def problems(path: str) -> list[dict[str, Any]]:
    """Rows of a prompts file as TRL wants them."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]


def correctness(
    prompts: list[Any], completions: list[list[dict[str, str]]], answer: list[str], **_: object
) -> list[float]:
    """Eq. 7: +1 for a right answer, else -1."""
    asked = zip(prompts, completions, answer, strict=True)
    return [1.0 if is_right(prompt[0]["content"], said[0]["content"], truth) else -1.0 for prompt, said, truth in asked]


def is_right(prompt: str, response: str, truth: str) -> bool:
    """The verdict that the project's own run takes."""
    verdict = judge(VerificationRequest(response=response, ground_truth=truth, prompt=prompt))
    return isinstance(verdict, Judgement) and verdict.accuracy


class Watch(TrainerCallback):
    """The training clock, which stands still during evaluations, and the curve of held-out accuracy."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.updates = config.algorithm.mini_batches_per_step
        self.problems = problems(str(config.evaluation.path))[: config.evaluation.limit or None]
        self.seconds, self.since = 0.0, 0.0
        self.curve: list[tuple[int, float, float]] = []
        self.phases = dict.fromkeys(("rollout", "generate", "reward"), 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.phases[name] += time.monotonic() - began

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.since = time.monotonic()

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: PreTrainedModel, **__: Any) -> None:
        self.seconds += time.monotonic() - self.since
        step, rest = divmod(state.global_step, self.updates)
        if rest == 0 and step % self.config.evaluation.every == 0:
            self.curve.append((step, self.seconds, self.accuracy(model)))
            print(f"step {step}: {self.seconds:.1f} s, {self.curve[-1][2]:.1%}", flush=True)
        self.since = time.monotonic()

    @torch.no_grad()
    def accuracy(self, model: PreTrainedModel) -> float:
        """Share of the held-out problems that one sampled response each answers."""
        was_training, state = model.training, torch.get_rng_state()
        model.eval()
        right = 0
        for begin in range(0, len(self.problems), EVALUATION_BATCH):
            rows = self.problems[begin : begin + EVALUATION_BATCH]
            chats = [row["prompt"] for row in rows]
            texts = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
            batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            ids = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.config.rollout.max_new_tokens,
                do_sample=True,
                temperature=self.config.evaluation.temperature,
                top_p=self.config.evaluation.top_p,
                top_k=0,
            )
            said = self.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            for row, text in zip(rows, said, strict=True):
                right += is_right(row["prompt"][0]["content"], text, row["answer"])
        torch.set_rng_state(state)
        model.train(was_training)
        return right / len(self.problems)


class TimedTrainer(GRPOTrainer):
    """Says what its seconds went to."""

    watch: Watch

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.watch.phase("rollout"):
            return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        with self.watch.phase("generate"):
            return super()._generate_single_turn(*arguments, **options)

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Any:
        with self.watch.phase("reward"):
            return super()._calculate_rewards(*arguments, **options)


if __name__ == "__main__":
    main()
