"""Differences between configs and from the paper."""

import pytest

from megatron_dapo.cli.diff import diff
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.config_diff import ABSENT, PAPER, departures, differences, flatten_config, shown
from megatron_dapo.config.load import flatten
from tests.config.test_load import MINIMAL


@pytest.fixture
def write(tmp_path):
    def file(name: str, text: str = "") -> str:
        (tmp_path / name).write_text(MINIMAL + text)
        return str(tmp_path / name)

    return file


def test_every_setting_of_the_paper_is_a_key_and_its_default_is_the_papers(write):
    flat = flatten_config(load_config(write("a.yaml")))
    assert {setting.key for setting in PAPER} <= set(flat)
    assert departures(flat) == []


def test_a_departure_names_both_values(write):
    flat = flatten_config(load_config(write("a.yaml"), ["algorithm.clip.high=0.2", "algorithm.kl.coefficient=0.001"]))
    assert {departure.stated.key: (departure.value, departure.stated.value) for departure in departures(flat)} == {
        "algorithm.clip.high": (0.2, 0.28),
        "algorithm.kl.coefficient": (0.001, 0.0),
    }


def test_differences_include_keys_of_one_side_only():
    found = differences(flatten({"a": {"b": 1, "c": [1]}}), flatten({"a": {"b": 2, "c": [1]}, "d": None}))
    assert [(item.key, item.one, item.other) for item in found] == [("a.b", 1, 2), ("d", ABSENT, None)]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "none"), (True, "true"), (1e-6, "1e-06"), (20.0, "20"), ([0.9, 0.98], "[0.9, 0.98]")]
)
def test_values_are_shown_as_in_a_file(value, text):
    assert shown(value) == text


def test_diff_of_two_files(write, capsys):
    one = write("one.yaml", "algorithm: {clip: {high: 0.2}, group_size: 8, mini_batch_responses: 256}\n")
    other = write("other.yaml", "algorithm: {group_size: 8, mini_batch_responses: 256}\nactor: {threads: 4}\n")
    diff(one, other)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if "." in line}
    assert rows["algorithm.clip.high"] == ["0.2", "0.28", "0.28"]
    assert rows["actor.threads"] == ["1", "4", "not", "stated"]
    assert rows["algorithm.group_size"] == ["8", "8", "16"], "alike, but not the paper's"
    assert "algorithm.clip.low" not in rows


def test_diff_with_the_paper_by_name_on_either_side(write, capsys):
    file = write("one.yaml", "actor: {optimizer: {lr: 1e-5}}\n")
    diff(file, "paper")
    assert "actor.optimizer.lr" in capsys.readouterr().out
    diff("paper", file)
    row = next(line for line in capsys.readouterr().out.splitlines() if "optimizer.lr" in line)
    assert row.split()[1:3] == ["1e-05", "1e-06"]
    diff(write("same.yaml"), "paper")
    assert "as in the paper" in capsys.readouterr().out


def test_diff_loads_strictly(write):
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.clip\.high\?"):
        diff(write("one.yaml", "algorithm: {clip: {hihg: 0.2}}\n"), "paper")
    with pytest.raises(ConfigError, match="name at least one config file"):
        diff("paper", "paper")
