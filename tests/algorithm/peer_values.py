"""Runs the functions of verl and TRL themselves on random responses, and writes peers.json, which test_peers.py reads.

    pip install --no-deps --target peers verl==0.9.1 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 \
        multiprocess==0.70.19 xxhash==4.1.0 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 tensordict==0.15.3 \
        pyvers==0.2.3 orjson cloudpickle
    PYTHONPATH=.:peers python -m tests.algorithm.peer_values

All in float64: the loss and its gradient in each token's log-prob, or the advantage of each response.
"""

import inspect
import json
import textwrap
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).with_name("peers.json")
PROMPTS, GROUP, LONGEST = 3, 4, 6
LIMIT = 10
"""Tokens a response may have: the constant divisor of Dr. GRPO."""


def inputs() -> dict[str, Any]:
    """Random responses to three prompts; the ratios are on both sides of every bound, with either sign of A."""
    rng = np.random.default_rng(0)
    count = PROMPTS * GROUP
    lengths = rng.integers(1, LONGEST + 1, count)
    rewards = np.where(np.arange(GROUP) < [[2], [1], [GROUP]], 1.0, -1.0).reshape(count) - np.round(
        rng.random(count) * (rng.random(count) < 0.4), 3
    )
    rewards[-GROUP:] = 1.0  # a group without spread
    tokens = int(lengths.sum())
    log_probs = np.round(-rng.exponential(1.0, tokens), 4)
    return {
        "lengths": lengths.tolist(),
        "rewards": rewards.tolist(),
        "advantages": np.round(rng.normal(0, 1, count), 3).tolist(),
        "log_probs": log_probs.tolist(),
        "old_log_probs": np.round(log_probs - rng.normal(0, 0.5, tokens), 4).tolist(),
        "reference_log_probs": np.round(log_probs - rng.normal(0, 0.3, tokens), 4).tolist(),
        "carries": [at not in (1, 6) for at in range(count)],
    }


