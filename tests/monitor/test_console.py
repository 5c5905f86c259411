"""What a run prints, with and without a terminal."""

import errno
import io
import os
import re

import pytest

from megatron_dapo.monitor import console as module
from megatron_dapo.monitor.console import Console, Count, duration, step_line
from tests.monitor.runs import summary

METRICS = {
    "rollout_step": 3,
    "accuracy/mean": 0.412,
    "response_length/mean": 38.2,
    "truncated_fraction": 0.03,
    "entropy": 0.31,
    "tokens/generated": 14880,
    "timing/step": 12.0,
}


def printed(*, terminal: bool, use) -> str:
    file = io.StringIO()
    use(Console(file, terminal=terminal))
    return file.getvalue()


def test_plain_lines_have_no_control_characters_and_are_not_wrapped():
    def use(console):
        console.note("x" * 500 + " [not a style]")
        console.step(METRICS, total=40)
        console.error("[stalled] after 10 s")

    lines = printed(terminal=False, use=use).splitlines()
    assert lines == [
        "x" * 500 + " [not a style]",
        "step  3/40  accuracy  41.2%  length 38  cut off 3.0%  entropy 0.310  1240 tokens/s  12 s  (7 min left)",
        "[stalled] after 10 s",
    ]


def test_time_left_follows_the_recent_steps():
    def use(console):
        for done in range(1, 11):
            console.step(METRICS | {"rollout_step": done, "timing/step": 1000.0 if done <= 5 else 60.0}, total=12)

    assert "(2 min left)" in printed(terminal=False, use=use).splitlines()[-1]


def test_the_last_step_has_no_time_left():
    assert "left" not in step_line(METRICS, total=3, seconds_left=0)
    console = Console(io.StringIO(), terminal=False)
    console.step(METRICS, total=3)
    assert console.run["run"].text() == "3 of 3 rollout steps"
    console.step(METRICS, total=4)
    assert console.run["run"].text() == "3 of 4 rollout steps, time left 12 s"


def test_a_terminal_has_a_bar_and_it_is_taken_down():
    def use(console):
        console.step(METRICS | {"rollout_step": 1}, total=2)
        console.working(console.run)
        console.error("the end")
        console.note("after")

    text = printed(terminal=True, use=use)
    assert "━" in text
    assert "1 of 2" in text
    assert "\x1b[?25h" in text  # the cursor is shown again
    assert text.index("the end") > text.rindex("━")


def test_the_summary_has_intervals_baseline_and_examples():
    text = printed(terminal=False, use=lambda console: console.summary(summary()))
    table = text[: text.index("12 rollout steps")]
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"before +35\.8% \[32\.9, 38\.8\]", text)
    assert re.search(r"before, no guessing +83\.0%", text)
    assert re.search(r"after +84\.8% \[82\.4, 86\.9\]", text)
    assert re.search(r"gain, points +\+49\.0 \[\+45\.2, \+52\.6\]", text)
    assert re.search(r"gain over no guessing +\+1\.8 \[-1\.\d, \+5\.\d\]", text)
    assert "sampled, 4 a problem" in text
    assert "487 123 tokens generated" in text
    assert "How many [red] cards \\[ x \\] ?  (13)" in text
    assert re.search(r"before wrong +Answer: 12\n +after +right +16 - 5", text)


@pytest.mark.parametrize("options", [{"baseline": False}, {"greedy": False}])
def test_a_summary_with_less_in_it(options):
    text = printed(terminal=False, use=lambda console: console.summary(summary(**options)))
    assert ("no guessing" in text) == options.get("baseline", True)
    assert ("greedy" in text) == options.get("greedy", True)


