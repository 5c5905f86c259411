"""Makes base/ from the quickstart's base: supervised, so that it knows the forms and is still often wrong.

    python examples/verifiers/make_verifier_base.py

Minutes on two cores. The tokenizer stays as it is; no problem of the training or held-out files is shown.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from forms import Kind, Split, forms
from make_verifier_data import FOLDER
from respond import load, respond
from reward.registry import load as load_verifier
from reward.verdict import VerificationRequest
from service import verdict

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart" / "base"
VERIFIERS = {
    Kind.PROGRAMS: "code",
    Kind.RECORDS: "json",
    Kind.OPTIONS: "choice",
    Kind.WORK: "examples.verifiers.shown_work:judge",
}
STEPS, BATCH, LR, WARMUP = 300, 40, 6e-4, 20
BARE = 0.5
"""Share of answers without work where the form allows it: what is left for reinforcement learning to choose."""


def examples(seed: int) -> Iterator[tuple[str, str]]:
    """(prompt, response), kind after kind."""
    rng = random.Random(seed)
    streams = {kind: forms(kind, Split.WARM_START, seed=seed + place) for place, kind in enumerate(Kind)}
    for kind in itertools.cycle(Kind):
        made = next(streams[kind])
        last = made.response.rpartition("\n")[2]
        bare = kind not in (Kind.PROGRAMS, Kind.RECORDS) and rng.random() < BARE
        yield made.prompt, last if bare else made.response


def batch(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Padded ids; the label -100 keeps the loss away from prompts and padding."""
    rows = []
    for prompt, response in pairs:
        chat = [{"role": "user", "content": prompt}]
        before = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)
        after = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((before + after, [-100] * len(before) + after))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
    }


def train(out: Path) -> None:
    """Writes the model and its tokenizer to `out`."""
    torch.manual_seed(0)
    model, tokenizer = load(QUICKSTART)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    endless = examples(seed=0)
    for step in range(STEPS):
        loss = model(**batch(list(itertools.islice(endless, BATCH)), tokenizer)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}/{STEPS}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(QUICKSTART / file, out / file)
    (out / "model.safetensors").chmod(0o644)


def measure(folder: Path) -> dict[Kind, float]:
    """Share of the held-out prompts that a sampled response gets right, by the verifier of the kind."""
    torch.manual_seed(0)
    model, tokenizer = load(folder)
    shares = {}
    for kind in Kind:
        rows = [json.loads(line) for line in (FOLDER / f"{kind}_heldout.jsonl").read_text().splitlines()]
        answers = respond(model, tokenizer, [row["prompt"] for row in rows], temperature=1.0)
        shares[kind] = sum(map(is_right, itertools.repeat(kind), rows, answers)) / len(rows)
    return shares


def is_right(kind: Kind, row: dict, response: str) -> bool:
    """The verdict that training would give."""
    if kind is Kind.SERVICE:
        return bool(verdict(row["prompt"], response, row["answer"])["accuracy"])
    truth = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"])
    request = VerificationRequest(response=response, ground_truth=truth, prompt=row["prompt"])
    return load_verifier(VERIFIERS[kind])(request).accuracy


if __name__ == "__main__":
    train(HERE / "base")
    for kind, share in measure(HERE / "base").items():
        print(f"{kind}: {share:.0%} right")
