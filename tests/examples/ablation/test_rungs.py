"""Which config each rung gives, as the product's own strict loader reads it."""

import itertools
from pathlib import Path

import pytest

from examples.ablation.rungs import (
    AGAINST_PAPER,
    LADDER,
    LADDER_STEPS,
    PRESETS,
    RUNGS,
    SWITCHED_OFF,
    SWITCHED_ON,
    Place,
    Switch,
    plan,
)
from examples.ablation.verdicts import CLAIMS
from megatron_dapo.config import Config
from megatron_dapo.config.load import differences, flatten_config

OUT = Place(folder=Path("somewhere"))


def config(rung: str, seed: int = 0) -> Config:
    (run,) = plan(OUT, [rung], [seed])
    return run.config()


def techniques(rung: str) -> dict[str, bool]:
    """Read from the loaded config, not from the switches."""
    algorithm = config(rung).algorithm
    return {
        "filter": algorithm.overlong.filter,
        "clip": algorithm.clip.high == 0.28,
        "soft": algorithm.overlong.shape == "soft",
        "token": algorithm.aggregation == "token_mean",
        "dynamic": algorithm.dynamic_sampling.filter == "refill",
    }


@pytest.mark.parametrize(
    ("rung", "on"),
    [
        ("naive", set()),
        ("filter", {"filter"}),
        ("clip", {"filter", "clip"}),
        ("soft", {"clip", "soft"}),
        ("token", {"clip", "soft", "token"}),
        ("full", {"clip", "soft", "token", "dynamic"}),
        ("only-clip", {"clip"}),
        ("only-soft", {"soft"}),
        ("only-token", {"token"}),
        ("only-dynamic", {"dynamic"}),
        ("no-clip", {"soft", "token", "dynamic"}),
        ("no-soft", {"clip", "token", "dynamic"}),
        ("no-token", {"clip", "soft", "dynamic"}),
        ("filtered", {"clip", "filter", "token", "dynamic"}),
    ],
)
def test_a_rung_is_what_its_name_says(rung: str, on: set[str]) -> None:
    assert {name for name, present in techniques(rung).items() if present} == on


def test_every_rung_is_tested_above_and_none_is_there_twice() -> None:
    assert len(RUNGS) == 14 + len(PRESETS)
    assert len({rung.overrides for rung in RUNGS.values()}) == len(RUNGS)


def test_naive_is_grpo_and_full_is_the_papers_algorithm() -> None:
    naive, full = config("naive").algorithm, config("full").algorithm
    assert (naive.clip.low, naive.clip.high, naive.aggregation) == (0.2, 0.2, "sequence_mean")
    assert naive.overlong.shape == "none"
    assert naive.kl.coefficient == full.kl.coefficient == 0
    assert (full.clip.low, full.clip.high, full.aggregation) == (0.2, 0.28, "token_mean")
    assert full.mini_batches_per_step == 16, "section 4.1"


def test_rungs_differ_in_the_algorithm_alone() -> None:
    naive = flatten_config(config("naive"))
    for rung in RUNGS:
        keys = set(differences(naive, flatten_config(config(rung))))
        beyond = {key for key in keys if not key.startswith("algorithm.")}
        own = {"cispo": {"actor.optimizer.eps", "model.fp32_head"}, "scalerl": {"model.fp32_head"}}.get(rung, set())
        assert beyond <= {"run.dir", "evaluation.forbidden_start", *own}, rung


def test_presets_set_all_of_the_algorithm_but_the_sizes_of_the_task() -> None:
    """What `presets.yaml` set itself, no preset could."""
    paper = config("paper")
    assert (paper.algorithm.aggregation, paper.algorithm.dynamic_sampling.filter) == ("token_mean", "refill")
    assert [config(rung.name).algorithm.policy_loss for rung in PRESETS] == [
        *("clipped", "clipped", "cispo", "gspo", "reinforce")
    ]
    assert config("dr_grpo").algorithm.advantage.estimator == "no_std"
    assert config("scalerl").algorithm.dynamic_sampling.filter == "drop"
    sizes = ("prompts_per_step", "group_size", "mini_batch_responses")
    assert all(getattr(config(name).algorithm, key) == getattr(paper.algorithm, key) for name in RUNGS for key in sizes)


def test_seeds_differ_in_seed_base_and_folder_alone() -> None:
    keys = set(differences(*(flatten_config(config("full", seed)) for seed in (0, 3))))
    assert keys == {"run.seed", "run.dir", "model.path"}


def test_each_step_of_the_ladder_adds_one_technique_and_soft_takes_the_filters_place() -> None:
    for below, above in itertools.pairwise(LADDER):
        taken = {Switch.FILTER} if above.name == "soft" else set()
        assert len(above.on - below.on) == 1
        assert below.on - above.on == taken


@pytest.mark.parametrize("comparison", [*SWITCHED_ON, *SWITCHED_OFF], ids=lambda c: f"{c.one}-{c.other}")
def test_on_alone_and_off_alone_change_one_technique(comparison) -> None:
    one, other = RUNGS[comparison.one].on, RUNGS[comparison.other].on
    assert len(other - one) == 1
    assert one - other <= ({Switch.FILTER} if comparison.one == "filtered" else set())


def test_every_comparison_and_claim_is_about_rungs_that_are_run() -> None:
    for item in (*LADDER_STEPS, *SWITCHED_ON, *SWITCHED_OFF, *AGAINST_PAPER, *CLAIMS):
        assert {item.one, item.other} <= RUNGS.keys()


def test_the_plan_goes_seed_by_seed() -> None:
    runs = plan(OUT, ["full", "naive"], [2, 0])
    assert [(run.seed, run.rung.name) for run in runs] == [(2, "naive"), (2, "full"), (0, "naive"), (0, "full")]


def test_steps_and_overrides_reach_every_run() -> None:
    for run in plan(OUT, list(RUNGS), [1], steps=7, more=["actor.layout.tensor=2"]):
        assert run.config().run.rollout_steps == 7
        assert run.config().actor.layout.tensor == 2


def test_unknown_rungs_and_overrides_that_undo_a_rung_are_refused() -> None:
    with pytest.raises(ValueError, match="no such rung: fulll; there are naive, filter"):
        plan(OUT, ["fulll"], [0])
    with pytest.raises(ValueError, match=r"algorithm\.clip\.high=0\.3: this key is what the rungs differ in"):
        plan(OUT, ["full"], [0], more=["algorithm.clip.high=0.3"])
    with pytest.raises(ValueError, match="preset=paper: this key is what the rungs differ in"):
        plan(OUT, ["gspo"], [0], more=["preset=paper"])
