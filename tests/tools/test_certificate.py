"""The certificate: which layouts and which mini-batch it takes, that it passes here, and that it finds a wrong one."""

import dataclasses
import math
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.step_data import LogProbs
from megatron_dapo.algorithm.token_loss import TokenLoss, importance_ratio
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.actor_config import LayoutConfig
from tests.actor.gloo import shared_pool
from tests.actor.tiny import MIXTURE, save_tiny
from tests.processes import ROOT, Running
from tools import certificate as run
from tools.actor_job import packing
from tools.certificate import (
    Difference,
    choose_layouts,
    fitting_layouts,
    kinds,
    label,
    random_mini_batches,
    random_responses,
    relative_error,
)
from tools.certify import Limits, certify

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"
HF = HFModelConfig.load(ROOT / "examples" / "quickstart" / "base")
KINDS = {"TP", "SP", "PP", "VPP", "CP", "DP"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("moe"), MIXTURE, tied=False)


def test_layouts_fit_the_model_and_the_processes():
    """4 layers, 2 key-value heads: no tensor size but 2, no stage count but 2 and 4."""
    layouts = fitting_layouts(HF, 4)
    assert len(set(layouts)) == len(layouts)
    assert max(layout.world_size for layout in layouts) == 4
    assert {layout.tensor for layout in layouts} == {1, 2}
    assert {(layout.pipeline, layout.virtual_pipeline) for layout in layouts} == {
        (1, None),
        (2, None),
        (2, 2),
        (4, None),
    }
    assert LayoutConfig(context=3) in layouts
    assert {one for one in fitting_layouts(HF, 64) if one.world_size <= 4} == set(layouts), "at once on many cores too"
    assert [label(layout) for layout in fitting_layouts(HF, 1)] == ["one process"]
    assert label(LayoutConfig(tensor=2, sequence_parallel=True, pipeline=2, virtual_pipeline=2)) == "TP2+SP PP2 VPP2"


def test_layouts_of_experts(experts):
    """No tensor parallelism without sequence parallelism, and no split of experts alone with expert parallelism off."""
    layouts = fitting_layouts(HFModelConfig.load(experts), 4)
    assert len(set(layouts)) == len(layouts)
    assert all(layout.sequence_parallel for layout in layouts if layout.tensor > 1)
    assert all(layout.expert_tensor == layout.tensor for layout in layouts if layout.expert == 1)
    assert {(layout.expert, layout.expert_tensor) for layout in layouts} == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}
    chosen = choose_layouts(layouts, 6, seed=0, always=LayoutConfig())
    assert set().union(*map(kinds, chosen)) == KINDS | {"EP", "ETP"}
    assert label(LayoutConfig(data=4, expert=2, expert_tensor=2)) == "DP4 EP2 ETP2"


@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_few_layouts_have_every_kind_of_parallelism(processes, seed):
    candidates, own = fitting_layouts(HF, processes), LayoutConfig(data=2)
    chosen = choose_layouts(candidates, 6, seed=seed, always=own)
    assert chosen[:2] == [LayoutConfig(), own]
    assert len(set(chosen)) == 6
    assert set().union(*map(kinds, chosen)) == KINDS
    assert chosen == choose_layouts(candidates, 6, seed=seed, always=own)


def sampled(responses, current, *overrides):
    config = load_config(CONFIG, ["run.seed=3", f"model.path={ROOT}/examples/quickstart/base", *overrides])
    plan = packing(config, responses)
    return random_mini_batches(config, responses, current, plan, plan)["token_mean"]


