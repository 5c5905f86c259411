"""GPUs and links, from what nvidia-smi would print; no GPU is needed, and none was asked."""

import shutil

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.doctor import hardware
from megatron_dapo.doctor.examine import examine, on_gpus
from megatron_dapo.doctor.hardware import check_collectives, check_gpus, check_interconnect, gpus_of, probe_gpus
from megatron_dapo.doctor.probing import Status
from megatron_dapo.plan.scenario import changed
from tests.plan.conftest import RECIPES

H100 = "NVIDIA H100 80GB HBM3, 81559, {used}, 580.65.06, Default, Disabled, 0\n"
HERE = {"on_cluster": False, "cores": 64}
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
    return gpus_of("".join(H100.format(used=one) for one in used))


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
    mixed = [*gpus(*[4] * 7), *gpus_of("NVIDIA A100, 81920, 3, 580, Default, [N/A], [N/A]\n")]
    assert statuses(check_gpus(mixed, config, on_cluster=False, cores=64)) == [Status.WARNING]


def test_without_a_gpu_the_cpu_takes_what_it_can_hold(config):
    small = changed(config, {"actor.layout.tensor": 2, "actor.layout.sequence_parallel": False, "rollout.servers": 1})
    assert gpus_of("") == []
    assert statuses(check_gpus([], small, on_cluster=False, cores=2)) == [Status.PASS]
    assert statuses(check_gpus([], config, on_cluster=False, cores=2)) == [Status.FAIL]
    cuda = changed(small, {"actor.device": "cuda"})
    assert statuses(check_gpus([], cuda, on_cluster=False, cores=2)) == [Status.FAIL]


@pytest.mark.parametrize(("link", "status"), [("NV18", Status.PASS), ("SYS", Status.WARNING), ("PHB", Status.WARNING)])
def test_gpus_without_nvlink_between_them_are_a_warning(link, status):
    [found] = check_interconnect(TOPOLOGY.format(link=link))
    assert found.status is status
    assert link in found.found


def test_without_a_gpu_there_is_no_link_to_speak_of():
    assert list(check_interconnect("")) == []


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (("Default", "Prohibited"), Status.FAIL, "compute mode of 0 is Prohibited"),
        (("Default", "Exclusive_Process"), Status.WARNING, "Exclusive_Process"),
        (("Disabled", "Enabled"), Status.WARNING, "MIG is on for 0"),
        ((", 0\n", ", 3\n"), Status.WARNING, "uncorrected memory errors on 0"),
    ],
)
def test_a_gpu_that_cannot_be_used_as_it_is(change, status, said):
    found = list(check_gpus(gpus_of(H100.format(used=4).replace(*change)), None, **HERE))
    assert statuses(found) == [status]
    assert said in found[0].found
    assert "nvidia-smi" in found[0].fix


def test_two_processes_a_gpu_need_a_gpu_that_takes_two(config):
    exclusive = gpus_of(H100.format(used=4).replace("Default", "Exclusive_Process") * 8)
    assert statuses(check_gpus(exclusive, config, **HERE)) == [Status.WARNING]
    colocated = changed(config, {"run.mode": "colocated"})
    assert statuses(check_gpus(exclusive, colocated, **HERE)) == [Status.FAIL]


def test_what_a_gpu_does_not_report_counts_as_none():
    [gpu] = gpus_of("NVIDIA GB10, [N/A], [N/A], 580.95.05, Default, [N/A], [N/A]\n")
    assert (gpu.memory, gpu.used, gpu.uncorrected, gpu.mig) == (0.0, 0.0, 0, False)
    assert statuses(check_gpus([gpu], None, **HERE)) == [Status.PASS]


def test_collectives_of_this_torch():
    assert check_collectives().status is Status.PASS


@pytest.mark.parametrize(
    ("device", "visible", "applies"),
    [("auto", True, True), ("auto", False, False), ("cuda", False, True), ("cpu", True, False)],
)
def test_when_the_checks_of_a_gpu_node_apply(device, visible, applies, config):
    assert on_gpus(changed(config, {"actor.device": device}), gpus(4) if visible else []) is applies


def test_without_a_config_gpus_decide():
    assert on_gpus(None, gpus(4))
    assert not on_gpus(None, [])


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        (
            "echo 'NVIDIA-SMI has failed: no communication with the driver.'; exit 9",
            Status.FAIL,
            "nvidia-smi is here but ends with 9: NVIDIA-SMI has failed: no communication with the driver.",
        ),
        ("exec sleep 60", Status.FAIL, "nvidia-smi is here but gives no answer within 1 s"),
        ("echo Unknown Error", Status.FAIL, "nvidia-smi is here but lists no GPU that can be read: Unknown Error"),
        ("exit 0", Status.FAIL, "nvidia-smi is here but lists no GPU that can be read: no output"),
        ("echo 'No devices were found'; exit 6", Status.WARNING, "nvidia-smi is here but finds no device"),
        ("echo 'No devices were found'", Status.WARNING, "nvidia-smi is here but finds no device"),
    ],
)
def test_a_driver_that_lists_no_gpu_is_no_pass(script, status, found, machine, monkeypatch):
    sleep = shutil.which("sleep")
    machine.program("nvidia-smi", f"#!/bin/sh\n{script.replace('sleep', sleep)}\n")
    hangs = "sleep" in script
    monkeypatch.setattr(hardware, "ASK_DEADLINE_S", 1.0 if hangs else 30.0)
    of_gpus = [finding for finding in examine(None, machine.node) if finding.check == "GPUs"]
    assert (of_gpus[0].status, of_gpus[0].found) == (status, found)
    if status is Status.FAIL:
        assert len(of_gpus) == 1, "no second line that passes"
        assert "drain the node" in of_gpus[0].fix
        assert "reload the driver" in of_gpus[0].fix


def test_an_nvidia_smi_that_cannot_be_started_fails(machine):
    machine.program("nvidia-smi", "\0")
    gpus, trouble = probe_gpus(machine.node)
    assert gpus == []
    assert trouble.status is Status.FAIL
    assert "Exec format error" in trouble.found


def test_a_run_on_the_cpu_needs_no_driver(config, machine):
    machine.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
    small = changed(config, {"actor.device": "cpu", "actor.layout.tensor": 1, "actor.layout.sequence_parallel": False})
    shown = [(finding.status, finding.found) for finding in examine(small, machine.node) if finding.check == "GPUs"]
    assert "nvidia-smi" not in str(shown)


def test_without_nvidia_smi_there_is_nothing_to_say(machine):
    (machine.programs / "nvidia-smi").unlink()
    assert probe_gpus(machine.node) == ([], None)


@pytest.mark.parametrize("memory", ["1.2.3", "."])
def test_a_cell_that_is_no_number_counts_as_none(memory):
    [gpu] = gpus_of(f"NVIDIA H100, 81559, {memory}, 580.65.06, Default, Disabled, 0\n")
    assert gpu.used == 0.0
