"""The report of every kind of run: whole, safe, complete; and what it says when there is little to say."""

import json
import os
import re
from html.parser import HTMLParser
from itertools import product

import numpy as np
import pytest
import yaml

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.cli.main import main
from megatron_dapo.cli.status import status as status_command
from megatron_dapo.monitor.timeline import PHASES
from megatron_dapo.report.chart import SERIES_COLOURS
from megatron_dapo.report.page import report_page
from megatron_dapo.report.sections import group_by_seed, read_sections
from megatron_dapo.report.source import ReportError, Run
from tests.monitor.declared import check_declared
from tests.monitor.runs import metrics
from tests.report.folders import HOSTILE, write_lines, write_run

SECTIONS = {
    "heldout", "alarms", "training", "sampling", "clip", "update", "bias", "reflection", "time", "outcomes",
    "learning", "config", "samples", "provenance",
}  # fmt: skip
VOID = {"meta", "br", "wbr"}


class Page(HTMLParser):
    """Tags, ids, references and text of a page; fails on a tag that is closed out of turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src", "xlink:href") if name in values]
        assert not any(name.startswith("on") for name in values), f"{tag} has a handler"

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.text += data


def page_of(*folders) -> Page:
    return Page(report_page([Run(folder) for folder in folders]))


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> Page:
    return page_of(write_run(tmp_path_factory.mktemp("runs") / "usual"))


def test_every_section_is_there_and_every_link_leads_somewhere(usual):
    assert set(usual.ids) >= SECTIONS
    assert len(usual.ids) == len(set(usual.ids)), "ids of two charts clash"
    assert {link[1:] for link in usual.links if link.startswith("#")} <= set(usual.ids)


def test_nothing_is_fetched_and_nothing_is_run(usual):
    assert all(link.startswith("#") for link in usual.links)
    assert not {"script", "link", "img", "iframe", "object"} & set(usual.tags)


def test_a_response_is_text_whatever_it_holds(usual):
    assert HOSTILE in usual.text


def test_a_conversation_shows_turns_observations_and_results_of_tools_apart(tmp_path):
    folder = write_run(tmp_path / "run")
    said = {"response": HOSTILE, "observation": f"lower {HOSTILE}", "role": "user", "reward": -0.25, "error": None}
    called = {"response": "call", "observation": "error: late", "role": "tool", "reward": 0, "error": "timeout"}
    line = {"rollout_step": 12, "prompt": 3, "response": "At last.", "accuracy": True, "earlier": [said, called]}
    write_lines(folder / "samples.jsonl", [line])
    page = page_of(folder)
    shown = re.sub(r"\s+", " ", page.text.partition("step 12, prompt 3")[2])
    parts = ("Turn 1", "Observation, reward -0.25", f"lower {HOSTILE}", "Turn 2", "Result of a tool, after an error")
    places = [shown.index(part) for part in (*parts, "error: late", "Last turn", "At last.")]
    assert places == sorted(places)
    assert not {"script", "img"} & set(page.tags)
    lines = [each | {"episode/turns": 2.5} for each in metrics(2)]
    write_lines(folder / "metrics.jsonl", lines)
    assert "episode/turns" in page_of(folder).text
    assert "episode/" not in page_of(write_run(tmp_path / "other")).text


def test_held_out_accuracy_has_intervals_and_gain(usual):
    assert "35.8% [32.9, 38.8]" in usual.text
    assert "84.8% [82.4, 86.9]" in usual.text
    assert "+49.0 points" in usual.text


def test_departures_from_the_paper_are_named_with_both_values(usual):
    for part in ("algorithm.clip.high", "0.25", "0.28", "algorithm.overlong.buffer", "4096", "eq. 13"):
        assert part in usual.text
    assert "algorithm.group_size16" not in re.sub(r"\s", "", usual.text.split("All ")[0]), "it is the paper's"


def test_outcomes_are_sums_of_the_metrics(tmp_path):
    folder = write_run(tmp_path / "run")
    counts = {"trained": 90, "all_correct": 10, "all_wrong": 20, "carried": 7, "expired": 4, "discarded": 1}
    groups = {"sampling/kept": 3, "sampling/all_correct": 1, "sampling/all_wrong": 2, "sampling/carried": 1}
    tokens = {f"tokens/{name}": number for name, number in counts.items()}
    write_lines(folder / "metrics.jsonl", [{**line, **groups, **tokens} for line in metrics(2)])
    text = re.sub(r"\s+", " ", page_of(folder).text.partition("Prompts sent")[2])
    for part in (
        "trained 6 prompts, 46.2%",
        "all right 2 prompts",
        "all wrong 4 prompts",
        "waiting 1 prompts",
        "trained 180 tokens",
    ):
        assert part in text
    assert "waiting 7 tokens" in text
    assert "generated again 10 tokens" in text


def test_a_broken_ledger_is_named_by_the_report_and_not_read_by_status(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "ledger.jsonl").write_text("{]\n{}\n")
    status_command(folder)
    assert "ledger.jsonl" not in capsys.readouterr().out
    assert "ledger.jsonl:1: not an event" in page_of(folder).text


def test_the_papers_ranges_are_shown_for_32b_models_only(usual, tmp_path):
    assert "Shaded:" not in usual.text
    large = page_of(write_run(tmp_path / "large", parameters=32_763_876_352))
    assert large.text.count("Shaded:") == 3, "length, entropy, filtered; this run has no mean probability"


def test_an_alarm_is_shown_with_reason_key_and_steps(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [{**line, "truncated_fraction": 0.5 if line["rollout_step"] > 6 else 0.0} for line in metrics()]
    write_lines(folder / "metrics.jsonl", lines)
    text = page_of(folder).text
    assert "since rollout step 8" in text
    assert "section 3.4" in text
    assert "algorithm.overlong.filter" in text


def test_two_runs_share_the_axes_and_differ_by_name(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", finished=False, steps=7)
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("0.25", "0.3"))
    html = report_page([Run(one), Run(other)])
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert "7 of 12 rollout steps" in page.text
    entropy = re.search(r'aria-label="Entropy.*?</svg>', html, re.DOTALL).group()
    assert all(f"stroke: var(--c{run})" in entropy for run in (0, 1))
    assert re.search(r"algorithm\.clip\.high\s*0\.25\s*0\.3\s", re.sub(r"\s+", " ", page.text))


def test_two_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    one, other = write_run(tmp_path / "a" / "quickstart"), write_run(tmp_path / "b" / "quickstart")
    text = page_of(one, other).text
    assert "a/quickstart: mean" in text
    assert "b/quickstart: mean" in text


def seeded(folder, seed, factor=1.0, **settings):
    """A run of that seed whose entropies are `factor` times the usual ones."""
    run = write_run(folder)
    lines = [{**line, "entropy": factor * line["entropy"]} for line in metrics()]
    write_lines(run / "metrics.jsonl", lines)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"] |= {"seed": seed, "dir": str(folder)}
    config["algorithm"] |= settings
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def test_runs_that_differ_by_seed_alone_are_one_line_with_a_band(tmp_path):
    runs = [
        Run(seeded(tmp_path / f"plain-seed{seed}", seed, factor)) for seed, factor in ((0, 1.0), (1, 1.5), (2, 2.0))
    ]
    others = [Run(seeded(tmp_path / "wide", 0, policy_loss="gspo")), Run(seeded(tmp_path / "again", 0))]
    groups = group_by_seed([*runs, *others])
    assert [(group.name, len(group.runs)) for group in groups] == [("plain (3 seeds)", 3), ("wide", 1), ("again", 1)]
    chart = next(chart for chart in read_sections()[0].charts if chart.title == "Entropy")
    [[band, wide, again]] = chart.curves(groups)
    entropy = np.array([line["entropy"] for line in metrics()])
    np.testing.assert_allclose((band.values, band.low, band.high), (1.5 * entropy, entropy, 2 * entropy))
    assert (again.low, wide.dash, [one.colour for one in (band, wide, again)]) == (None, 0, [0, 1, 2])
    page = Page(report_page([*runs, *others]))
    assert len(page.ids) == len(set(page.ids))
    assert re.search(r"algorithm\.policy_loss\s*\(no such key\)\s*gspo\s*\(no", page.text)


def test_a_long_run_is_smoothed_and_each_step_is_pale(tmp_path):
    folder = write_run(tmp_path / "run")
    write_lines(folder / "metrics.jsonl", metrics(200))
    html = report_page([Run(folder)])
    assert "Lines are means over 4 rollout steps" in html
    assert "stroke-opacity: 0.3" in html
    assert "stroke-opacity: 0.3" not in report_page([Run(folder)], smooth=1)


def test_the_first_screen_says_whether_it_learns_is_healthy_and_where_time_goes(usual):
    first = usual.text.partition("Held-outAlarms")[0]
    for part in ("Does it learn?", "No alarm now", "28.9% → 74.4%", "0.233 → 0.05", "start and rest", "7 min"):
        assert part in first, part
    assert usual.ids[0] == "overview"


def test_a_curve_goes_where_its_metric_goes(tmp_path):
    folder = write_run(tmp_path / "run")
    write_lines(folder / "metrics.jsonl", [{"rollout_step": s, "optimizer_step": s, "entropy": s} for s in (1, 2, 3)])
    entropy = re.search(r'aria-label="Entropy.*?</svg>', report_page([Run(folder)]), re.DOTALL).group()
    curve = re.search(r'd="([^"]*)"[^>]*stroke: var\(--c0\)', entropy).group(1)
    points = [tuple(map(float, point)) for point in re.findall(r"[ML] (\S+) (\S+)", curve)]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    rises = [points[0][1] - points[1][1], points[1][1] - points[2][1]]
    assert rises[0] == pytest.approx(rises[1], rel=1e-3)
    assert rises[0] > 0, "up is up"


def test_a_run_that_measured_all_that_charts_show_has_a_colour_for_each(tmp_path):
    charts = [chart for section in read_sections() for chart in section.charts]
    assert max(len(chart.series) for chart in charts if chart.stack) <= SERIES_COLOURS, "two layers of one colour"
    run = write_run(tmp_path / "run")
    measured = dict.fromkeys((name for chart in charts for name in chart.series), 0.5)
    measured |= {f"objective/statistic_{at}": 0.5 for at in range(12)}
    write_lines(run / "metrics.jsonl", [{**line, **measured} for line in metrics()])
    html = report_page([Run(run)])
    style = "\n".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    classes = set(re.findall(r'class="(?:line|dot|range)? ?(c\d+)\b', html))
    assert "c8" in classes, "handover, the ninth layer of the time"
    assert not {name for name in classes if f".{name} {{" not in style}
    assert not {name for name in re.findall(r"var\((--c\d+)\)", html) if style.count(f"{name}: #") != 2}, "light, dark"


def test_a_phase_has_one_colour_in_the_bar_of_the_time_and_in_its_chart(tmp_path):
    run = write_run(tmp_path / "run")
    spent = {f"timing/{phase}": 2.0 for phase in PHASES}
    write_lines(run / "metrics.jsonl", [{**line, **spent} for line in metrics()])
    first, _, rest = report_page([Run(run)]).partition('<div id="time">')
    for phase in (phase.replace("_", " ") for phase in PHASES):
        assert re.search(rf'"dot (c\d)"></i>{phase} ', first)[1] == re.search(rf'"line (c\d) d0"></i>{phase} ', rest)[1]


def test_a_statistic_of_the_loss_has_a_chart_without_being_declared(tmp_path):
    run = write_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [{**line, "objective/outside": 0.25} for line in metrics()])
    page = page_of(run)
    assert "Of the policy loss: mean over the tokens that carry loss." in page.text
    assert "outside, mean" in page.text, "in the table of numbers"


def test_a_run_under_way_shows_what_there_is(tmp_path):
    text = page_of(write_run(tmp_path / "run", finished=False, steps=1)).text
    assert all(said in text for said in ("1 of 12 rollout steps", "so far only before"))


def test_the_error_that_ended_a_run_is_shown(tmp_path):
    folder = write_run(tmp_path / "run", finished=False, steps=3)
    usual = {"pid": 1, "host": "h", "written": 2.0, "rollout_steps": 12, "waits": [], "error_at": 2.0}
    usual |= {"state": "failed", "error": "Stalled: <no answer>"}
    for started, said in ((1.0, "Last error: Stalled: <no answer>"), (3.0, "Last error (before this start): Stalled")):
        write_lines(folder / "status.json", [{**usual, "started": started}])
        assert said in page_of(folder).text


@pytest.mark.parametrize("name", ["summary.json", "manifest.json", "config.yaml", "samples.jsonl"])
@pytest.mark.parametrize("content", [None, "[1]"], ids=["missing", "a list"])
def test_no_single_file_is_needed(tmp_path, name, content):
    folder = write_run(tmp_path / "run")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    text = page_of(folder).text
    assert content is None or name in text.partition("Held-out accuracy")[0], "what is left out is said at the top"
    assert "Training curves" in text


def nodes(content, path=()):
    """Paths to everything in a JSON document, itself included; of a list the first element."""
    yield path
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content[:1])
    else:
        items = ()
    for key, value in items:
        yield from nodes(value, (*path, key))


def replaced(content, path, value):
    if not path:
        return value
    changed = content.copy()
    changed[path[0]] = replaced(content[path[0]], path[1:], value)
    return changed


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["summary.json", "heldout_before.json", "manifest.json"])
def test_whatever_stands_in_a_file_it_is_no_traceback_and_what_is_left_out_is_said_once(tmp_path, name, every):
    """By default of the five values one at a place, another at the next."""
    folder = write_run(tmp_path / "run", steps=0)
    if name == "heldout_before.json":
        (folder / "summary.json").unlink()  # else its figures are not read
    data = {part: {"path": "x.jsonl", "rows": "1 row", "sha256": "abc"} for part in ("train", "heldout")}
    more = {"manifest.json": {"host": {"name": "x"}, "model": {"path": "y"}, "command": ["z"], "data": data}}
    whole = json.loads((folder / name).read_text()) | more.get(name, {})
    (folder / name).write_text(json.dumps(whole))
    assert not Run(folder).notes
    for path, value in list(product(nodes(whole), (5, "text", [1], {"key": 1}, None)))[::every]:
        (folder / name).write_text(json.dumps(replaced(whole, path, value)))
        run = Run(folder)
        report_page([run])
        assert len(run.notes) <= 1, (path, value)
        assert all(note.startswith(name) and "\n" not in note for note in run.notes), (path, value)
        status_command(folder)


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("summary.json", {"heldout": {"before": {"sampled": 0.5}}}, "heldout.before.sampled"),
        ("summary.json", {"rollout_steps": "12", "heldout": {}}, "rollout_steps"),
        ("heldout_before.json", {"before": {"sampled": {}}}, "before.sampled.figures: field required"),
        ("manifest.json", {"data": {"train": 1}}, "data.train"),
        ("manifest.json", {"trainer": {"layout": {"tensor": "2"}}}, "trainer.layout.tensor"),
    ],
)
def test_a_file_of_another_shape_is_named_with_the_place_in_it(tmp_path, name, content, where, capsys):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(json.dumps(content))
    status_command(folder)
    assert f"note        {name} is not as a run writes it and is left out ({where}" in capsys.readouterr().out


def test_an_empty_metrics_file_gives_a_page_that_says_so(tmp_path):
    folder = write_run(tmp_path / "run", finished=False)
    (folder / "metrics.jsonl").write_text("")
    assert "No rollout step is finished yet" in page_of(folder).text


def test_metrics_that_were_never_measured_are_named(usual):
    assert "Not measured:" in usual.text
    assert "Gradient norm" in usual.text


@pytest.fixture
def run_command(monkeypatch):
    """The exit code of `megatron-dapo ARGUMENTS`."""

    def run_command(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["megatron-dapo", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return run_command


def test_what_is_no_run_is_an_error(tmp_path, run_command, capsys):
    with pytest.raises(ReportError, match="no run directory"):
        Run(tmp_path / "nowhere")
    assert run_command("report", str(tmp_path)) == ExitCode.CONFIG
    assert "no run directory" in capsys.readouterr().err


def test_a_broken_metrics_file_is_an_error_with_its_line(tmp_path, run_command, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"rollout_step": 1}\nrubbish\n{"rollout_step": 2}\n')
    assert run_command("report", str(folder)) == ExitCode.CONFIG
    assert "metrics.jsonl:2" in capsys.readouterr().err


def test_the_command_writes_the_file_and_says_where(tmp_path, run_command, capsys):
    folder = write_run(tmp_path / os.fsdecode(b"\xferun"))
    assert run_command("report", str(folder), "--out", str(tmp_path / "out.html")) == ExitCode.FINISHED
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    assert "out.html" in capsys.readouterr().out
    assert run_command("report", str(folder), "--out", str(tmp_path / "no" / "out.html")) == ExitCode.FAILED
    assert "name another place with --out: " + repr(str(tmp_path / "no" / "out.html")) in capsys.readouterr().err
    assert json.loads((folder / "manifest.json").read_text()), "nothing in the run directory is touched"


def test_charts_show_declared_metrics():
    check_declared(name for section in read_sections() for chart in section.charts for name in chart.series)
