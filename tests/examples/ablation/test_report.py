"""The report says what the figures say, and never more."""

import json

import pytest

from examples.ablation.curves import CHARTS, series
from examples.ablation.paired import paired
from examples.ablation.report import rung_rows, said, spoken_difference, write_report
from examples.ablation.results import (
    MEASURES,
    SAMPLED,
    USELESS_SHARE,
    Outcome,
    accuracy_at,
    read_outcomes,
    useless_share,
    weighted,
)
from examples.ablation.runs import FAILURE
from examples.ablation.verdicts import NOISE, UNSURE, claims, compare, verdict
from tests.examples.ablation.folders import begin, finish, planned

SEEDS = [0, 1, 2, 3, 4]
WOBBLE = (0.0, 0.011, -0.006, 0.004, -0.009)


@pytest.fixture
def outcomes(tmp_path) -> list[Outcome]:
    """Dynamic sampling gains 15 points on every seed, the filter 1 now and then, and `token` failed at seed 4."""
    runs = planned(tmp_path, ["naive", "filter", "token", "full"], SEEDS)
    gains = {"naive": 0.0, "filter": 0.01, "token": 0.05, "full": 0.20}
    for run in runs:
        wobble = WOBBLE[(run.seed + len(run.rung.name)) % 5]
        if (run.rung.name, run.seed) == ("token", 4):
            begin(run)
            (run.folder / FAILURE).write_text(json.dumps({"exit_code": 3, "error": "Diverged: loss is nan\nmore"}))
        else:
            tokens = 2000 if run.rung.name == "full" else 1000
            finish(run, sampled=0.3 + gains[run.rung.name] + wobble, tokens=tokens)
    return read_outcomes(runs)


def test_what_is_large_shows_and_what_is_small_does_not(outcomes) -> None:
    ladder = {row.what: row for row in compare(outcomes)["ladder"]}
    assert ladder["dynamic sampling"].verdict == "gains"
    assert ladder["dynamic sampling"].difference.n == 4, "the seed whose `token` failed is no pair"
    assert ladder["all of it"].difference.mean == pytest.approx(0.2, abs=0.01)
    assert ladder["overlong filtering"].verdict == NOISE
    assert ladder["clip-higher"].verdict == "not run"


def test_a_difference_that_only_its_own_interval_shows_is_not_called_a_gain() -> None:
    found = paired([0.01, 0.02, 0.03, 0.04, 0.05])
    assert found.p == pytest.approx(0.0132, abs=1e-4)
    assert verdict(found, found.p, words=("gains", "loses")) == "gains"
    assert verdict(found, 6 * found.p, words=("gains", "loses")) == UNSURE
    assert verdict(found, found.p, sign=-1, words=("shows", "shows the opposite")) == "shows the opposite"
    assert verdict(paired([0.3]), None, words=("gains", "loses")) == "one seed: no interval"


def test_equal_tokens_are_compared_where_the_thriftier_run_ends(outcomes) -> None:
    row = next(row for row in compare(outcomes)["ladder"] if row.what == "dynamic sampling")
    assert row.equal_tokens.mean < 0, "the same rollout accuracy by step costs `full` twice the tokens here"


def test_accuracy_at_a_budget_by_hand() -> None:
    lines = [
        {"accuracy/mean": value, "sampling/generated": 10, "tokens/generated": 100} for value in (0.1, 0.2, 0.4, 0.5)
    ]
    assert accuracy_at(lines, 400) == pytest.approx(0.45), "of tokens 267 to 400"
    assert accuracy_at(lines, 300) == pytest.approx(0.4)
    assert accuracy_at(lines, 100) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="400 tokens were generated, 401"):
        accuracy_at(lines, 401)


def test_means_weigh_steps_by_their_size() -> None:
    lines = [{"accuracy/mean": 0.0, "sampling/generated": 30}, {"accuracy/mean": 1.0, "sampling/generated": 10}]
    assert weighted(lines, "accuracy/mean", "sampling/generated") == pytest.approx(0.25)


def test_useless_groups_are_counted_also_where_they_are_trained_on(outcomes) -> None:
    """The ledger of each step: 3 of 8 right and 0 of 8 trained, 8 of 8 filtered, one group carried."""
    for outcome in outcomes:
        if not outcome.failure:
            assert useless_share(outcome, outcome.lines) == pytest.approx(2 / 3)
    text = {row[0].split(":")[0]: row for row in rung_rows(outcomes)}
    assert text["naive"][2 + MEASURES.index(USELESS_SHARE)] == "66.7 ±0.0"