def test_the_mini_batch_is_ragged_and_meets_both_clips():
    responses = random_responses(count=16, longest=100, vocabulary=50, seed=3)
    lengths = responses.response_lengths
    assert lengths.min() == 1
    assert responses.sequence_lengths.max() == 100
    assert len(set(lengths.tolist())) > 8
    current = LogProbs(
        log_probs=np.full(lengths.sum(), -2, dtype=np.float32), entropy=np.zeros(lengths.sum(), dtype=np.float32)
    )
    sample = sampled(responses, current)
    ratio = np.exp(current.log_probs.astype(float) - sample.old_log_probs)
    advantages = sample.advantages
    assert ((ratio < 0.8) & (advantages < 0)).sum() > 5
    assert ((ratio > 1.28) & (advantages > 0)).sum() > 5
    for bound in (0.8, 1.28):
        assert np.abs(np.log(ratio / bound)).min() > 9e-4
    masked = np.repeat(np.arange(16), lengths)[sample.weights == 0]
    assert set(masked) == {8}
    assert np.array_equal(sampled(responses, current).old_log_probs, sample.old_log_probs)
    full = sampled(responses, current, "algorithm.kl.coefficient=0.1", "algorithm.importance.mode=truncated")
    assert full.columns.keys() == sample.columns.keys() | {"reference_log_probs", "correction"}


def test_what_is_not_a_number_is_not_within_the_bounds():
    one, zero = torch.ones(3), torch.zeros(3)
    assert relative_error(one * 1.5, one) == 0.5
    assert relative_error(zero, zero) == 0
    assert math.isinf(relative_error(one, zero))
    assert math.isnan(relative_error(one * math.nan, one))
    for dtype in ("float32", "bfloat16"):
        assert Limits(dtype, loss=0.5, gradient=0.5).hold("token_mean", difference(loss=0.5, gradient=0.5, worst=0.5))
        for name in ("loss", "gradient", "worst"):
            for value in (math.nan, math.inf) if name == "gradient" else (math.nan,):
                found = difference(**{"loss": 0.5, "gradient": 0.5, "worst": 0.5, name: value})
                assert not Limits(dtype, loss=0.5, gradient=0.5).hold("token_mean", found)


def difference(*, loss: float = 0.01, gradient: float, worst: float) -> Difference:
    return Difference(loss=loss, gradient=gradient, worst=worst, parameter="")


def test_in_bfloat16_a_layout_may_be_as_far_as_two_draws_of_rounding_and_no_further():
    """What rounding does to the model is measured by one process, which comes first."""
    limits = Limits("bfloat16", loss=0.02, gradient=0.4)
    assert limits.hold("token_mean", difference(gradient=0.1, worst=9.0))
    assert limits.hold("token_mean", difference(gradient=0.24, worst=9.0))
    assert not limits.hold("token_mean", difference(gradient=0.26, worst=0.1))
    assert not limits.hold("token_mean", difference(gradient=0.1, worst=0.1, loss=0.03))
    assert not Limits("bfloat16", loss=0.02, gradient=0.4).hold("token_mean", difference(gradient=0.41, worst=0.1))


def test_in_float32_each_parameter_counts():
    limits = Limits("float32", loss=0.02, gradient=0.4)
    assert limits.hold("token_mean", difference(gradient=0.1, worst=0.4))
    assert limits.hold("token_mean", difference(gradient=0.3, worst=0.4))
    assert not limits.hold("token_mean", difference(gradient=0.1, worst=0.41))


def rows(output: str) -> list[str]:
    return re.findall(r"^.* (?:ok|FAIL) .*$", output, flags=re.MULTILINE)


AGGREGATIONS = ("token_mean", "prompt_token_mean", "sequence_mean", "sequence_sum_constant", "verl_legacy")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_certifies_the_quickstart(tmp_path, dtype):
    arguments = (str(CONFIG), "--layouts", "3", "--responses", "8", "--processes", "2", "--dtype", dtype)
    finished = Running(*arguments, module="tools.certify", log=tmp_path / "out.txt").finish(240)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    assert len(rows(finished.output)) == 3 * 5
    assert "FAIL" not in finished.output
    for name in AGGREGATIONS:
        assert finished.output.count(f" {name} ") == 3


def test_a_deadline_that_passes_ends_the_command_and_its_processes(tmp_path):
    arguments = (str(CONFIG), "--deadline", "1")
    finished = Running(*arguments, module="tools.certify", log=tmp_path / "out.txt").finish(60)
    assert finished.code == ExitCode.STALLED, finished.output
    assert "ranks [0] gave no result within 1 s" in finished.output
    assert "Traceback" not in finished.output
    assert finished.left_behind == ()


