"""The screenshots of the documentation: made of any finished run by one command."""

import pytest

from tests.report.test_browser import BROWSER
from tests.tools.test_profile_throughput import write_run
from tests.tools.timelines import write_timeline
from tools.docs_pages import pictures


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_report_throughput_and_plan_are_pictured(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    run = write_run(tmp_path / "run")
    write_timeline(run, 3, pipeline=2)
    pictures([run], tmp_path / "out")
    for name in ("report", "throughput", "plan"):
        pixels = image.imread(tmp_path / "out" / f"{name}.png")
        assert pixels.shape[1] == 1184
        assert pixels[..., :3].std() > 0.05, f"{name}: an empty picture"


def test_a_machine_without_a_browser_is_told_which_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(FileNotFoundError, match="chromium"):
        pictures([], tmp_path)
