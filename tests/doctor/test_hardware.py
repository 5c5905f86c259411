"""GPUs and links, from what nvidia-smi would print; no GPU is needed, and none was asked."""

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.doctor.hardware import check_collectives, check_gpus, check_interconnect, visible_gpus
from megatron_dapo.doctor.result import Status
from megatron_dapo.plan.alternatives import changed
from tests.plan.conftest import RECIPES

H100 = "NVIDIA H100 80GB HBM3, 81559, {used}, 580.65.06\n"
TOPOLOGY = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \t{link}\tPIX\t0-31\t0\n"
    "GPU1\t{link}\t X \tNODE\t0-31\t0\n"
    "NIC0\tPIX\tNODE\t X \t\t\n"
)


@pytest.fixture(scope="module")
def config():
    """Four GPUs train, four generate."""
    return load_config(RECIPES / "qwen2.5_7b_8gpu.yaml")


def gpus(*used: int):
    return visible_gpus(lambda command: "".join(H100.format(used=one) for one in used))


def statuses(findings) -> list[Status]:
    return [finding.status for finding in findings]


def test_enough_free_gpus_pass(config):
    [finding] = check_gpus(gpus(*[4] * 8), config, on_cluster=False, cores=64)
    assert finding.status is Status.PASS
    assert "8 x NVIDIA H100" in finding.found


def test_too_few_fail_unless_other_nodes_share_the_run(config):
    [finding] = check_gpus(gpus(4, 4), config, on_cluster=False, cores=64)
    assert finding.status is Status.FAIL
    assert "need 8" in finding.found
    assert statuses(check_gpus(gpus(4, 4), config, on_cluster=True, cores=64)) == [Status.PASS]


def test_servers_that_someone_else_runs_need_none_here(config):
    outside = changed(config, {"rollout.urls": ("http://elsewhere:30000",)})
    assert statuses(check_gpus(gpus(*[4] * 4), outside, on_cluster=False, cores=64)) == [Status.PASS]


def test_memory_in_use_and_a_second_kind_are_warnings(config):
    [finding] = check_gpus(gpus(4, 60000, *[4] * 6), config, on_cluster=False, cores=64)
    assert finding.status is Status.WARNING
    assert "number 1" in finding.found
    mixed = [*gpus(*[4] * 7), *visible_gpus(lambda command: "NVIDIA A100, 81920, 3, 580\n")]
    assert statuses(check_gpus(mixed, config, on_cluster=False, cores=64)) == [Status.WARNING]


def test_without_a_gpu_the_cpu_takes_what_it_can_hold(config):
    small = changed(config, {"actor.layout.tensor": 2, "actor.layout.sequence_parallel": False, "rollout.servers": 1})
    assert visible_gpus(lambda command: None) == []
    assert statuses(check_gpus([], small, on_cluster=False, cores=2)) == [Status.PASS]
    assert statuses(check_gpus([], config, on_cluster=False, cores=2)) == [Status.FAIL]
    cuda = changed(small, {"actor.device": "cuda"})
    assert statuses(check_gpus([], cuda, on_cluster=False, cores=2)) == [Status.FAIL]


@pytest.mark.parametrize(("link", "status"), [("NV18", Status.PASS), ("SYS", Status.WARNING), ("PHB", Status.WARNING)])
def test_gpus_without_nvlink_between_them_are_a_warning(link, status, tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    found = list(check_interconnect(lambda command: TOPOLOGY.format(link=link), tmp_path))
    assert statuses(found) == [status, Status.PASS]
    assert link in found[0].found
    assert "mlx5_0" in found[1].found


def test_no_adapter_is_a_warning_and_no_gpu_is_nothing_to_say(tmp_path):
    assert statuses(check_interconnect(lambda command: TOPOLOGY.format(link="NV18"), tmp_path)) == [
        Status.PASS,
        Status.WARNING,
    ]
    assert list(check_interconnect(lambda command: None, tmp_path)) == []


def test_collectives_of_this_torch():
    assert check_collectives(gpus=False).status is Status.PASS


def test_gpus_that_torch_does_not_see_fail(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check_collectives(gpus=True).status is Status.FAIL
