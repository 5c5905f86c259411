"""Admitted groups -> arrays: what belongs together stays together, and law 1's weights cover the whole mini-batch."""

import numpy as np
import pytest

from megatron_dapo.actor.step_data import LogProbs
from megatron_dapo.config import load_config
from megatron_dapo.coordinator.batch import mini_batches, step_arrays, step_correction
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
