"""What a step writes down, and how a trainer that does not answer is told apart."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.cluster.trainer import Trainer, TrainerStalled
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config.monitor_config import MonitorConfig
from megatron_dapo.coordinator import step_metrics
from megatron_dapo.monitor.health import HealthLimits, HealthMonitor
from megatron_dapo.monitor.writer import MetricsWriter


@pytest.mark.parametrize(("gap", "alarms"), [(0.2, []), (0.4, ["alarm: mismatch:"]), (2.0, ["alarm: mismatch_stop:"])])
def test_an_alarm_is_noted_at_the_step_that_raises_it(monkeypatch, tmp_path, gap, alarms):
    noted: list[str] = []
    monkeypatch.setattr(
        step_metrics, "step_metrics", lambda *_: {"rollout_step": 1, "optimizer_step": 4, "mismatch/mean_abs": gap}
    )
    monkeypatch.setattr(step_metrics, "write_samples", lambda *_: None)
    writer = MetricsWriter(tmp_path, tensorboard=False)
    context = SimpleNamespace(
        config=SimpleNamespace(monitor=MonitorConfig()),
        writer=writer,
        health=HealthMonitor(limits=HealthLimits(mismatch_warn=0.3, mismatch_stop=0.5)),
        run_dir=SimpleNamespace(path=tmp_path),
        console=SimpleNamespace(note=noted.append),
        inputs=SimpleNamespace(prompts=SimpleNamespace(prompts=[])),
    )
    step_metrics.write_records(context, record=SimpleNamespace())
    writer.close()
    assert [" ".join(line.split()[:2]) for line in noted] == alarms


def test_ranks_that_do_not_answer_in_time_are_told_apart_from_other_stalls():
    async def test():
        trainer = Trainer(None, None, Path(), Waits(), use_gpu=False)
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TrainerStalled, match=r"trainer update: 1 trainer rank\(s\) gave no answer within 0.05 s"):
            await trainer._ask("trainer update", 0.05, [never])

    asyncio.run(test())
