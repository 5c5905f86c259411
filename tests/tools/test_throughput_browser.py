"""The throughput page in a real browser, on a desktop and on a phone: nothing overflows."""

import html
import re

import pytest

from tests.report.test_browser import BROWSER, MEASURE, browse
from tests.tools.test_profile_throughput import write_run
from tests.tools.timelines import write_timeline
from tools.profile_throughput import main

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    runs = tmp_path_factory.mktemp("runs")
    for name, layout in (("one", {"pipeline": 2}), ("a-run-with-a-rather-long-name", {"data": 2, "slow": 1.2})):
        write_timeline(write_run(runs / name), 3, **layout)
    folders = [str(runs / name) for name in ("one", "a-run-with-a-rather-long-name")]
    assert main([*folders, "--out", str(runs / "out")]) == 0
    return (runs / "out.html").read_text()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_ranks_of_both_are_listed_and_nothing_overflows(page, tmp_path, width):
    file = tmp_path / "frame.html"
    file.write_text(MEASURE % (width, html.escape(page)))
    seen = browse(tmp_path, "--virtual-time-budget=5000", "--dump-dom", file.as_uri())
    title, wide, _ = re.search(r"<title>(.*?)</title>", seen).group(1).split("|")
    assert title == "one and a-run-with-a-rather-long-name - throughput"
    assert int(wide) <= width, "the page scrolls sideways"
    assert page.count("<h2>Ranks of ") == 2


def test_what_one_run_lacks_is_a_dash_beside_the_other(page):
    row = re.search(r"<tr><td>pipeline bubble.*?</tr>", page).group()
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row) == ["pipeline bubble, share of the schedule", "20.0%", "–", "–"]
