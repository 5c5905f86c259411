"""Admitted groups -> arrays: what belongs together stays together, and law 1's weights cover the whole mini-batch."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from megatron_dapo.actor.step_data import LogProbs
from megatron_dapo.algorithm.advantage import Estimator
from megatron_dapo.algorithm.losses.reinforce import Reinforce
from megatron_dapo.algorithm.losses.sapo import SAPO
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.algorithm_config import ESTIMATORS
from megatron_dapo.coordinator.batch import mini_batches, objective_of, step_arrays, step_correction
from megatron_dapo.experience.groups import ScoredGroup, ScoredResponse
from reward.verdict import Verdict
from rollout.generation import FinishReason, Generation

GROUP = 4
rng = np.random.default_rng(0)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {dir: x, rollout_steps: 1}\nmodel: {path: m, context_length: 200}\n"
        "data: {path: p, max_prompt_tokens: 50}\n"
        "evaluation: {path: e}\nrollout: {max_new_tokens: 100}\n"
        f"algorithm: {{group_size: {GROUP}, prompts_per_step: 6, mini_batch_responses: 8, overlong: {{buffer: 10}}}}\n"
    )
    return lambda *overrides: load_config(file, list(overrides))


def make_groups(count=6):
    groups = []
    for position in range(count):
        responses = []
        for sample in range(GROUP):
            length = int(rng.integers(1, 100))
            truncated = sample == 3 and position % 2 == 0
            responses.append(
                ScoredResponse(
                    generation=Generation(
                        request_id="r",
                        token_ids=np.full(length, 10 * position + sample, np.int32),
                        log_probs=np.full(length, -0.01 * (10 * position + sample), np.float32),
                        weight_versions=np.zeros(length, np.int32),
                        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
                    ),
                    text="",
                    verdict=Verdict(accuracy=sample < 2, extracted=None, rule="t", seconds=0.0),
                    accuracy=sample < 2,
                    reward_raw=1.0 if sample < 2 else -1.0,
                    reward_shaped=(1.0 if sample < 2 else -1.0) - 0.25 * sample,
                )
            )
        prompt = np.full(int(rng.integers(1, 9)), 90, np.int32)
        groups.append(
            ScoredGroup(
                position=position, prompt_index=0, prompt_ids=prompt, weight_version=0, responses=tuple(responses)
            )
        )
    return groups


def test_advantages_are_eq_9_of_the_shaped_rewards(config):
    arrays = step_arrays(make_groups(), config())
    rewards = np.array([1.0, 0.75, -1.5, -1.75])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(arrays.advantages.reshape(6, GROUP), np.tile(expected, (6, 1)), rtol=1e-6)


def test_every_response_is_in_one_mini_batch_with_its_own_columns(config):
    groups = make_groups()
    arrays = step_arrays(groups, config())
    old = LogProbs(log_probs=arrays.rollout_log_probs * 2, entropy=np.abs(arrays.rollout_log_probs))
    batches = mini_batches(arrays, old, None, None, config(), rollout_step=1, hidden_size=64)
    assert [len(batch.responses) for batch in batches] == [8, 8, 8]
    seen = []
    for batch in batches:
        at = token = 0
        names = []
        for length, prompt in zip(batch.responses.sequence_lengths, batch.responses.prompt_lengths, strict=True):
            ids = batch.responses.token_ids[at + prompt : at + length]
            name = int(ids[0])
            names.append(name)
            position, sample = divmod(name, 10)
            assert len(ids) == len(groups[position].responses[sample].generation.token_ids)
            span = slice(token, token + len(ids))
            np.testing.assert_allclose(batch.old_log_probs[span], -0.02 * name, rtol=1e-6)
            np.testing.assert_allclose(batch.advantages[span], arrays.advantages[position * GROUP + sample])
            at, token = at + length, token + len(ids)
        seen += names
        assert all(names.count(10 * (n // 10)) == 1 and names.count(10 * (n // 10) + 3) == 1 for n in names), (
            "group split"
        )
        np.testing.assert_allclose(batch.weights, 1 / batch.responses.num_response_tokens, rtol=1e-6)
    assert sorted(seen) == sorted(10 * p + s for p in range(6) for s in range(GROUP))


def test_the_order_of_mini_batches_depends_on_seed_and_step_only(config):
    groups = make_groups()

    def first_ids(seed, step):
        chosen = config(f"run.seed={seed}")
        arrays = step_arrays(groups, chosen)
        old = LogProbs(log_probs=arrays.rollout_log_probs, entropy=np.abs(arrays.rollout_log_probs))
        return mini_batches(arrays, old, None, None, chosen, step, hidden_size=64)[0].responses.token_ids.tolist()

    assert first_ids(1, 1) == first_ids(1, 1)
    assert first_ids(1, 1) != first_ids(1, 2)


def test_overlong_filtering_takes_truncated_responses_out_of_loss_and_denominator(config):
    chosen = config("algorithm.overlong.filter=true")
    arrays = step_arrays(make_groups(), chosen)
    assert arrays.carries_loss.reshape(6, GROUP).sum(axis=1).tolist() == [3, 4, 3, 4, 3, 4]
    old = LogProbs(log_probs=arrays.rollout_log_probs, entropy=np.abs(arrays.rollout_log_probs))
    for batch in mini_batches(arrays, old, None, None, chosen, 1, hidden_size=64):
        assert batch.weights.sum() == pytest.approx(1.0, rel=1e-5)
        assert (batch.weights == 0).any()


def test_importance_correction_compares_trainer_and_engine(config):
    chosen = config("algorithm.importance.mode=truncated", "algorithm.importance.upper=1.1")
    arrays = step_arrays(make_groups(), chosen)
    old = LogProbs(log_probs=arrays.rollout_log_probs + 0.05, entropy=np.abs(arrays.rollout_log_probs))
    for batch in mini_batches(arrays, old, None, step_correction(arrays, old, chosen), chosen, 1, hidden_size=64):
        np.testing.assert_allclose(batch.correction, np.exp(0.05), rtol=1e-5)
    old = LogProbs(log_probs=arrays.rollout_log_probs + 1.0, entropy=np.abs(arrays.rollout_log_probs))
    for batch in mini_batches(arrays, old, None, step_correction(arrays, old, chosen), chosen, 1, hidden_size=64):
        np.testing.assert_allclose(batch.correction, 1.1, rtol=1e-6)


def batches_of(chosen, groups, reference=None):
    arrays = step_arrays(groups, chosen)
    old = LogProbs(log_probs=arrays.rollout_log_probs, entropy=np.abs(arrays.rollout_log_probs))
    reference = None if reference is None else LogProbs(log_probs=old.log_probs - 1, entropy=old.entropy)
    return mini_batches(arrays, old, reference, None, chosen, 1, hidden_size=64)


def uneven_groups():
    """Two kinds of groups, so that mini-batches differ."""
    groups = make_groups()
    for at in (0, 1, 4):
        changed = [replace(each, reward_shaped=3 * each.reward_shaped) for each in groups[at].responses]
        groups[at] = replace(groups[at], responses=tuple(changed))
    return groups


def test_mini_batch_std_is_over_exactly_the_responses_of_the_mini_batch(config):
    groups = uneven_groups()
    deviations = {}
    for group in groups:
        rewards = np.array([each.reward_shaped for each in group.responses])
        for sample, value in enumerate(rewards - rewards.mean()):
            deviations[10 * group.position + sample] = value
    stds = set()
    for batch in batches_of(config("algorithm.advantage.estimator=mini_batch_std"), groups):
        starts = np.concatenate([[0], np.cumsum(batch.responses.sequence_lengths)[:-1]])
        names = batch.responses.token_ids[starts + batch.responses.prompt_lengths].tolist()
        mine = np.array([deviations[name] for name in names])
        wanted = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-6)
        got = batch.advantages[np.concatenate([[0], np.cumsum(batch.responses.response_lengths)[:-1]])]
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        stds.add(round(float(mine.std()), 4))
    assert len(stds) > 1, "all mini-batches had the same spread: the test shows nothing"


@pytest.mark.parametrize("seed", range(4))
def test_a_group_without_spread_has_no_advantage_beside_others(config, seed):
    """Its sign counts, in clip fractions and in `sapo`: exactly 0, not what rounding leaves."""
    groups, draw = make_groups(), np.random.default_rng(seed)
    for at, group in enumerate(groups):
        rewards = [0.7] * GROUP if at == 1 else draw.uniform(-1, 1, GROUP).tolist()
        changed = [replace(each, reward_shaped=value) for each, value in zip(group.responses, rewards, strict=True)]
        groups[at] = replace(group, responses=tuple(changed))
    found = 0
    for batch in batches_of(config("algorithm.advantage.estimator=mini_batch_std"), groups):
        starts = np.concatenate([[0], np.cumsum(batch.responses.sequence_lengths)[:-1]])
        names = batch.responses.token_ids[starts + batch.responses.prompt_lengths]
        got = batch.advantages[np.concatenate([[0], np.cumsum(batch.responses.response_lengths)[:-1]])]
        flat = names // 10 == groups[1].position
        assert (got[flat] == 0).all()
        found += int(flat.sum())
    assert found == GROUP


def test_mini_batches_of_a_small_step_are_equal_in_size(config):
    sizes = [len(batch.responses) // GROUP for batch in batches_of(config(), make_groups(5))]
    assert sizes == [2, 2, 1]
    chosen = config("algorithm.mini_batch_responses=16")
    assert [len(batch.responses) // GROUP for batch in batches_of(chosen, make_groups(5))] == [3, 2], "not 4 and 1"


@pytest.mark.parametrize("aggregation", ["response_mean", "response_sum"])
def test_the_classic_kl_has_an_average_of_its_own(config, aggregation):
    chosen = config("algorithm.kl.coefficient=0.1", f"algorithm.kl.aggregation={aggregation}")
    for batch in batches_of(chosen, make_groups(), reference=True):
        lengths = np.array(batch.responses.response_lengths)
        a_token = 1 / np.repeat(lengths, lengths) if aggregation == "response_mean" else 1.0
        np.testing.assert_allclose(batch.weights * batch.kl_scale, a_token / 8, rtol=1e-5)
    assert all(batch.kl_scale is None for batch in batches_of(config("algorithm.kl.coefficient=0.1"), make_groups()))


def test_only_a_loss_that_needs_them_gets_the_engines_log_probs(config):
    assert all(batch.rollout_log_probs is None for batch in batches_of(config(), make_groups()))
    for batch in batches_of(config("algorithm.policy_loss=reinforce"), make_groups()):
        np.testing.assert_array_equal(batch.rollout_log_probs, batch.old_log_probs)


def test_the_objective_is_the_configs(config):
    assert objective_of(config().algorithm) == PolicyObjective()
    chosen = config("algorithm.policy_loss=sapo", "algorithm.loss_options={negative: 2.0}").algorithm
    assert objective_of(chosen).loss == SAPO(positive=1.0, negative=2.0)
    chosen = config("algorithm.policy_loss=reinforce", "algorithm.importance.upper=3.0").algorithm
    assert objective_of(chosen).loss == Reinforce(upper=3.0)
    with pytest.raises(ConfigError, match=r"policy_loss = no_such_module:Loss, made with .*No module named"):
        objective_of(config("algorithm.policy_loss=no_such_module:Loss").algorithm)
    chosen = config(
        "algorithm.policy_loss=megatron_dapo.algorithm.losses.gspo:GSPO", "algorithm.loss_options={lo: 1.0}"
    )
    with pytest.raises(ConfigError, match=r"gspo:GSPO, made with loss_options"):
        objective_of(chosen.algorithm)


LOSSES_OF_ONES_OWN = """
class NoStats:
    def __call__(self, log_probs, columns): ...