def test_an_effect_in_the_papers_direction_shows(tmp_path) -> None:
    runs = planned(tmp_path, ["filter", "clip"], SEEDS)
    for run in runs:
        finish(run, sampled=0.3, entropy=(0.2 if run.rung.name == "clip" else 0.1) + 0.1 * WOBBLE[run.seed])
    shown = {item.what: item.verdict for item in claims(read_outcomes(runs))}
    assert shown["clip-higher keeps entropy up"] == "shows"
    assert shown["token-level loss holds entropy down"] == "not run"


def test_page_and_markdown_hold_the_same_verdicts(outcomes, tmp_path) -> None:
    html, markdown, picture = write_report(tmp_path, outcomes)
    page, text = html.read_text(), markdown.read_text()
    gain = spoken_difference(compare(outcomes)["ladder"][4].difference, SAMPLED)
    assert gain.startswith("+1")
    for shown in (page, text):
        assert "token, seed 4: Diverged: loss is nan" in shown
        assert gain in shown
        assert "inside the noise" in shown
    assert page.count("<svg") == 18, "six charts of three sets"
    assert "<script" not in page
    assert "src=" not in page
    assert picture.stat().st_size > 20_000
    assert "| overlong filtering | naive → filter | 5 |" in text


def test_presets_alone_are_drawn_and_nothing_that_was_not_run(tmp_path) -> None:
    runs = planned(tmp_path, ["paper", "gspo"], SEEDS)
    for run in runs:
        finish(run, sampled=0.3 + 0.1 * (run.rung.name == "gspo") + 0.01 * WOBBLE[run.seed])
    html, markdown, picture = write_report(tmp_path, read_outcomes(runs))
    assert html.read_text().count("<svg") == 6, "one set"
    assert "paper → gspo" in markdown.read_text()
    for absent in ("naive", "The paper's other effects", "switched off"):
        assert absent not in markdown.read_text()
    assert picture.stat().st_size > 60_000, "an empty one has less"


def test_a_curve_is_the_mean_over_seeds_with_the_lowest_and_the_highest(tmp_path) -> None:
    runs = planned(tmp_path, ["naive"], [0, 1, 2])
    for run, entropy in zip(runs, (0.1, 0.2, 0.6), strict=True):
        finish(run, sampled=0.3, entropy=entropy)
    (entropy_chart,) = [chart for chart in CHARTS if chart.key == "entropy"]
    (curve,) = series(entropy_chart, read_outcomes(runs), ["naive", "full"])
    assert list(curve.x) == [1, 2, 3, 4, 5, 6]
    assert curve.mean == pytest.approx([0.3] * 6)
    assert (curve.low, curve.high) == ([0.1] * 6, [0.6] * 6)


def test_curves_over_tokens_end_where_the_thriftiest_run_ends(tmp_path) -> None:
    runs = planned(tmp_path, ["naive"], [0, 1])
    for run, tokens in zip(runs, (24_000, 48_000), strict=True):
        finish(run, sampled=0.3, tokens=tokens)
    (chart,) = [chart for chart in CHARTS if chart.key == "tokens"]
    (curve,) = series(chart, read_outcomes(runs), ["naive"])
    assert curve.x[-1] == 6 * 24, "thousands"
    assert curve.high[-1] > curve.low[-1], "at as many tokens the other run is half as far"


def test_plain_words_name_each_pair_once(outcomes) -> None:
    words = said(compare(outcomes), claims(outcomes))
    gains = words["gains"]
    assert sum("dynamic sampling (token → full" in item for item in gains) == 1
    assert not any("overlong filtering" in item for item in gains)


def test_one_seed_gives_a_report_without_a_verdict(tmp_path) -> None:
    runs = planned(tmp_path, ["naive", "full"], [0])
    for run in runs:
        finish(run, sampled=0.3)
    _, markdown, _ = write_report(tmp_path, read_outcomes(runs))
    assert "one seed: no interval" in markdown.read_text()
    assert "**gains**" not in markdown.read_text()
    assert "| gains |" not in markdown.read_text()
