"""Versions: inside and outside their bounds, and missing."""

from types import SimpleNamespace

import pytest

from megatron_dapo.doctor import machine_checks
from megatron_dapo.doctor.probing import NO_CONFIG, Facts
from megatron_dapo.plan.scenario import changed

PASS, FAIL = "pass", "fail"


def versions(installed: dict[str, str], monkeypatch, requires: list[str]):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    found = [SimpleNamespace(name=name, version=version) for name, version in installed.items()]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: found)
    return [
        (one.status, one.found, one.fix) for one in machine_checks.check_versions(Facts()) if one.status is not PASS
    ]


REQUIREMENTS = ["torch>=2.11,<2.14", 'sglang==0.5.17; extra == "cpu"', "Typed_Name>=1", 'pytest>=9; extra == "dev"']
GOOD = {"megatron-dapo": "0.1.0", "torch": "2.13.0+cpu", "sglang": "0.5.17", "typed-name": "1.2"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.14.1"}, "torch 2.14.1 is installed; needed: <2.14,>=2.11"),
        ({"torch": "2.10.0+cu130"}, "torch 2.10.0+cu130 is installed"),
        ({"sglang": None}, "sglang is not installed; needed: ==0.5.17"),
    ],
)
def test_a_package_outside_its_bounds_or_missing_is_named_with_the_fix(change, said, monkeypatch):
    assert versions(GOOD, monkeypatch, REQUIREMENTS) == []
    installed = {name: version for name, version in (GOOD | change).items() if version is not None}
    [(status, found, fix)] = versions(installed, monkeypatch, REQUIREMENTS)
    assert status is FAIL
    assert said in found
    assert "pip install --no-deps" in fix


@pytest.mark.parametrize(("device", "verdict"), [("cpu", FAIL), ("cuda", "warning")])
def test_a_checkout_that_is_not_installed_is_said_and_stops_only_what_needs_it(device, verdict, monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [SimpleNamespace(name="torch", version="2.13.0")])
    facts = Facts(changed(NO_CONFIG, {"actor.device": device}))
    [finding] = machine_checks.check_versions(facts)
    assert finding.status == verdict
    assert "megatron-dapo is on PYTHONPATH alone" in finding.found
    assert finding.fix == "pip install --no-deps -e . in its folder"


def test_this_environment_is_inside_its_bounds():
    assert FAIL not in [finding.status for finding in machine_checks.check_versions(Facts())]
