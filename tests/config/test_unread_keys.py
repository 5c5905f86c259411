"""A key that nothing would read is refused, and so are two that cannot both be meant."""

import re

import pytest

from megatron_dapo.config import ConfigError, load_config

AT_8000 = "[{from_step: 9, max_new_tokens: 8000}]"


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["algorithm.policy_loss=sapo", "algorithm.loss_options={positive: 0.0}"], "positive = 0: must be above 0"),
        (["algorithm.policy_loss=sapo", "algorithm.loss_options={negative: -1.0}"], "negative = -1: must be above 0"),
        (["algorithm.dynamic_sampling.retire_for=3"], "retire_for = 3: no prompt is retired; set retire_at too"),
        (["rollout.max_turns=3"], "rollout.max_turns = 3: no prompt has several turns"),
        (["rollout.max_observation_tokens=99"], "rollout.max_observation_tokens = 99: no prompt has several turns"),
        (["evaluation.environment=guess:step", "evaluation.path=null"], "no problems are held out"),
        (["reward.environment_workers=3"], "reward.environment_workers = 3: no prompt has several turns"),
        (
            ["evaluation={environment: a:b, path: p}", "algorithm.turn_rewards=true"],
            "turn_rewards = True: no prompt has several turns here",
        ),
        (
            ["data.environment=a:b", "rollout.max_turns=1", "rollout.max_observation_tokens=9"],
            "max_observation_tokens = 9: no prompt has several turns here",
        ),
        (
            ["data.environment=a:b", "rollout.max_turns=1", "data.observation_template='{observation}'"],
            "observation_template = {observation}: no prompt has several turns here",
        ),
        (["preset=[gspo]"], "preset = ['gspo']: no such preset"),
        (["algorithm.policy_loss=cipso"], "did you mean 'cispo'?"),
        (
            ["algorithm.policy_loss=gspo", "algorithm.clip.dual=10.0"],
            "gspo does not read it; leave it out, or set it to null",
        ),
        (["algorithm.policy_loss=sapo", "algorithm.clip.low=0.1"], "clip.low = 0.1: policy_loss sapo does not read it"),
        (["algorithm.policy_loss=a:b", "algorithm.clip.low=0.1"], "clip.low = 0.1: policy_loss a:b does not read it"),
        (
            ["algorithm.policy_loss=reinforce", "algorithm.importance={upper: 5.0, level: sequence}"],
            "importance.level = sequence: policy_loss reinforce with importance.mode none does not read it",
        ),
        (
            ["algorithm.importance={mode: truncated, lower: 0.1}"],
            "policy_loss clipped with importance.mode truncated does not read it; leave it out, or set it to 0.5",
        ),
        (["algorithm.importance.upper=3.0"], "upper = 3.0: policy_loss clipped with importance.mode none does not"),
        (["algorithm.policy_loss=GRPO"], "its loss is `clipped`; `preset: grpo` and `preset: paper`"),
        (
            ["algorithm.dynamic_sampling.pools=[{at_least: 0.5, share: 0.1}, {at_least: 0.5, share: 0.2}]"],
            "pools: two begin at the same at_least",
        ),
        (["rollout.stages=[{from_step: 3}]"], "rollout.stages.0: changes nothing"),
        (
            ["rollout.stages=[{from_step: 3, temperature: 1.1}, {from_step: 3, temperature: 1.2}]"],
            "two begin at the same",
        ),
        (["rollout.thinking_budget=9"], "rollout.thinking_budget = 9: with what text does the thinking end?"),
        (["rollout.thinking_end=x"], "thinking_mark: without rollout.thinking_budget nothing reads them"),
        (["rollout.thinking_mark=x"], "thinking_mark: without rollout.thinking_budget nothing reads them"),
        (["rollout.thinking_budget=20480", "rollout.thinking_end=x"], "must be below max_new_tokens = 20480"),
        (
            ["rollout.thinking_budget=8000", "rollout.thinking_end=x", f"rollout.stages={AT_8000}"],
            "rollout.thinking_budget = 8000: must be below max_new_tokens = 8000",
        ),
        (["rollout.thinking_budget=9", "rollout.thinking_end='  '"], "rollout.thinking_end"),
        (
            ["rollout.thinking_budget=9", f"rollout.thinking_end={'x' * 9999}"],
            "thinking_end (at most a token a byte)",
        ),
        (["algorithm.kl.coef=0.1"], "did you mean algorithm.kl.coefficient?"),
        (["algorithm.lr=0.1"], "did you mean actor.optimizer.lr?"),
        (["algorithm.policy_loss=sapo", "algorithm.loss_options={tau: 1.0}"], "valid: positive, negative"),
        (["algorithm.policy_loss=reinforce", "algorithm.importance.mode=masked"], "corrects for the engine by itself"),
    ],
)
def test_a_loss_and_what_it_does_not_read(file, overrides, fault):
    with pytest.raises(ConfigError, match=re.escape(fault)):
        load_config(file(), overrides)


def test_carrying_brings_its_correction_unless_the_loss_corrects_by_itself(file):
    def mode(*overrides):
        return load_config(file(), list(overrides)).algorithm.importance_mode

    carrying = "algorithm.dynamic_sampling.max_staleness=1"
    assert (mode(), mode(carrying)) == ("none", "truncated")
    assert mode(carrying, "algorithm.policy_loss=reinforce") == "none"
    assert mode(carrying, "algorithm.importance.mode=none") == "none"


def test_what_an_importance_mode_reads_is_taken(file):
    sequence = "level: sequence, upper: 3.0"
    for overrides in (
        [f"algorithm.importance={{mode: masked, {sequence}, lower: 0.2}}"],
        [f"algorithm.importance={{{sequence}}}", "algorithm.dynamic_sampling.max_staleness=1"],
        ["algorithm.policy_loss=reinforce", "algorithm.importance.upper=3.0"],
    ):
        assert load_config(file(), overrides).algorithm.importance.upper == 3.0


def test_a_run_that_was_begun_with_a_clip_that_its_loss_does_not_read_can_still_be_read(file):
    path = file("algorithm: {policy_loss: sapo, clip: {low: 0.1}}\n")
    with pytest.raises(ConfigError, match=r"clip\.low = 0\.1: policy_loss sapo does not read it"):
        load_config(path)
    path.with_name("ledger.jsonl").touch()
    assert load_config(path).algorithm.clip.low == 0.1
