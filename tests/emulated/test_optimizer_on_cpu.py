"""`actor.optimizer.on_cpu` over the strict group, on tensors of the emulated device, against the optimizer there."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import OffloadConfig
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.model.test_routing_replay import foreign
from tests.actor.tiny import MIXTURE, save_tiny
from tests.emulated.test_strict_actor import (
    DISTRIBUTED,
    NONE_OF,
    OPTIMIZER,
    chosen_as_on_cuda,
    exported,
    run_layout,
)
from tools.rank_pool import RankPlace

IN_BFLOAT16 = DISTRIBUTED | {"dtype": "bfloat16"}
ON_CPU = IN_BFLOAT16 | {"optimizer": {"on_cpu": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def assert_equal(found: Any, wanted: Any) -> None:
    """Bit for bit: both are PyTorch's kernel, of the same numbers."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert_equal(found[name], wanted[name])
    else:
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        pytest.param({"data": 2}, {}, id="data"),
        pytest.param(
            {"data": 2}, {"offload": OffloadConfig(between_phases="all")}, id="offloaded", marks=pytest.mark.slow
        ),
        pytest.param({"tensor": 2, "sequence_parallel": True}, {}, id="tensor", marks=pytest.mark.slow),
        pytest.param({"data": 2, "pipeline": 2, "virtual_pipeline": 2}, {}, id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_an_actor_lives_as_with_its_step_on_the_device(strict, layout, fields, model, data, tmp_path):
    """Updates, what is offloaded, a checkpoint in the background, a resume, the weights that are sent and exported."""
    wanted = run_layout(strict, layout, fields | IN_BFLOAT16, model, data, tmp_path / "there")
    found = run_layout(strict, layout, fields | ON_CPU, model, data, tmp_path / "here")
    assert_equal(found, wanted)
    assert_equal(found["third update again"], found["third update"])
    there, here = exported(tmp_path / "there"), exported(tmp_path / "here")
    assert_equal(*({name: tensor.float() for name, tensor in each.items()} for each in (here, there)))


@pytest.mark.slow
def test_experts_have_a_step_of_their_own_there(strict, tmp_path):
    model = save_tiny(tmp_path / "model", MIXTURE, tied=False, num_hidden_layers=2)
    told = columns(model)
    told = dataclasses.replace(told, responses=dataclasses.replace(told.responses, routing=foreign(told.responses)))
    both = []
    for name, fields in (("there", IN_BFLOAT16), ("here", ON_CPU)):
        layout = {"data": 2, "expert": 2}
        both.append(run_layout(strict, layout, {"routing_replay": True} | fields, model, told, tmp_path / name))
    assert_equal(*both)


Reports = list[tuple[float, float, float]]


def steps(place: RankPlace, folder: Path, data: Columns, layout: dict[str, Any], on_cpu: bool, **files: Path):
    """(loss, norm, rate) of two updates, after `load` and before `save`; of two more after that; and of two after a
    reset of the moments. With the bytes of the optimizer on each side."""
    with chosen_as_on_cuda():
        optimizer = OPTIMIZER | {"distributed": True, "on_cpu": on_cpu, "warmup_rollout_steps": 20}
        actor = start_actor(place, folder, actor_config(layout, optimizer=optimizer), dtype="bfloat16")
        batch = mini_batch(data, actor.config, without=NONE_OF)
        if "load" in files:
            actor.load_checkpoint(files["load"])
        elif "first" in files:
            actor.save_checkpoint(files["first"])

        def update() -> Reports:
            made = actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)
            return [(report.loss, report.grad_norm, report.lr) for report in made]

        found = [update()]
        if "save" in files:
            actor.save_checkpoint(files["save"])
        found.append(update())
        actor.optimizer.reset()
        found.append(update())
        actor.memory.offload("optimizer")
        sides = {"cuda": 0, "cpu": 0, "taken to the host": sum(map(len, actor.memory._host["optimizer"].values()))}
        for inner in actor.optimizer._inner:
            for state in inner.optimizer.state.values():
                for value in state.values():
                    sides[value.device.type] += value.nbytes
        actor.close()
        return found, sides


def on_rank(place: RankPlace, *args: Any) -> Any:
    *given, files = args
    return steps(place, *given, **files)


@pytest.fixture(scope="module")
def without_break(strict, model, data, tmp_path_factory) -> tuple[dict[bool, list[Reports]], Path]:
    """On either side, and the folder of what they wrote before the first step and after two: "first-True", "two-True"
    on the CPU."""
    out, found = tmp_path_factory.mktemp("written"), {}
    for on_cpu in (True, False):
        files = {"first": out / f"first-{on_cpu}", "save": out / f"two-{on_cpu}"}
        (found[on_cpu], sides), _ = strict(2, on_rank, model, data, {"data": 2}, on_cpu, files)
        assert (sides["cuda"] == 0) == on_cpu
        assert (sides["cpu"] == 0) != on_cpu
        assert (sides["taken to the host"] == 0) == on_cpu
    return found, out


@pytest.mark.slow
def test_steps_before_and_after_a_reset_are_those_of_the_device(without_break):
    found, _ = without_break
    assert found[True] == found[False]
    assert found[True][2] != found[True][1], "a reset does something"


@pytest.mark.slow
@pytest.mark.parametrize("written_on_cpu", [True, False])
def test_a_checkpoint_goes_on_on_the_other_side(strict, written_on_cpu, without_break, model, data):
    found, out = without_break
    for at, name in enumerate(("first", "two")):
        source = {"load": out / f"{name}-{written_on_cpu}"}
        results = strict(2, on_rank, model, data, {"data": 2}, not written_on_cpu, source)
        assert results[0][0][0] == found[True][at], name


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_layout(strict, without_break, model, data):
    """Rounding of bfloat16 differs between layouts."""
    found, out = without_break
    [(resumed, _)] = strict(1, on_rank, model, data, {}, True, {"load": out / "two-True"})
    np.testing.assert_allclose(resumed[0], found[True][1], rtol=0.03)