class NotCallable:
    stat_names = ()
class NoColumns(NotCallable):
    def __call__(self, log_probs): ...
class Refuses:
    def __init__(self): raise ValueError("high must exceed low")
class NamesAgain:
    stat_names = ("outside", "entropy")
    def __call__(self, log_probs, columns): ...
"""


def test_what_is_no_policy_loss_is_refused_before_anything_starts(config, tmp_path, monkeypatch):
    (tmp_path / "losses_of_ones_own.py").write_text(LOSSES_OF_ONES_OWN)
    (tmp_path / "loss_with_a_typo.py").write_text("def (:")
    monkeypatch.syspath_prepend(tmp_path)
    for name, fault in {
        "losses_of_ones_own:NoStats": "gives no PolicyLoss",
        "losses_of_ones_own:NotCallable": "gives no PolicyLoss",
        "losses_of_ones_own:NoColumns": "too many positional arguments",
        "losses_of_ones_own:Refuses": "high must exceed low",
        "losses_of_ones_own:NamesAgain": "its statistic entropy has the name",
        "loss_with_a_typo:Loss": "invalid syntax",
        "math:pi": "has no function or class pi",
    }.items():
        with pytest.raises(ConfigError, match=rf"policy_loss = {name}, made with .*{fault}"):
            objective_of(config(f"algorithm.policy_loss={name}").algorithm)


ADVANTAGES_OF_ONES_OWN = """
import torch
def by_length(rewards, lengths): return rewards / lengths
def flat(rewards, lengths): return rewards.flatten()
def listed(rewards, lengths): return rewards.tolist()
def not_a_number(rewards, lengths): return rewards / 0
"""


def test_an_advantage_of_ones_own_gets_whole_groups_and_must_give_a_number_a_response(config, tmp_path, monkeypatch):
    (tmp_path / "advantages_of_ones_own.py").write_text(ADVANTAGES_OF_ONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    groups = make_groups()

    def arrays_by(name):
        return step_arrays(groups, config(f"algorithm.advantage.estimator=advantages_of_ones_own:{name}"))

    wanted = [each.reward_shaped / len(each.generation.token_ids) for group in groups for each in group.responses]
    assert arrays_by("by_length").advantages == pytest.approx(wanted, rel=1e-6)
    for name in ("flat", "listed", "not_a_number"):
        with pytest.raises(ConfigError, match=rf"ones_own:{name}: must give finite numbers \[{len(groups)}, "):
            arrays_by(name)
    with pytest.raises(ConfigError, match="has no function or class absent"):
        arrays_by("absent")


def test_the_configs_names_are_the_functions_estimators():
    assert get_args(Estimator) == ESTIMATORS


def test_carrying_comes_with_its_correction(config):
    groups = make_groups()
    for overrides, corrected in (((), False), (("algorithm.dynamic_sampling.max_staleness=1",), True)):
        chosen = config(*overrides)
        arrays = step_arrays(groups, chosen)
        old = LogProbs(log_probs=arrays.rollout_log_probs, entropy=np.abs(arrays.rollout_log_probs))
        assert (step_correction(arrays, old, chosen) is not None) == corrected
