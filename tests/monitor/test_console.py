"""What a run prints, with and without a terminal."""

import errno
import io
import os
import re

import pytest

from megatron_dapo.monitor.console import Console, duration, step_line
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


def test_a_terminal_has_a_bar_and_it_is_taken_down():
    def use(console):
        console.step(METRICS | {"rollout_step": 1}, total=2)
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
    assert re.search(r"before, made to work +83\.0%", text)
    assert re.search(r"after +84\.8% \[82\.4, 86\.9\]", text)
    assert re.search(r"gain, points +\+49\.0 \[\+45\.2, \+52\.6\]", text)
    assert re.search(r"gain over made to work +\+1\.8 \[-1\.\d, \+5\.\d\]", text)
    assert "sampled, 4 a problem" in text
    assert "487 123 tokens generated" in text
    assert "How many [red] cards ?  (13)" in text
    assert re.search(r"before wrong +Answer: 12\n +after +right +16 - 5", text)


@pytest.mark.parametrize("options", [{"baseline": False}, {"greedy": False}])
def test_a_summary_with_less_in_it(options):
    text = printed(terminal=False, use=lambda console: console.summary(summary(**options)))
    assert ("made to work" in text) == options.get("baseline", True)
    assert ("greedy" in text) == options.get("greedy", True)


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
