"""Versions: inside and outside their bounds, missing, and other than the lock's."""

from pathlib import Path

import pytest

from megatron_dapo.doctor.probing import Status
from megatron_dapo.doctor.software import check_lock, check_python, check_versions, declared, lock_of

REQUIREMENTS = ["torch>=2.11,<2.14", "sglang==0.5.17", "Typed_Name>=1"]
GOOD = {"torch": "2.13.0+cpu", "sglang": "0.5.17", "typed-name": "1.2"}


def test_versions_inside_their_bounds_are_one_line():
    [finding] = check_versions(REQUIREMENTS, GOOD)
    assert finding.status is Status.PASS
    assert "3 packages" in finding.found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.14.1"}, "torch 2.14.1 is installed; needed: <2.14,>=2.11"),
        ({"torch": "2.10.0+cu130"}, "torch 2.10.0+cu130 is installed"),
        ({"sglang": None}, "sglang is not installed; needed: ==0.5.17"),
    ],
)
def test_what_is_outside_or_missing_is_named_with_the_mend(change, said):
    installed = {name: version for name, version in (GOOD | change).items() if version is not None}
    [finding] = check_versions(REQUIREMENTS, installed)
    assert finding.status is Status.FAIL
    assert said in finding.found
    assert "pip install --no-deps" in finding.fix


def test_a_package_that_declares_nothing_is_no_pass():
    assert [finding.status for finding in check_versions([], GOOD)] == [Status.WARNING]


def test_this_checkout_declares_what_a_run_imports_and_no_developers_tool():
    names = " ".join(declared())
    for package in ("torch", "megatron-core", "ray", "sglang", "pydantic", "typer"):
        assert package in names
    assert "pytest" not in names
    assert "transformer-engine" not in names


def test_without_a_checkout_the_metadata_counts(tmp_path, monkeypatch):
    told = ["pyyaml>=6", 'torch<2.14; extra == "cpu"', 'pytest>=9; extra == "dev"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: told)
    assert [text.partition(";")[0] for text in declared(tmp_path / "pyproject.toml")] == ["pyyaml>=6", "torch<2.14"]


def test_another_version_than_the_locks_is_a_warning(tmp_path):
    lock = tmp_path / "py311.lock.txt"
    lock.write_text("# a comment\ntorch==2.13.0  # 200 MB\nsglang==0.5.16\nabsent==1.0\npip==26.3\n")
    finding = check_lock(lock, GOOD | {"pip": "23.2"})
    assert finding.status is Status.WARNING
    assert "sglang 0.5.17 (locked 0.5.16)" in finding.found
    assert "torch" not in finding.found
    assert "pip" not in finding.found
    assert check_lock(lock, {"torch": "2.13.0"}).status is Status.PASS
    assert check_lock(Path("nowhere.lock.txt"), GOOD).status is Status.PASS


def test_the_committed_lock_can_be_read():
    assert check_lock(lock_of({}), {"torch": "0.1"}).status is Status.WARNING


def test_a_gpu_install_is_compared_with_the_lock_of_gpu_nodes(tmp_path):
    assert lock_of({"sglang-kernel": "0.4.5"}).name.startswith("gpu3")
    lock = tmp_path / "gpu312.lock.txt"
    lock.write_text("torch==2.11.0\n")
    assert check_lock(lock, {"torch": "2.11.0+cu130"}).status is Status.PASS
    assert "make clean-venv install-gpu" in check_lock(lock, {"torch": "2.13.0"}).fix


def test_pythons():
    assert check_python((3, 12)).status is Status.PASS
    assert check_python((3, 13)).status is Status.FAIL