@pytest.fixture(autouse=True)
def shared_ranks(monkeypatch) -> None:
    """What certifies in this process starts no ranks of its own."""
    monkeypatch.setattr(run, "RankPool", lambda _: nullcontext(shared_pool()))


def exit_code(*overrides: str) -> int:
    with pytest.raises(typer.Exit) as ended:
        certify(CONFIG, list(overrides), processes=2, layouts=2, responses=8, longest=64, deadline=120)
    return ended.value.exit_code


def test_the_quickstart_is_certified(capsys):
    code = exit_code()
    output = capsys.readouterr().out
    assert code == ExitCode.FINISHED, output
    assert len(rows(output)) == 2 * 5
    for name in AGGREGATIONS:
        assert output.count(f" {name} ") == 2


@pytest.mark.parametrize("replay", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_a_mixture_of_experts_is_certified(experts, capsys, replay):
    """Under routing replay with experts that no router would choose."""
    layout = ("actor.layout.tensor=1", "actor.layout.data=2", "actor.layout.expert=2", f"actor.routing_replay={replay}")
    code = exit_code(f"model.path={experts}", *layout)
    output = capsys.readouterr().out
    assert code == ExitCode.FINISHED, output
    assert len([row for row in rows(output) if row.startswith("DP2 EP2 ")]) == 5


@pytest.mark.slow
def test_the_quickstarts_experts_are_certified_by_the_command_alone(capsys):
    config = CONFIG.with_name("experts.yaml")
    with pytest.raises(typer.Exit) as ended:
        certify(config, [], processes=2, layouts=8, responses=16, longest=128, deadline=300)
    assert ended.value.exit_code == ExitCode.FINISHED, capsys.readouterr().out


def test_a_wrong_weight_of_one_token_in_one_layout_is_found(monkeypatch, capsys):
    """One of about 150 response tokens weighs 5% more, under one aggregation, on the tensor-parallel ranks."""
    honest = run.layout_cases

    def layout_cases(config, mini_batches, layout, **options):
        cases = honest(config, mini_batches, layout, **options)
        if layout.tensor == 2:
            weights = cases[2].mini_batch.weights.copy()
            weights[len(weights) // 3] *= 1.05
            cases[2] = dataclasses.replace(
                cases[2], mini_batch=dataclasses.replace(cases[2].mini_batch, weights=weights)
            )
        return cases

    monkeypatch.setattr(run, "layout_cases", layout_cases)
    assert exit_code("actor.layout.tensor=2", "actor.layout.data=1") == ExitCode.INEXACT
    output = capsys.readouterr().out
    wrong = [row for row in rows(output) if "FAIL" in row]
    assert len(rows(output)) == 10
    assert len(wrong) == 1, output
    assert wrong[0].startswith("TP2 ")
    assert "sequence_mean" in wrong[0]


@dataclasses.dataclass(frozen=True)
class OwnObjective:
    """Weighs tokens by the ratio and clips nothing; it has none of the policy objective's fields."""

    stat_names = ()
    uses_entropy_gradient = False

    def __call__(self, log_probs, entropy, columns):
        weight = importance_ratio(log_probs, columns.old_log_probs).detach()
        return TokenLoss(loss=-weight * columns.advantages * log_probs, stats={})


compare_policy = run.compare


def compare_own(*arguments):
    """What a rank runs; `objective_of` of its own process gives the objective above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "objective_of", lambda _: OwnObjective())
        return compare_policy(*arguments)


def test_an_objective_of_ones_own_is_certified(monkeypatch, capsys):
    monkeypatch.setattr(run, "objective_of", lambda _: OwnObjective())
    monkeypatch.setattr(run, "compare", compare_own)
    assert exit_code() == ExitCode.FINISHED
    assert len(rows(capsys.readouterr().out)) == 10


def test_a_config_that_cannot_be_certified_here_says_why():
    with pytest.raises(
        ConfigError, match=r"actor\.layout\.tensor = 3: must divide the model's num_key_value_heads = 2"
    ):
        exit_code("actor.layout.tensor=3")
