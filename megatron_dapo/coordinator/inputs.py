"""What a run reads before it starts anything: tokenizer, model shape, prompts, held-out problems."""

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_actor, check_blocks
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data.prompts import Prompt, PromptSet, VerifierChoice, read_prompts
from megatron_dapo.data.records import check_file, heldout_files, training_files
from megatron_dapo.data.tokenizer import TextTools, load_text_tools
from megatron_dapo.experience.episodes import Rules, thinking_limit, turn_rules
from megatron_dapo.monitor.writer import check_wandb
from reward.check import Truth, check_environments, check_verifiers
from reward.registry import stated_form
from rollout.generation import RoutingShape, ThinkingLimit

MOST_TRIED = 10_000
"""Ground truths that an own verifier is tried on at most."""

ROUTING_COPIES = 4
"""Of a batch's routing at once: in the groups, the step's responses, its mini-batches, and these in Ray's store."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What was read and checked before anything was started."""

    text: TextTools
    model: HFModelConfig
    prompts: PromptSet
    heldout: PromptSet
    rules: Rules = None
    """Of episodes, where a prompt has an environment."""
    thinking: ThinkingLimit | None = None
    """Of `rollout.thinking_budget`."""


def read_inputs(config: Config) -> Inputs:
    """Tokenizer, prompts and held-out problems: everything a user may have got wrong, before a process is started.

    Raises:
        ConfigError, TokenizerError, DataError, VerifierError: what is wrong.
    """
    check_wandb(config.monitor.wandb)
    draft = config.rollout.speculative.draft_model
    if draft and not (Path(draft) / "config.json").is_file():
        raise ConfigError(f"rollout.speculative.draft_model = {draft}: there is no config.json; name a model's folder")
    for file in (*training_files(config.data), *heldout_files(config.data, config.evaluation)):
        check_file(file.path, file.setting)  # before anything that takes seconds to import
    model = HFModelConfig.load(Path(config.model.path))
    check_actor(model, config.actor)
    check_blocks(model, config.rollout.quantization, config.rollout.tensor_parallel)
    if config.model.context_length > model.max_position_embeddings:
        known = f"the model at {config.model.path} knows only max_position_embeddings = {model.max_position_embeddings}"
        raise ConfigError(f"model.context_length = {config.model.context_length}: {known} positions; lower it")
    from megatron_dapo.actor.weights.hf_files import SafetensorsReader  # not earlier: it imports torch
    from megatron_dapo.actor.weights.model_tensors import check_weights

    with SafetensorsReader(Path(config.model.path)) as reader:  # a file that is missing or cut is known by now
        check_weights(reader, model)
    text = load_text_tools(config.model.path, config.model.stop_token_ids)
    thinking = thinking_limit(config.rollout, text)
    prompts, heldout = read_problems(config, text)
    check_own_code(config)
    prompts.order(config.run.seed)
    rules = turn_rules(config, text, (*prompts.prompts, *heldout.prompts))
    return Inputs(text=text, model=model, prompts=prompts, heldout=heldout, rules=rules, thinking=thinking)


def routing_shape(config: Config, model: HFModelConfig) -> RoutingShape | None:
    """What training responses ask of the servers under routing replay; None: nothing."""
    if not config.actor.routing_replay or model.experts is None:
        return None
    return RoutingShape(layers=model.num_layers, top_k=model.experts.top_k, experts=model.experts.count)


def routing_room(config: Config, model: HFModelConfig) -> Iterator[str]:
    """Where the routing of a batch, were all its responses as long as the context, has no room on this machine."""
    if (shape := routing_shape(config, model)) is None:
        return
    tokens = config.algorithm.prompts_per_step * config.algorithm.group_size * config.model.context_length
    batch, folder = tokens * shape.layers * shape.top_k, Path(config.run.dir).absolute()
    there = next(one for one in (folder, *folder.parents) if one.is_dir())
    places = {"memory": (ROUTING_COPIES * batch, psutil.virtual_memory().available)}
    if config.algorithm.dynamic_sampling.max_staleness:  # checkpoints hold carried groups
        places[f"disk ({there})"] = (config.run.keep_checkpoints + 1) * batch, shutil.disk_usage(there).free
    for place, (needed, free) in places.items():
        if needed > free:
            yield f"actor.routing_replay: a batch's may take {needed / 1e9:.1f} GB of {place}; {free / 1e9:.1f} free"


def read_problems(config: Config, text: TextTools) -> tuple[PromptSet, PromptSet]:
    """The prompts to train on and the held-out ones, each with a verifier that can be run here and can use its ground
    truth.

    Raises:
        DataError: a file, a row or a ground truth that cannot be used.
        VerifierError: one that cannot be run.
        ConfigError: a source in `reward.by_source` that no prompt has.
    """
    training, held = training_files(config.data), heldout_files(config.data, config.evaluation)
    choice = VerifierChoice(config.reward, (*training, *held))
    data = replace(config.data, max_prompt_tokens=config.longest_prompt)
    prompts, heldout = (read_prompts(files, data, choice, text) for files in (training, held))
    choice.check_sources()
    places = {name: f"reward.by_source.{source}" for source, name in config.reward.by_source.items()}
    places |= {file.verifier: f"{file.setting}.verifier" for file in training if file.verifier is not None}
    places |= {config.reward.verifier: "reward.verifier"}
    _check_verifiers(config, places, (*prompts.prompts, *heldout.prompts))
    return prompts, heldout


