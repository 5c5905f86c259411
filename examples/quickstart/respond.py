"""Batches of responses by plain transformers on the CPU: what the base model can do before any server is there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

LONGEST_RESPONSE = 64


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in float32 and tokenizer of a folder in Hugging Face format; nothing is looked for elsewhere."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")


def respond(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    temperature: float,
    forbidden_start: str | None = None,
) -> list[str]:
    """One response a prompt, of at most LONGEST_RESPONSE tokens; temperature 0 takes the likeliest token each time.

    With `forbidden_start` no response may begin with that text's first token. Draws from torch's global generator.
    """
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if forbidden_start is not None:
        options["begin_suppress_tokens"] = tokenizer.encode(forbidden_start, add_special_tokens=False)[:1]
    ids = model.generate(**batch, max_new_tokens=LONGEST_RESPONSE, **options)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
