"""Supervised training and playing of the examples' tiny models with plain transformers, on the CPU.

A conversation is a list of (role, text), as the chat template renders it; the loss is on what the assistant says.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

Conversation = list[tuple[str, str]]


def blank_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Qwen3ForCausalLM:
    """The quickstart's architecture, about 0.8 million parameters, untrained."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def token_ids(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, ends: tuple[str, ...] = ()
) -> tuple[list[int], list[bool]]:
    """The conversation's tokens, and which of them the assistant says. A turn ends with one of `ends` or </s>."""
    ids: list[int] = []
    said: list[bool] = []
    for role, text in conversation:
        ended = role == "assistant" and text.endswith(ends or "\0")
        whole = text + ("" if ended else tokenizer.eos_token if role == "assistant" else "\n")
        new = tokenizer.encode(whole, add_special_tokens=False)
        ids += new
        said += [role == "assistant"] * len(new)
    return ids, said


def teach(
    folder: Path,
    conversations: Iterator[Conversation],
    *,
    steps: int,
    batch: int = 48,
    lr: float = 2e-3,
    seed: int = 0,
    ends: tuple[str, ...] = (),
) -> None:
    """Trains a new model on `conversations` and writes it beside the tokenizer in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = blank_model(tokenizer, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1.0 - 0.9 * step / steps)
    )
    for step in range(steps):
        rows = [token_ids(each, tokenizer, ends) for each in itertools.islice(conversations, batch)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row, _ in rows])
        said = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in rows])
        loss = model(input_ids=ids, labels=ids.masked_fill(~said, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}/{steps}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def converse(
    folder: Path,
    prompts: Sequence[str],
    answer: Callable[[int, list[tuple[str, str]]], str | None],
    *,
    most_turns: int,
    temperature: float = 1.0,
    longest: int = 32,
    ends: tuple[str, ...] = (),
) -> list[list[tuple[str, str]]]:
    """Plays one episode a prompt, all at once; returns each one's turns as (response, observation).

    `answer` gets the prompt's place and its turns so far, the newest with an empty observation, and returns what comes
    back, or None when the episode is over. Sampling draws from torch's global generator.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    end_ids = [tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(end) for end in ends)]
    contexts = [token_ids([("user", prompt)], tokenizer)[0] for prompt in prompts]
    turns: list[list[tuple[str, str]]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    for _ in range(most_turns):
        if not live:
            break
        batch = tokenizer.pad({"input_ids": [contexts[place] for place in live]}, return_tensors="pt")
        options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=longest,
            eos_token_id=end_ids,
            **options,
        )
        still = []
        for place, drawn in zip(live, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            ended = next((i for i, token in enumerate(drawn) if token in end_ids), len(drawn) - 1)
            drawn = drawn[: ended + 1]
            response = tokenizer.decode([token for token in drawn if token != tokenizer.eos_token_id])
            turns[place].append((response, ""))
            observation = answer(place, turns[place])
            if observation is None:
                continue
            turns[place][-1] = (response, observation)
            contexts[place] += drawn + tokenizer.encode(observation + "\n", add_special_tokens=False)
            still.append(place)
        live = still
    return turns
