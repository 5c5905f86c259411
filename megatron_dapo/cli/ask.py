"""`megatron-dapo ask`: one answer of a trained model."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.command_line import model_config
from megatron_dapo.config import ConfigError

LONGEST_ANSWER = 2048
"""Tokens, where `--max-new-tokens` does not say how many."""
_TEMPLATE = "chat, plain or a text with {prompt}; else the run's, or the model's own."


def ask(
    model: Annotated[Path, typer.Argument(metavar="MODEL|RUN", help="Folder in Hugging Face format, or a run.")],
    prompt: Annotated[str, typer.Argument(help="The text of one problem.")],
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Else the run's limit, at most 2048.")] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    template: Annotated[str | None, typer.Option(help=_TEMPLATE)] = None,
) -> None:
    """Answer one prompt, by plain transformers: a server takes longer to start."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch
    from transformers import AutoModelForCausalLM, TextStreamer

    from megatron_dapo.data.prompts import instructed, render
    from megatron_dapo.data.tokenizer import load_text_tools

    if not prompt.strip():
        raise ConfigError("the prompt is empty; give the text of one problem")
    run, model = model, model / "model" if (model / "config.yaml").is_file() else model
    if not model.exists() and run.is_dir():
        raise ConfigError(f"{run}: a run writes its model at its end; until then `eval {run}` measures its weights")
    config = model_config(model, [f"data.template={json.dumps(template)}"] if template else [])
    text = load_text_tools(model)
    raw = prompt if template else instructed(prompt, config.data.instruction, config.reward.verifier)
    _, ids = render(raw, config.data.template, text.tokenizer)
    # A model too large for one GPU is spread over all.
    places = "auto" if torch.cuda.is_available() and config.actor.device != "cpu" else None
    network = AutoModelForCausalLM.from_pretrained(str(model), dtype="auto", local_files_only=True, device_map=places)
    given = torch.tensor(ids[None], dtype=torch.int64, device=network.device)
    network.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=max_new_tokens or min(config.rollout.max_new_tokens, LONGEST_ANSWER),
        eos_token_id=list(text.stop_token_ids),
        pad_token_id=text.stop_token_ids[0],
        streamer=TextStreamer(text.tokenizer, skip_prompt=True, skip_special_tokens=True),
        **({"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}),
    )
