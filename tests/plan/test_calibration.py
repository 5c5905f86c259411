"""A calibration file is read strictly: a constant that is missing, misspelled or senseless stops the plan."""

from importlib import resources

import pytest
import yaml

from megatron_dapo.config import ConfigError
from megatron_dapo.plan.scenario import load_calibration


@pytest.fixture
def entries() -> dict:
    return yaml.safe_load((resources.files("megatron_dapo.plan") / "calibration.yaml").read_text())


def test_the_packages_file_gives_unit_and_source_of_every_constant(entries):
    for name, entry in entries.items():
        assert entry["unit"], name
        assert entry["source"], name


def test_another_file_takes_its_place(entries, tmp_path):
    entries["peak_flops"]["value"] = 312e12
    file = tmp_path / "a800.yaml"
    file.write_text(yaml.safe_dump(entries))
    assert load_calibration(file).peak_flops == 312e12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entries: entries.pop("disk_read"), "disk_read"),
        (lambda entries: entries.update(disk_raed=entries["disk_read"]), "disk_raed"),
        (lambda entries: entries["train_efficiency"].update(value=1.5), "train_efficiency = 1.5"),
        (lambda entries: entries["peak_flops"].update(value=0), "peak_flops = 0.0: Input should be greater than 0"),
        (lambda entries: entries["peak_flops"].update(value="much"), "peak_flops.value = 'much'"),
        (lambda entries: entries["peak_flops"].pop("source"), "peak_flops.source"),
    ],
)
def test_a_wrong_constant_is_named(change, said, entries, tmp_path):
    change(entries)
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(entries))
    with pytest.raises(ConfigError, match=r"wrong\.yaml") as error:
        load_calibration(file)
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_calibration(tmp_path / "nowhere.yaml")
