"""`megatron-dapo preview`: what the server gets, to the last token."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.coordinator.inputs import read_problems
from megatron_dapo.data.order import PromptOrder
from megatron_dapo.data.records import DataError
from megatron_dapo.data.tokenizer import TokenizerError, load_text_tools


def preview_command(path: Path, overrides: Sequence[str], count: int) -> ExitCode:
    """Print the first `count` prompts of the run's order."""
    try:
        config = load_config(path, overrides)
        text = load_text_tools(config.model.path, config.model.stop_token_ids)
        prompts, _ = read_problems(config, text)
    except (ConfigError, DataError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    print(f"prompts: {prompts.summary()}")
    print(f"a response ends at token(s) {list(text.stop_token_ids)} or after {config.rollout.max_new_tokens} tokens")
    order = PromptOrder(prompts.spans, config.run.seed)
    for position in range(count):
        prompt = prompts.prompts[order.index_at(position)]
        print(f"\n--- prompt {position} ({prompt.place}), {len(prompt.ids)} tokens")
        print(f"source {prompt.source}, verifier {prompt.verifier}, answer {prompt.answer!r}")
        print(prompt.text)
        print(f"token ids: {prompt.ids.tolist()}")
    return ExitCode.FINISHED
