"""The report in a real browser: it is drawn, on a desktop and on a phone, and no text of a response is run."""

import html
import re
import shutil
import subprocess

import numpy as np
import pytest

from megatron_dapo.report.page import report_page
from megatron_dapo.report.source import Run
from tests.report.folders import write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

MEASURE = """<!DOCTYPE html><body><iframe style="width:%dpx;height:900px;border:0" srcdoc="%s"></iframe><script>
const frame = document.querySelector('iframe');
frame.onload = () => {
  const page = frame.contentDocument;
  page.querySelectorAll('details').forEach(each => { each.open = true; });
  const wide = page.documentElement.scrollWidth;
  const drawn = [...page.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().height > 50).length;
  document.title = [page.title, wide, drawn].join('|');
};
</script></body>"""
"""A frame as wide as the screen; the page around it reads what the browser made of the report."""


def browse(folder, *arguments: str) -> str:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    runs = tmp_path_factory.mktemp("runs")
    return report_page([Run(write_run(runs / name)) for name in ("one", "a-run-with-a-rather-long-name", "third")])


@pytest.mark.parametrize("width", [1280, 390])
def test_every_chart_is_drawn_and_nothing_overflows(page, tmp_path, width):
    file = tmp_path / "frame.html"
    file.write_text(MEASURE % (width, html.escape(page)))
    seen = browse(tmp_path, "--virtual-time-budget=5000", "--dump-dom", file.as_uri())
    title, wide, drawn = re.search(r"<title>(.*?)</title>", seen).group(1).split("|")
    assert title == "one and a-run-with-a-rather-long-name and third - DAPO run report", "a response ran as a script"
    assert int(wide) <= width, "the page scrolls sideways"
    assert int(drawn) == page.count("<svg")


def test_light_and_dark_follow_the_system(page, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "page.html"
    file.write_text(page)
    shades = []
    for theme in ("1", "0"):
        picture = tmp_path / f"{theme}.png"
        browse(tmp_path, f"--blink-settings=preferredColorScheme={theme}", f"--screenshot={picture}", file.as_uri())
        pixels = image.imread(picture)[..., :3]
        assert len(np.unique((pixels * 255).astype(int).reshape(-1, 3), axis=0)) > 50, "an empty picture"
        shades.append(np.median(pixels))
    assert shades[0] > 0.9
    assert shades[1] < 0.2
