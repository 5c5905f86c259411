"""The whole config of a run, and the rules that tie its sections together."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from pydantic.dataclasses import dataclass

from megatron_dapo.algorithm.losses import LOSSES
from megatron_dapo.config.actor_config import ActorConfig, LoraConfig
from megatron_dapo.config.algorithm_config import AlgorithmConfig
from megatron_dapo.config.base import STRICT, ConfigError
from megatron_dapo.config.data_config import DataConfig, EvaluationConfig
from megatron_dapo.config.run_config import ModelConfig, MonitorConfig, RunConfig
from reward.config import RewardConfig, ServiceConfig
from reward.environment import REMOTE
from rollout.config import RolloutConfig, WeightWay

_OPTIONS = yaml.safe_load(Path(__file__).with_name("sglang_options.yaml").read_text(encoding="utf-8"))
GOVERNED: dict[str, str] = _OPTIONS["governed"]
"""Options of SGLang's command line that a key stands for."""
REFUSED: dict[str, str] = {name: entry["reason"] for entry in _OPTIONS["refused"] for name in entry["options"]}
"""Options with which no publish could be verified, or no server would start, and why. A dash at the end: all that begin
so."""


_LARGEST_DECAY = 0.99
"""Half a step of bfloat16 is up to 1/256 of a number: what loses less of itself is rounded back to what it was."""

_READ_BY_MODE = {"none": (), "truncated": ("level", "upper"), "masked": ("level", "upper", "lower")}
"""Keys of `algorithm.importance`, by its mode."""

