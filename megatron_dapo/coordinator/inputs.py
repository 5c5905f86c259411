"""What a run reads before it starts anything: tokenizer, model shape, prompts, held-out problems."""

from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.actor.hf_config import HFModelConfig, check_layout
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data.prompts import PromptSet, check_file, read_prompts
from megatron_dapo.data.tokenizer import TextTools, load_text_tools


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What was read and checked before anything was started."""

    text: TextTools
    model: HFModelConfig
    prompts: PromptSet
    heldout: PromptSet


def read_inputs(config: Config) -> Inputs:
    """Tokenizer, prompts and held-out problems: everything a user may have got wrong, before a process is started."""
    for path in (config.data.path, config.evaluation.path):
        check_file(path)  # before anything that takes seconds to import
    text = load_text_tools(config.model.path)
    model = HFModelConfig.load(Path(config.model.path))
    check_layout(model, config.actor.layout)
    if config.model.context_length > model.max_position_embeddings:
        raise ConfigError(
            f"model.context_length = {config.model.context_length}: the model at {config.model.path} knows only "
            f"max_position_embeddings = {model.max_position_embeddings} positions; lower it"
        )
    prompts = read_prompts(config.data.path, config.data, text.tokenizer, vocab_size=text.vocab_size)
    heldout = read_prompts(config.evaluation.path, config.data, text.tokenizer, vocab_size=text.vocab_size)
    return Inputs(text=text, model=model, prompts=prompts, heldout=heldout)