def test_the_summary_of_a_run_without_held_out_problems():
    text = printed(terminal=False, use=lambda console: console.summary(summary(heldout=False)))
    assert "Held-out accuracy" not in text
    assert "487 123 tokens generated" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.4, "9.4 s"), (75, "75 s"), (100, "2 min"), (5940, "99 min"), (12000, "3 h 20 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_reader_that_is_gone_does_not_end_the_run(tmp_path):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        console = Console(file)
        console.note("first")
        os.close(reading)
        for _ in range(3):
            console.note("nobody reads this")
            console.error("nor this")


def test_a_terminal_that_hung_up_does_not_end_the_run():
    class HungUp(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    console = Console(HungUp())
    console.note("nobody reads this")
    console.note("nor this")


def test_a_full_disk_under_the_log_is_not_hidden():
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Console(Full()).note("x")
    Console(Full()).aside("a watcher's line, which must not end it")


BATCH = Count(12, 32, "groups kept", {"tokens/s": 1240.3, "longest_running_s": 38.2, "groups_finished": 20})


def test_a_quiet_log_says_how_far_the_work_is(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    file = io.StringIO()
    console = Console(file, terminal=False)
    console.run = {"run": Count(0, 40, "rollout steps")}  # it has begun

    def at(seconds, works):
        nonlocal now
        now = 100.0 + seconds
        console.working(works)

    for seconds in range(0, 61, 2):
        at(seconds, {"batch of groups": BATCH})
    console.note("said")  # at 60 s
    at(89, {"trainer update": Count(3, 16, "mini-batches")})
    at(91, {"trainer update": Count(4, 16, "mini-batches"), "checkpoint": Count(1, 2, "ranks")})
    at(200, {})
    batch = "  batch of groups: 12 of 32 groups kept, 1240 tokens/s, longest running 38 s, 20 groups finished"
    update = ["  trainer update: 4 of 16 mini-batches", "  checkpoint: 1 of 2 ranks"]
    assert file.getvalue().splitlines() == [batch, batch, "said", *update]


def test_a_log_of_a_start_says_soon_what_has_changed(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    file = io.StringIO()
    console = Console(file, terminal=False)
    for seconds in range(2, 51, 2):
        now = 100.0 + seconds
        console.working({"server start": Count(min(2, seconds // 5), 2, "servers")})
    rows = [f"  server start: {ready} of 2 servers" for ready in (0, 1, 2, 2)]
    assert file.getvalue().splitlines() == rows, "after 4, 8, 12 and 42 s"
    console.run = {"run": Count(0, 40, "rollout steps")}
    now += 20
    console.working({"batch of groups": BATCH})
    assert len(file.getvalue().splitlines()) == 4, "within a step a line is due after a longer time"


def test_a_terminal_has_a_bar_for_each_work_as_long_as_it_goes_on(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def use(console):
        console.working({"server start": Count(0, 1, "servers"), "trainer build": Count(1, 2, "ranks")})
        console.step(METRICS, total=40)
        console.working({**console.run, "batch of groups": BATCH})
        console.close()
        console.working({"trainer update": Count(3, 16, "mini-batches")})
        console.error("the end")

    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(terminal=True, use=use))
    for row in (
        r"server start +━{20} 0 of 1 servers",
        r"trainer build ━{10}╺━{9} 1 of 2 ranks",
        r"run +━╸━{18} 3 of 40 rollout steps, time left 7 min",
        r"batch of groups ━{7}╸━{12} 12 of 32 groups kept, 1240 tokens/s, lon",  # 80 columns hold no more
        r"trainer update ━{3}╸━{16} 3 of 16 mini-batches",
    ):
        assert re.search(row, text), row
    last = text[text.index("trainer update") :]
    assert "batch of groups" not in last, "its bar went with the others"
    assert "server start" not in text[text.rindex("batch of groups") :]
    assert text.index("the end") > text.rindex("━")


def test_a_terminal_that_hung_up_under_a_bar_does_not_end_the_run():
    class HungUp(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    console = Console(HungUp(), terminal=True)
    for works in ({"batch of groups": BATCH}, {}, {"batch of groups": BATCH}):
        console.working(works)
    console.close()