OF_TURNS: dict[str, Any] = {
    **{f"rollout.{key}": getattr(RolloutConfig(), key) for key in ("max_turns", "max_observation_tokens", "turn_end")},
    "data.observation_template": None,
    "algorithm.turn_rewards": False,
    "reward.environment_workers": RewardConfig().environment_workers,
}
"""Keys that only prompts with an environment read, and their defaults."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    actor: ActorConfig = ActorConfig()
    monitor: MonitorConfig = MonitorConfig()

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt, at most."""
        return self.data.max_prompt_tokens or self.model.context_length - self.longest_continuation

    @property
    def longest_continuation(self) -> int:
        """Tokens behind a prompt, at most, with those that an environment gives."""
        rollout = self.rollout
        given = (rollout.max_turns - 1) * rollout.max_observation_tokens if self.has_environments else 0
        return rollout.longest_continuation + given

    @property
    def has_environments(self) -> bool:
        """Whether a prompt may have several turns."""
        return any(each.environment is not None for each in (self.data, *self.data.mixture, self.evaluation))

    def way_of_weights(self, *, on_gpus: bool, shared: bool = False) -> WeightWay:
        """`rollout.weight_sync`, decided; `shared`: whether trainer and servers use a GPU at the same time."""
        if self.rollout.weight_sync != "auto":
            return self.rollout.weight_sync
        if on_gpus and self.run.mode == "colocated":
            # A server that is lost then waits for the next publish: others must serve meanwhile.
            return "tensor" if self.rollout.servers > 1 or self.rollout.speculates else "disk"
        return "distributed" if (on_gpus and not shared) or self.rollout.speculates else "disk"

    def nodes_of_server(self, size: int) -> int:
        """How many nodes, of `size` GPUs (of a run on CPUs: CPUs) or fewer, a server takes that the run starts, an
        equal part of it on each. So large a part leaves no room on its node for another part of that server.

        Raises:
            ConfigError: it has no equal parts, or shares its GPUs with the trainer.
        """
        each = self.rollout.tensor_parallel
        nodes = -(-each // size)
        larger = f"rollout.tensor_parallel = {each}: a server is larger than a node, which has {size}"
        if nodes > 1 and self.run.mode == "colocated":
            raise ConfigError(f"{larger}; run.mode = colocated needs {size} or less")
        if each % nodes:
            raise ConfigError(f"{larger}, and {nodes} nodes cannot hold equal parts of it; set it to {size * nodes}")
        return nodes

    def check_shared_gpus(self) -> None:
        """Raise ConfigError unless the servers of `run.mode: colocated` stand on exactly the trainer's GPUs."""
        layout, each, servers = self.actor.layout, self.rollout.tensor_parallel, self.rollout.servers
        if servers * each != layout.world_size:
            raise ConfigError(
                f"run.mode = colocated: rollout.servers x rollout.tensor_parallel = {servers * each} must be the "
                f"{layout.world_size} GPUs of actor.layout; set rollout.servers to {max(1, layout.world_size // each)}"
            )
        larger, smaller = max(layout.tensor, each), min(layout.tensor, each)
        if larger % smaller or layout.world_size % larger:
            both = f"actor.layout.tensor = {layout.tensor} and rollout.tensor_parallel = {each}"
            rule = "one must divide the other, and both the number of GPUs: servers and groups of ranks share nodes"
            raise ConfigError(f"run.mode = colocated: of {both} {rule}")

    def at_step(self, step: int) -> "Config":
        """With the values of `rollout` that hold in rollout step `step`."""
        return replace(self, rollout=self.rollout.at_step(step))


MOST_RANKS = 1 << 20
"""Of a layout: above it a digit is too many."""


def contradictions(config: Config) -> Iterator[str]:
    """Every pair of keys that cannot both be meant, as `key = value: rule; remedy`."""
    for rules in (_of_algorithm, _of_data, _of_actor, _of_rollout, _of_run):
        yield from rules(config)


def _of_algorithm(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    responses, group = algorithm.mini_batch_responses, algorithm.group_size
    if responses % group:
        yield f"algorithm.mini_batch_responses = {responses}: must be a multiple of algorithm.group_size = {group}"
    if responses > (responses_of_step := algorithm.prompts_per_step * group):
        yield f"algorithm.mini_batch_responses = {responses}: a rollout step has only {responses_of_step}; lower it"
    clip, overlong = algorithm.clip, algorithm.overlong
    if clip.dual is not None and clip.dual <= 1 + clip.high:
        yield f"algorithm.clip.dual = {clip.dual:g}: must exceed 1 + clip.high = {1 + clip.high:g}, else it cuts eq. 8"
    if overlong.shape != "none" and overlong.buffer >= (shortest := rollout.shortest_limit):
        yield f"algorithm.overlong.buffer = {overlong.buffer}: must be below max_new_tokens = {shortest}"
    entry, mode = LOSSES.get(algorithm.policy_loss), algorithm.importance_mode
    reads = {*(entry.reads if entry else ()), *(f"importance.{name}" for name in ("mode", *_READ_BY_MODE[mode]))}
    for section, also in {"clip": "", "importance": f" with importance.mode {mode}"}.items():
        for name, default in asdict(getattr(AlgorithmConfig(), section)).items():
            if (value := getattr(getattr(algorithm, section), name)) != default and f"{section}.{name}" not in reads:
                unread = f"policy_loss {algorithm.policy_loss}{also} does not read it"
                yield f"algorithm.{section}.{name} = {value}: {unread}; leave it out, or set it to {default or 'null'}"
    if entry is not None:
        for name in sorted(algorithm.loss_options.keys() - entry.options):
            valid = ", ".join(entry.options) or "none"
            yield f"algorithm.loss_options.{name}: policy_loss {algorithm.policy_loss} does not read it; valid: {valid}"
        for name, value in algorithm.loss_options.items():
            if value <= 0:
                yield f"algorithm.loss_options.{name} = {value:g}: must be above 0"
        if entry.needs_rollout_log_probs and mode != "none":
            alone = f"policy_loss {algorithm.policy_loss} corrects for the engine by itself"
            yield f"algorithm.importance.mode = {mode}: {alone}; set it to none"
    if algorithm.kl.reset_every is not None and algorithm.kl.coefficient == 0:
        yield f"algorithm.kl.reset_every = {algorithm.kl.reset_every}: without kl.coefficient there is no reference"
    control, start = algorithm.entropy_control, algorithm.entropy_coefficient
    if control.target is not None and start > control.maximum:
        yield f"algorithm.entropy_coefficient = {start:g}: above entropy_control.maximum = {control.maximum:g}"
    sampling, importance = algorithm.dynamic_sampling, algorithm.importance
    if sampling.retire_for is not None and sampling.retire_at is None:
        yield f"algorithm.dynamic_sampling.retire_for = {sampling.retire_for}: no prompt is retired; set retire_at too"
    if len({pool.at_least for pool in sampling.pools}) < len(sampling.pools):
        yield "algorithm.dynamic_sampling.pools: two begin at the same at_least; join them"
    if mode == "masked" and importance.lower >= importance.upper:
        yield f"algorithm.importance.lower = {importance.lower:g}: must be below upper = {importance.upper:g}"


def _of_data(config: Config) -> Iterator[str]:
    rollout = config.rollout
    longest, given = (config.data.max_prompt_tokens or 1) + config.longest_continuation, config.model.context_length
    if longest > given:
        told = f"model.context_length = {given}: must hold a prompt, max_new_tokens = {rollout.longest_response}"
        yield f"{told}, thinking_end (at most a token a byte) and observations: {longest} tokens; raise it or lower one"
    if (config.data.path is None) == (not config.data.mixture):
        both = "both are" if config.data.mixture else "neither is"
        yield f"data.path and data.mixture: {both} given; name one prompt file, or several in the mixture"
    if config.evaluation.environment is not None and config.evaluation.path is None:
        yield f"evaluation.environment = {config.evaluation.environment}: no problems are held out; set evaluation.path"
    trained = any(each.environment is not None for each in (config.data, *config.data.mixture))
    for key, default in OF_TURNS.items():
        read = trained if key == "algorithm.turn_rewards" else config.has_environments
        read &= rollout.max_turns > 1 or key not in ("rollout.max_observation_tokens", "data.observation_template")
        if not read and (value := attrgetter(key)(config)) != default:
            yield f"{key} = {value}: no prompt has several turns here; set data.environment and rollout.max_turns too"
    if config.has_environments and (budget := rollout.thinking_budget) is not None:
        yield f"rollout.thinking_budget = {budget}: is for one answer, not for turns (data.environment); set it to null"
    if config.evaluation.every and config.evaluation.path is None:
        yield f"evaluation.every = {config.evaluation.every}: no problems are held out; set evaluation.path too"
    reward, longest_s = config.reward, config.run.step_deadline_s
    for name, service in (("remote", reward.remote), ("remote_environment", reward.remote_environment)):
        if service.url is not None and (late := service.deadline_s) >= longest_s:
            yield f"reward.{name}.deadline_s = {late:g}: must be below run.step_deadline_s = {longest_s:g}"
    named = {each.environment for each in (config.data, *config.data.mixture, config.evaluation)}
    if REMOTE not in named and reward.remote_environment != ServiceConfig():
        yield "reward.remote_environment: no prompt has environment remote; set data.environment too, or leave it out"


def _of_actor(config: Config) -> Iterator[str]:
    layout = config.actor.layout
    if layout.sequence_parallel and layout.tensor == 1:
        yield "actor.layout.sequence_parallel = true: splits over tensor-parallel ranks, but layout.tensor is 1"
    if layout.virtual_pipeline is not None and layout.pipeline == 1:
        yield f"actor.layout.virtual_pipeline = {layout.virtual_pipeline}: needs layout.pipeline > 1"
    if layout.world_size > MOST_RANKS:
        yield f"actor.layout: asks for {layout.world_size} trainer ranks, more than any cluster has; lower it"
    ranks, split = layout.world_size // layout.pipeline, layout.expert * layout.expert_tensor
    if ranks % split:
        yield f"actor.layout.expert x expert_tensor = {split}: must divide tensor x context x data = {ranks}"
    if layout.expert > 1 and not config.actor.optimizer.distributed:
        yield f"actor.layout.expert = {layout.expert}: needs actor.optimizer.distributed=true; set that, or expert to 1"
    for option in config.rollout.extra_args if config.actor.routing_replay else ():
        if option.replace("_", "-").startswith(("--enable-hi", "--enable-lm")):
            why = "what it takes back into the KV cache has the experts of other tokens"
            yield f"rollout.extra_args: {option} under actor.routing_replay: {why}; remove one"
    if config.actor.routing_replay and (clients := config.rollout.client_processes):
        yield f"rollout.client_processes = {clients}: would copy the experts of actor.routing_replay; set it to 0"
    fp8 = config.actor.fp8
    if fp8 != "none" and config.actor.device == "cpu":
        yield f"actor.fp8 = {fp8}: needs CUDA, but actor.device is cpu; set actor.fp8 to none"
    if fp8 != "none" and config.model.dtype != "bfloat16":
        yield f"actor.fp8 = {fp8}: the rest of the model is then bfloat16; set model.dtype to that"
    lora = config.actor.lora
    if lora.rank and fp8 != "none":
        yield f"actor.fp8 = {fp8}: not supported with actor.lora.rank = {lora.rank}; set one of them to none or 0"
    if not lora.rank and lora != LoraConfig():
        yield "actor.lora.alpha, modules: nothing reads them without actor.lora.rank; set that too, or leave them out"
    if len(set(lora.modules)) < len(lora.modules):
        yield "actor.lora.modules: names a projection twice; remove one"
    yield from _of_optimizer(config)


def _of_optimizer(config: Config) -> Iterator[str]:
    actor, optimizer = config.actor, config.actor.optimizer
    on_cpu, compact = optimizer.on_cpu, optimizer.compact != "none"
    told = "actor.optimizer.on_cpu = true" if on_cpu else f"actor.optimizer.compact = {optimizer.compact}"
    for key, problem in {
        "actor.optimizer.distributed": not optimizer.distributed and "only the distributed optimizer can do it",
        "actor.lora.rank": actor.lora.rank and "adapters have little state",
        "model.dtype": config.model.dtype != "bfloat16" and "it is about the float32 weights of bfloat16 ones",
        "actor.device": compact and actor.device == "cpu" and "its kernels are CUDA's",
        "actor.optimizer.compact": on_cpu and compact and "the step on the CPU is in float32",
        "actor.offload.optimizer_state": on_cpu and actor.offload.optimizer_state and "there is nothing to bring back",
    }.items():
        if (on_cpu or compact) and problem:
            yield f"{told}: not with this {key}, {problem}; change one of the two"
    if optimizer.compact == "all" and max(optimizer.betas) > _LARGEST_DECAY:
        rate = f"betas has {max(optimizer.betas):g}, above {_LARGEST_DECAY}"
        yield f"actor.optimizer.compact = all: {rate}, so a moment in bfloat16 never decays; lower it or set weights"


def _of_option(word: str) -> Iterator[str]:
    """What is wrong with one word of `rollout.extra_args`."""
    if not word.startswith("--"):
        return
    if " " in word:
        yield f"rollout.extra_args: {word!r} is one word; give the option and its value as two"
        return
    option = word.partition("=")[0].replace("_", "-")
    # SGLang takes the beginning of an option for it.
    longer = [name for name in (*GOVERNED, *REFUSED) if name.startswith(option)]
    why = [REFUSED[name] for name in REFUSED if option == name or (name.endswith("-") and option.startswith(name))]
    if key := GOVERNED.get(option):
        yield f"rollout.extra_args: {word} is what {key} decides, and the server would obey the former; set {key}"
    elif why:
        yield f"rollout.extra_args: {word} cannot be used: {why[0]}; remove it"
    elif longer:
        yield f"rollout.extra_args: {word} may be short for {longer[0].rstrip('-')}; write the option out"


def _of_rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.port and rollout.port + rollout.servers - 1 > 65535:
        yield f"rollout.port = {rollout.port}: with {rollout.servers} servers the last one is above 65535; lower it"
    if rollout.api_key_file is not None and not rollout.urls:
        yield "rollout.api_key_file: is for the servers of rollout.urls; those that a run starts get a key of its own"
    yield from itertools.chain.from_iterable(map(_of_option, rollout.extra_args))
    if len({stage.from_step for stage in rollout.stages}) < len(rollout.stages):
        yield "rollout.stages: two begin at the same from_step; join them"
    for number, stage in enumerate(rollout.stages):
        if stage.max_new_tokens is None and stage.temperature is None:
            yield f"rollout.stages.{number}: changes nothing; set its max_new_tokens or temperature, or remove it"
    budget, phrase = rollout.thinking_budget, rollout.thinking_end
    if budget is None and (phrase or rollout.thinking_mark):
        yield "rollout.thinking_end, thinking_mark: without rollout.thinking_budget nothing reads them; set that too"
    if budget is not None and phrase is None:
        yield f"rollout.thinking_budget = {budget}: with what text does the thinking end? set rollout.thinking_end too"
    if budget is not None and budget >= (shortest := rollout.shortest_limit):
        yield f"rollout.thinking_budget = {budget}: must be below max_new_tokens = {shortest}, for what comes after it"
    yield from _of_speculation(config)
    yield from _of_quantization(config)
    addresses = [url.rstrip("/").lower() for url in rollout.urls]
    if len(set(addresses)) < len(addresses):
        yield "rollout.urls: names a server twice, which would get its weights and its share twice; remove one"


def _of_quantization(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.quantization == "none":
        return
    chosen = f"rollout.quantization = {rollout.quantization}"
    corrects = (entry := LOSSES.get(algorithm.policy_loss)) is not None and entry.needs_rollout_log_probs
    overrides = [word for word in rollout.extra_args if word.replace("_", "-").startswith("--json-model")]
    for key, problem in {
        "actor.device = cpu": config.actor.device == "cpu" and "SGLang multiplies in FP8 on GPUs alone",
        "model.dtype": config.model.dtype != "bfloat16" and "what is not quantized is bfloat16",
        "rollout.deterministic": rollout.deterministic and "its products may depend on the batch",
        "rollout.speculative.algorithm": rollout.speculates and "the draft model would be loaded as FP8 too",
        "rollout.weight_sync": rollout.weight_sync == "delta" and "which sends values of one type alone",
        "rollout.extra_args": overrides and f"{overrides[0]} would replace what tells servers of it",
        f"algorithm.importance.mode = {algorithm.importance.mode}": algorithm.importance_mode == "none"
        and not corrects
        and "its log-probs are not the trainer's, which needs a correction: truncated or masked",
    }.items():
        if problem:
            yield f"{chosen}: not with this {key}, {problem}; change one of the two"


def _of_speculation(config: Config) -> Iterator[str]:
    speculative, rollout = config.rollout.speculative, config.rollout
    algorithm, model = f"rollout.speculative.algorithm = {speculative.algorithm}", speculative.draft_model
    if not rollout.speculates:
        if model or speculative.draft_tokens:
            yield f"rollout.speculative.draft_model, draft_tokens: {algorithm} reads neither; choose an algorithm"
        return
    if speculative.algorithm == "ngram" and model:
        yield f"rollout.speculative.draft_model = {model}: ngram drafts without a model; remove it"
    if speculative.algorithm != "ngram" and not model:
        yield f"{algorithm}: drafts by which model? set rollout.speculative.draft_model too"
    for key, problem in {
        "rollout.deterministic": rollout.deterministic and "what a response is would depend on what was drafted",
        "actor.routing_replay": config.actor.routing_replay and "experts of drafted tokens are not told apart",
        "rollout.weight_sync": rollout.weight_sync == "disk" and "such a server cannot read new weights from a folder",
        "rollout.urls": rollout.urls and "such a server takes weights that it missed by a restart of ours alone",
        "actor.device": config.actor.device == "cpu" and "SGLang draws from the distribution on GPUs alone",
    }.items():
        if problem:
            yield f"{algorithm}: not with this {key}, {problem}; change one of the two"


def _of_run(config: Config) -> Iterator[str]:
    sampling = config.algorithm.dynamic_sampling
    if config.run.mode == "async" and sampling.ahead > sampling.max_staleness:
        above = f"above max_staleness = {sampling.max_staleness}: what is written ahead would expire"
        yield f"algorithm.dynamic_sampling.ahead = {sampling.ahead:g}: {above}; raise max_staleness"
    if config.run.mode == "colocated" and config.rollout.urls:
        yield "rollout.urls: somebody else's servers are not on the trainer's GPUs; set run.mode to sync or async"
    if (publish := config.rollout.on_publish) != "restart":
        if config.rollout.deterministic:
            yield f"rollout.on_publish = {publish}: its tokens depend on timing; rollout.deterministic needs restart"
        if config.run.mode == "colocated":
            yield f"rollout.on_publish = {publish}: run.mode=colocated frees the KV cache; it needs restart"
        for option in config.rollout.extra_args if publish == "keep" else ():
            if option.replace("_", "-").startswith(("--disable-radix", "--strip-thinking")):
                yield f"rollout.extra_args: {option} forgets what rollout.on_publish = keep goes on with; remove one"
    way, ranks = config.rollout.weight_sync, config.rollout.servers * config.rollout.tensor_parallel
    if way == "tensor" and config.run.mode != "colocated":
        yield f"rollout.weight_sync = tensor: run.mode={config.run.mode} needs auto, disk, distributed or delta"
    fits = way not in ("distributed", "delta") and (way != "tensor" or ranks <= config.actor.layout.world_size)
    if config.run.mode == "colocated" and not fits:
        yield f"rollout.weight_sync = {way}: run.mode=colocated needs disk, or tensor and {ranks} trainer ranks"
    if config.run.mode == "colocated" and config.actor.offload.between_phases == "none":
        yield "actor.offload.between_phases = none: run.mode=colocated needs all, so that servers have the GPUs' memory"
    if config.actor.offload.communicators and (config.run.mode != "colocated" or config.actor.device == "cpu"):
        yield "actor.offload.communicators: leaves GPU memory to servers; needs run.mode=colocated on CUDA; remove it"
    if config.run.dir.startswith("~"):
        yield f"run.dir = {config.run.dir}: nobody expands the ~, it would be a folder of that name; write it in full"
    if config.run.resume_step is not None and not config.run.resume:
        yield f"run.resume_step = {config.run.resume_step}: says where a resume starts; set run.resume=true too"
    if config.monitor.mismatch_stop < config.monitor.mismatch_warn:
        yield "monitor.mismatch_stop: below monitor.mismatch_warn, so the warning would never be seen; raise it"
