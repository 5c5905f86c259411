"""`megatron-dapo ask`: one answer of a trained model, by plain transformers."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.config import ConfigError


def ask(
    model: Annotated[Path, typer.Argument(help="Folder in Hugging Face format.")],
    prompt: Annotated[str, typer.Argument(help="The prompt, as the model was trained to get it.")],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
) -> None:
    """Answer one prompt with a model in Hugging Face format, on the CPU."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from megatron_dapo.data.tokenizer import load_text_tools

    text = load_text_tools(model)
    tokens = text.tokenizer.encode(prompt, add_special_tokens=False)
    if not tokens:
        raise ConfigError("the prompt is empty; give the text of one problem")
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, local_files_only=True)
    ids = torch.tensor([tokens])
    drawn = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    answer = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        eos_token_id=list(text.stop_token_ids),
        pad_token_id=text.stop_token_ids[0],
        **drawn,
    )
    print(text.tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))
