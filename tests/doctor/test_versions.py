"""Versions: inside and outside their bounds, missing, and other than the lock's."""

from pathlib import Path

import pytest

from megatron_dapo.doctor import machine_checks
from megatron_dapo.doctor.probing import Facts, Status

PASS, WARNING, FAIL = Status.PASS, Status.WARNING, Status.FAIL


def versions(installed: dict[str, str], monkeypatch, requires: list[str], lock: Path):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    monkeypatch.setattr(machine_checks, "LOCKS", lock)
    facts = Facts()
    facts.__dict__["installed"] = installed
    return [(one.status, one.found, one.fix) for one in machine_checks.check_versions(facts) if one.status is not PASS]


REQUIREMENTS = ["torch>=2.11,<2.14", 'sglang==0.5.17; extra == "cpu"', "Typed_Name>=1", 'pytest>=9; extra == "dev"']
GOOD = {"torch": "2.13.0+cpu", "sglang": "0.5.17", "typed-name": "1.2"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.14.1"}, "torch 2.14.1 is installed; needed: <2.14,>=2.11"),
        ({"torch": "2.10.0+cu130"}, "torch 2.10.0+cu130 is installed"),
        ({"sglang": None}, "sglang is not installed; needed: ==0.5.17"),
    ],
)
def test_a_package_outside_its_bounds_or_missing_is_named_with_the_fix(change, said, monkeypatch, tmp_path):
    assert versions(GOOD, monkeypatch, REQUIREMENTS, tmp_path) == []
    installed = {name: version for name, version in (GOOD | change).items() if version is not None}
    [(status, found, fix)] = versions(installed, monkeypatch, REQUIREMENTS, tmp_path)
    assert status is FAIL
    assert said in found
    assert "pip install --no-deps" in fix


def test_another_version_than_the_locks_is_a_warning(monkeypatch, tmp_path):
    for kind in ("py311", "py312", "gpu311", "gpu312"):
        text = "# a comment\ntorch==2.13.0  # 200 MB\nsglang==0.5.16\nabsent==1.0\npip==26.3\n"
        (tmp_path / f"{kind}.lock.txt").write_text(text)
    [(status, found, fix)] = versions(GOOD | {"pip": "23.2"}, monkeypatch, REQUIREMENTS, tmp_path)
    assert status is WARNING
    assert found.endswith(": sglang 0.5.17 (locked 0.5.16)")
    assert "clean-venv install takes py3" in fix
    on_gpus = versions(GOOD | {"sglang-kernel": "0.4.5"}, monkeypatch, REQUIREMENTS, tmp_path)
    assert "clean-venv install-gpu takes gpu3" in on_gpus[0][2]


def test_this_environment_is_inside_its_bounds():
    assert FAIL not in [finding.status for finding in machine_checks.check_versions(Facts())]
