"""The gate on the gap between engine and trainer: nothing, or the end of the run."""

import numpy as np
import pytest

from megatron_dapo.actor.step_data import LogProbs
from megatron_dapo.config.run_config import MonitorConfig
from megatron_dapo.coordinator.batch import Gap, MismatchStop, StepArrays, check_mismatch
from megatron_dapo.coordinator.step_metrics import _mismatch_metrics

LIMITS = MonitorConfig(mismatch_warn=0.1, mismatch_stop=0.5)


def gate(gaps: list[float], versions: list[int]) -> Gap:
    """The trainer's log-probs are those of the engine plus `gaps`; the trainer holds version 3."""
    engine = np.linspace(-2, -0.1, len(gaps)).astype(np.float32)
    trainer = (engine + np.array(gaps)).astype(np.float32)
    arrays = StepArrays(
        responses=None,
        rollout_log_probs=engine,
        weight_versions=np.array(versions, np.int32),
        advantages=np.zeros(1, np.float32),
        carries_loss=np.ones(1, bool),
    )
    old = LogProbs(log_probs=trainer, entropy=np.zeros(len(gaps), np.float32))
    return check_mismatch(old, arrays, 3, LIMITS)


def test_a_small_gap_is_only_measured():
    gap = gate([0.1, -0.05, 0.0], [3, 3, 3])
    assert gap.current.mean_abs == pytest.approx(0.05, abs=1e-6)
    assert gap.current.max_abs == pytest.approx(0.1, abs=1e-6)
    assert gap.stale_share == 0


@pytest.mark.parametrize("gaps", [[0.6, -0.6, 0.6], [0.0, 0.0, float("nan")]], ids=["large", "not a number"])
def test_above_the_second_it_stops(gaps):
    with pytest.raises(MismatchStop, match=r"monitor\.mismatch_stop = 0\.5"):
        gate(gaps, [3, 3, 3])


def test_tokens_of_older_weights_do_not_count():
    gap = gate([0.0, 0.0, 5.0, -5.0], [3, 3, 2, 1])
    assert gap.stale.mean_abs == pytest.approx(5.0, abs=1e-5)
    assert gap.stale_share == 0.5


def test_where_all_tokens_are_older_the_gate_is_not_blind():
    with pytest.raises(MismatchStop, match=r"of tokens that older weights wrote is 0\.6"):
        gate([0.6, -0.6], [2, 2])
    with pytest.raises(MismatchStop):
        gate([0.0, float("nan")], [2, 1])
    gap = gate([0.3, -0.3], [2, 2])
    assert gap.stale_share == 1
    assert _mismatch_metrics(gap) == {}, "nothing was compared at equal weights"
    assert _mismatch_metrics(gate([0.0, 0.3], [3, 2]))["mismatch/max_abs"] == 0
