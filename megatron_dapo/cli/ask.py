"""`megatron-dapo ask`: one answer of a trained model, by plain transformers."""

import os
import sys
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.data.tokenizer import TokenizerError, load_text_tools


def ask_command(model: Path, prompt: str, max_new_tokens: int, temperature: float) -> ExitCode:
    """Print the response to `prompt`; temperature 0 is greedy."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        text = load_text_tools(model)
    except TokenizerError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    tokens = text.tokenizer.encode(prompt, add_special_tokens=False)
    if not tokens:
        print("the prompt is empty; give the text of one problem", file=sys.stderr)
        return ExitCode.CONFIG
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
    return ExitCode.FINISHED
