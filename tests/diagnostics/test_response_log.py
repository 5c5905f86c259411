"""Responses on disk: none is lost, none is asked for twice, none of another evaluation is taken over."""

import pytest

from megatron_dapo.diagnostics.evaluation_session import RESPONSES, EvaluationError, locked, response_log
from megatron_dapo.experience.evaluation import Answer

SETTINGS = {"weights": {"fingerprint": "a"}, "temperature": 1.0, "stop_token_ids": [2]}
ANSWER = Answer(
    text="so \ud800 Answer: 42", tokens=3, truncated=False, correct=True, extracted="42", error=None, versions=(1, 1)
)


def write(folder, count):
    with response_log(folder, SETTINGS) as log:
        for sample in range(count):
            log.add(("sampled", "p", sample), ANSWER)


def test_what_was_added_is_known_to_the_next_start(tmp_path):
    write(tmp_path, 2)
    with response_log(tmp_path, SETTINGS) as log:
        assert log.known == {("sampled", "p", 0): ANSWER, ("sampled", "p", 1): ANSWER}


def test_a_torn_last_line_is_asked_for_again(tmp_path):
    write(tmp_path, 3)
    file = tmp_path / RESPONSES
    file.write_bytes(file.read_bytes()[:-20])
    with response_log(tmp_path, SETTINGS) as log:
        assert len(log.known) == 2
        log.add(("sampled", "p", 2), ANSWER)
    with response_log(tmp_path, SETTINGS) as log:
        assert len(log.known) == 3


def test_a_broken_line_is_named(tmp_path):
    write(tmp_path, 2)
    file = tmp_path / RESPONSES
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(EvaluationError, match=r"responses\.jsonl:1: no response"), response_log(tmp_path, SETTINGS):
        pass


@pytest.mark.parametrize("changed", [{"weights": {"fingerprint": "b"}}, {"temperature": 0.5}])
def test_responses_of_other_weights_or_settings_are_not_taken_over(tmp_path, changed):
    write(tmp_path, 1)
    with (
        pytest.raises(EvaluationError, match=f"made with {next(iter(changed))} = .*another --out"),
        response_log(tmp_path, SETTINGS | changed),
    ):
        pass


@pytest.mark.parametrize("content", [b'{"weights"', b"\xff", b"3"])
def test_damaged_settings_are_named_with_the_way_out(tmp_path, content):
    (tmp_path / "settings.json").write_bytes(content)
    words = r"settings\.json is damaged .*another --out"
    with pytest.raises(EvaluationError, match=words), response_log(tmp_path, SETTINGS):
        pass


def test_one_process_writes_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(EvaluationError, match="another evaluation writes there"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
