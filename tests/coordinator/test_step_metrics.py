"""Metrics of what dynamic sampling saw."""

from megatron_dapo.coordinator.messages import Admission
from megatron_dapo.coordinator.step_metrics import _sampling_metrics
from tests.coordinator.test_sampler import GROUP, group


def admission(kept, filtered=()):
    return Admission(
        kept=tuple(kept),
        filtered=tuple(filtered),
        carried=0,
        carried_tokens=0,
        in_flight=0,
        expired=0,
        expired_tokens=0,
        generated=(*kept, *filtered),
        pass_rate=0.5,
        predicted_groups=4,
        limit_reached=False,
    )


def test_useless_groups_are_counted_whether_they_are_filtered_or_trained_on():
    useful, right, wrong = group(0, 2, 5), group(1, GROUP, 5), group(2, 0, 5)
    names = ("sampling/kept", "sampling/all_correct", "sampling/all_wrong", "sampling/pass_rate")
    for seen in (admission([useful], [right, wrong]), admission([useful, right, wrong])):
        metrics = _sampling_metrics(seen, wanted=3)
        assert [metrics[name] for name in names] == [1, 1, 1, 1 / 3]