def check_own_code(config: Config) -> None:
    """Try loss and advantages, which may be the user's own. Raises ConfigError."""
    from megatron_dapo.algorithm.token_loss import LossColumns
    from megatron_dapo.coordinator.batch import advantages_of, objective_of, torch  # seconds to import

    algorithm, loss = config.algorithm, objective_of(config.algorithm).loss
    columns = ["advantages", "old_log_probs", "rollout_log_probs"]
    columns += ["correction"] * (algorithm.importance_mode != "none")
    columns += ["reference_log_probs"] * (algorithm.kl.coefficient > 0)
    for lengths in torch.tensor([2, 3]), torch.empty(0, dtype=torch.int64):  # a rank's micro-batch may be empty
        index = torch.arange(len(lengths)).repeat_interleave(lengths)
        zeros = torch.zeros(len(index))
        given = LossColumns(sequence_index=index, sequence_lengths=lengths, **dict.fromkeys(columns, zeros))
        try:
            tried = loss(zeros.clone().requires_grad_(), given)
            shapes = {"loss": tried.loss.shape} | {name: tried.stats[name].shape for name in loss.stat_names}
            if wrong := [name for name, shape in shapes.items() if shape != zeros.shape]:
                raise ValueError(f"{wrong[0]} has the shape {[*shapes[wrong[0]]]}; it must be one number a token")
            if not tried.loss.requires_grad:
                raise ValueError("the loss has no gradient; detach nothing of log_probs on the way to it")
        except Exception as error:  # a user's code may fail in any way
            where = f"{len(lengths)} responses of {len(index)} tokens"
            raise ConfigError(f"algorithm.policy_loss = {algorithm.policy_loss}, on {where}: {error!r}") from error
    example = torch.tensor([[1.0, *[-1.0] * (algorithm.group_size - 1)]] * 2, dtype=torch.float64)
    advantages_of(example, torch.arange(1, example.numel() + 1), algorithm.advantage)


def remarks(config: Config, prompts: PromptSet, heldout: PromptSet) -> Iterator[str]:
    """What is permitted and seldom meant."""
    if (high := config.algorithm.clip.high) >= 10:
        yield f"algorithm.clip.high = {high:g}: ratios up to {1 + high:g} are not clipped; the paper has 0.28"
    if (warm := config.actor.optimizer.warmup_rollout_steps) > config.run.rollout_steps:
        yield f"actor.optimizer.warmup_rollout_steps = {warm:g}: more than the run has; its lr is never reached"
    if (asked := config.algorithm.prompts_per_step) > (there := len(prompts.prompts)):
        yield f"algorithm.prompts_per_step = {asked}: more prompts than there are ({there}), so a step repeats some"
    if same := len({one.text for one in prompts.prompts} & {one.text for one in heldout.prompts}):
        yield f"{same} of {len(heldout.prompts)} held-out problems are trained on too; they say nothing of new ones"
    short = {one.source for one in prompts.prompts if len(one.answer.split()) <= 8 or not stated_form(one.verifier)}
    for one in {one.source: one for one in prompts.prompts if one.source not in short}.values():
        yield f"source {one.source}: every ground truth is prose, as {one.answer[:80]!r} ({one.place}); see answer_key"


def read_heldout(config: Config, text: TextTools) -> PromptSet:
    """The held-out problems alone, as `read_problems` reads them; the training files need not be there."""
    if not (held := heldout_files(config.data, config.evaluation)):
        raise ConfigError("evaluation.path is not set: name a file of problems to answer (eval: --data FILE)")
    data = replace(config.data, max_prompt_tokens=config.longest_prompt)
    heldout = read_prompts(held, data, VerifierChoice(config.reward, held), text)
    _check_verifiers(config, {}, heldout.prompts)
    return heldout


def _check_verifiers(config: Config, places: dict[str, str], prompts: Sequence[Prompt]) -> None:
    """Whether every verifier and every environment that is named can be run here; `places`: who named a verifier."""
    truths, episodes = defaultdict[str, list[Truth]](list), defaultdict[str, list[Truth]](list)
    for prompt in prompts:
        places.setdefault(prompt.verifier, prompt.place)
        for tried in (truths[prompt.verifier], *([episodes[prompt.environment]] if prompt.environment else ())):
            if len(tried) < MOST_TRIED:
                tried.append((prompt.place, prompt.text, prompt.answer))
    check_verifiers(places, config.reward, truths)
    check_environments(dict.fromkeys(episodes, "environment"), config.reward, episodes)