class Padded:
    """The inputs as both libraries want them: [R, longest], with a mask."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.lengths = given["lengths"]
        self.mask = torch.tensor([[float(at < length) for at in range(LONGEST)] for length in self.lengths]).double()
        self.carried = self.mask * torch.tensor(given["carries"]).double()[:, None]
        self.log_probs, self.old, self.reference = (
            self.of(given[name]) for name in ("log_probs", "old_log_probs", "reference_log_probs")
        )
        self.advantages = torch.tensor(given["advantages"], dtype=torch.float64)
        self.rewards = torch.tensor(given["rewards"], dtype=torch.float64)
        self.groups = np.repeat(np.arange(PROMPTS), GROUP)

    def of(self, flat: list[float]) -> torch.Tensor:
        padded = torch.zeros(len(self.lengths), LONGEST, dtype=torch.float64)
        padded[self.mask.bool()] = torch.tensor(flat, dtype=torch.float64)
        return padded

    def result(self, loss: torch.Tensor, log_probs: torch.Tensor) -> dict[str, Any]:
        loss.backward()
        return {"loss": loss.item(), "gradient": log_probs.grad[self.mask.bool()].tolist()}


VERL_LOSSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vanilla, token-mean": ("vanilla", "token-mean", {"clip_ratio_c": 1e6}),
    "vanilla, dual": ("vanilla", "token-mean", {"clip_ratio_c": 1.5}),
    "vanilla, seq-mean-token-mean": ("vanilla", "seq-mean-token-mean", {"clip_ratio_c": 1e6}),
    "vanilla, seq-mean-token-sum-norm": ("vanilla", "seq-mean-token-sum-norm", {"clip_ratio_c": 1e6}),
    "gspo, seq-mean-token-mean": ("gspo", "seq-mean-token-mean", {}),
    "gspo, token-mean": ("gspo", "token-mean", {}),
    "sapo": ("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "geo_mean": ("geo_mean", "", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "cispo, token-mean": ("cispo", "token-mean", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}),
}


def verl_values(data: Padded) -> dict[str, Any]:
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    class Settings(ActorConfig):
        """What the losses read, without an actor."""

        def __init__(self, **values: Any) -> None:
            given = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **values}
            self.__dict__.update(given, global_batch_info={"loss_scale_factor": LIMIT})

        def get(self, name: str, default: Any = None) -> Any:
            return self.__dict__.get(name, default)

    def loss_of(name: str, mode: str, settings: dict[str, Any], mask: torch.Tensor) -> dict[str, Any]:
        log_probs = data.log_probs.clone().requires_grad_()
        advantages = data.advantages[:, None].expand_as(log_probs)
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=data.old,
            log_prob=log_probs,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=mode,
            config=Settings(**settings),
        )
        return data.result(loss, log_probs)

    def advantage_of(function: Any, **options: Any) -> list[float]:
        last = torch.zeros_like(data.mask)
        last[torch.arange(len(data.lengths)), torch.tensor(data.lengths) - 1] = data.rewards
        return function(last, data.mask, data.groups, **options)[0][:, 0].tolist()

    return {
        "losses": {name: loss_of(*about, data.mask) for name, about in VERL_LOSSES.items()}
        | {f"{name}, masked": loss_of(*VERL_LOSSES[name], data.carried) for name in MASKED},
        "advantages": {
            "grpo": advantage_of(core_algos.compute_grpo_outcome_advantage),
            "grpo, no std": advantage_of(core_algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
            "rloo": advantage_of(core_algos.compute_rloo_outcome_advantage),
            "reinforce++ baseline": advantage_of(core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage),
        },
        "kl": {
            name: core_algos.kl_penalty_forward(data.log_probs, data.reference, theirs)[data.mask.bool()].tolist()
            for name, theirs in {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.items()
        },
    }


MASKED = ("vanilla, token-mean", "vanilla, seq-mean-token-mean", "vanilla, seq-mean-token-sum-norm")

TRL_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "dapo, delta": {"delta": 1.5},
    "dapo, beta": {"beta": 0.1},
    "cispo": {"epsilon_high": 1.5},
    "sapo": {},
    "grpo, sequence": {"importance_sampling_level": "sequence"},
    "dapo, sequence": {"importance_sampling_level": "sequence"},
}


def trl_values(data: Padded) -> dict[str, Any]:
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import nanstd

    def loss_of(name: str, settings: dict[str, Any], mask: torch.Tensor) -> dict[str, Any]:
        log_probs = data.log_probs.clone().requires_grad_()
        fields = GRPOConfig.__dataclass_fields__
        args = {key: fields[key].default for key in ("sapo_temperature_pos", "sapo_temperature_neg")}
        # Its default multiplies the KL term by the ratio (DeepSeek-V3.2); GRPO, which has the term, does not.
        args["use_bias_correction_kl"] = False
        gathered = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        trainer = {
            "loss_type": name.partition(",")[0],
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "args": SimpleNamespace(**args, delta=None, steps_per_generation=1),
            "max_completion_length": LIMIT,
            "current_gradient_accumulation_steps": 1,
            "model": SimpleNamespace(training=True),
            "accelerator": gathered,
            "_metrics": {"train": defaultdict(list)},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "use_vllm": False,
            "_entropy_bonus_enabled": False,
        }
        for key, value in settings.items():
            setattr(trainer["args"], key, value) if key == "delta" else trainer.update({key: value})
        empty = torch.zeros(len(data.lengths), 0, dtype=torch.long)
        batch = {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": data.advantages,
            "old_per_token_logps": data.old,
            "ref_per_token_logps": data.reference,
            "num_items_in_batch": mask.sum(),
        }
        return data.result(GRPOTrainer._compute_loss(SimpleNamespace(**trainer), None, batch), log_probs)

    def scaled(how: str) -> list[float]:
        """Advantages are no function of their own there: the statements that compute them, run out of their method."""
        lines = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
        first = next(at for at, line in enumerate(lines) if '== "sum_then_normalize"' in line)
        last = next(at for at, line in enumerate(lines) if at > first and "is_std_zero" in line)
        about = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=how,
            reward_weights=torch.ones(1, dtype=torch.float64),
        )
        rewards_per_func = data.rewards[:, None]
        names = {
            "self": about,
            "torch": torch,
            "nanstd": nanstd,
            "device": "cpu",
            "num_generations": GROUP,
            "rewards_per_func": rewards_per_func,
            "unscorable_mask": torch.isnan(rewards_per_func).all(dim=1),
        }
        exec(textwrap.dedent("\n".join(lines[first:last])), names)
        return names["advantages"].tolist()

    return {
        "losses": {name: loss_of(name, about, data.mask) for name, about in TRL_LOSSES.items()}
        | {f"{name}, masked": loss_of(name, {}, data.carried) for name in ("grpo", "dr_grpo", "dapo")},
        "advantages": {how: scaled(how) for how in ("group", "none", "batch")},
    }


def main() -> None:
    given = inputs()
    data = Padded(given)
    found = {
        "versions": {name: version(name) for name in ("verl", "trl")},
        "inputs": given,
        "verl": verl_values(data),
        "trl": trl_values(data),
    }
    FILE.write_text(json.dumps(rounded(found)) + "\n")


def rounded(value: Any) -> Any:
    """With 12 digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
