"""`megatron-dapo ask`: one answer of a trained model."""

import asyncio
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from megatron_dapo.cli.command_line import model_config
from megatron_dapo.config import Config, ConfigError
from rollout.generation import GenerationRequest, SamplingParams

LONGEST_ANSWER = 2048
"""Tokens, where `--max-new-tokens` does not say how many."""
_TEMPLATE = "chat, plain or a text with {prompt}; else the run's, or the model's own."


def ask(
    target: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="Folder, hf://OWNER/NAME, or a run.")],
    prompt: Annotated[str, typer.Argument(help="The text of one problem.")],
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Else the run's limit, at most 2048.")] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    template: Annotated[str | None, typer.Option(help=_TEMPLATE)] = None,
) -> None:
    """Answer one prompt: by a server on a GPU, by plain transformers on a CPU, where a server takes longer to start."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    import torch

    from megatron_dapo.data.hub import local_path
    from megatron_dapo.data.prompts import instructed, render
    from megatron_dapo.data.tokenizer import load_text_tools

    if not prompt.strip() or prompt != prompt.encode(errors="replace").decode():
        raise ConfigError("the prompt is empty or not in UTF-8; give the text of one problem")
    run = Path(local_path(target, "MODEL"))
    model = run / "model" if (run / "config.yaml").is_file() else run
    if not model.exists() and run.is_dir():
        raise ConfigError(f"{run}: a run writes its model at its end; until then `eval {run}` measures its weights")
    config = model_config(model, [f"data.template={json.dumps(template)}"] if template else [])
    text = load_text_tools(model)
    raw = prompt if template else instructed(prompt, config.data.instruction, config.reward.verifier)
    _, ids = render(raw, config.data.template, text.tokenizer)
    if (room := config.model.context_length - len(ids)) < 1:
        raise ConfigError(f"the prompt has {len(ids)} tokens: model.context_length = {config.model.context_length}")
    limit = min(room, max_new_tokens or min(config.rollout.max_new_tokens, LONGEST_ANSWER))
    sampling = SamplingParams(max_new_tokens=limit, temperature=temperature, stop_token_ids=text.stop_token_ids)
    request = GenerationRequest(request_id="ask.", group_id="ask", prompt_ids=ids, sampling=sampling, seed=0)
    if torch.cuda.is_available() and config.actor.device != "cpu":
        print(asyncio.run(by_server(config, text, request)))
    else:
        _by_transformers(model, text.tokenizer, request)


async def by_server(config: Config, text: Any, request: GenerationRequest) -> str:
    """The answer of a server that is started for it. `text`: the model's TextTools."""
    from megatron_dapo.cli.train import prepare_environment
    from megatron_dapo.cluster.waits import Waits
    from megatron_dapo.diagnostics.local_jobs import local_fleet, with_own_servers

    prepare_environment()
    config = with_own_servers(config, Path(config.model.path))
    config, report = replace(config, rollout=replace(config.rollout, servers=1)), partial(print, file=sys.stderr)
    with TemporaryDirectory(prefix="ask-") as folder:
        async with local_fleet(config, Path(folder), Waits(), vocab_size=text.vocab_size, report=report) as fleet:
            answer = await fleet.generate(request)
    return str(text.tokenizer.decode(answer.token_ids.tolist(), skip_special_tokens=True))


def _by_transformers(model: Path, tokenizer: Any, request: GenerationRequest) -> None:
    """Prints the answer as it is written."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

    from megatron_dapo.actor.weights.hf_files import WeightsError

    try:
        network = AutoModelForCausalLM.from_pretrained(str(model), dtype="auto", local_files_only=True)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{model}: {error}; fetch its weights again") from None
    ids, sampling = torch.tensor(request.prompt_ids[None], dtype=torch.int64), request.sampling
    drawn: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": bool(sampling.temperature)}
    if sampling.temperature:
        drawn |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    ends = {"eos_token_id": list(sampling.stop_token_ids), "pad_token_id": sampling.stop_token_ids[0]}
    # As a server draws: it follows neither the model's generation_config.json nor the library's top_k of 50.
    network.generation_config = GenerationConfig(**drawn, **ends)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    network.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer)
