"""Names, interfaces, InfiniBand, variables and ports of a made-up node: as they should be, and each at fault."""

import resource
import shutil
import socket
from dataclasses import replace

import pytest

from megatron_dapo.doctor import network
from megatron_dapo.doctor.probing import Node, Status
from rollout.server import engine

PASS, WARNING, FAIL = Status.PASS, Status.WARNING, Status.FAIL


def no_address(*_):
    raise OSError("none")


def host(machine, *, several=True):
    finding = network.check_host(machine.node, several=several)
    return finding.status, finding.found


def test_a_name_with_an_address_passes(machine):
    assert host(machine) == (PASS, "node7 is 10.0.0.7")


@pytest.mark.parametrize(
    ("resolve", "said"),
    [
        (lambda name: "127.0.1.1", "node7 resolves to 127.0.1.1"),
        (lambda name: "::1", "node7 resolves to ::1"),
        (no_address, "node7 resolves to nothing"),
    ],
)
def test_a_name_that_is_loopback_fails_where_nodes_must_meet(resolve, said, machine):
    machine.node = replace(machine.node, resolve=resolve)
    status, found = host(machine)
    assert status is FAIL
    assert said in found
    assert host(machine, several=False)[0] is WARNING
    machine.set(GLOO_SOCKET_IFNAME="eth0")
    assert host(machine)[0] is WARNING, "gloo listens on the interface"


def test_without_a_route_ray_takes_the_name_too(machine):
    machine.node = replace(machine.node, resolve=lambda name: "127.0.1.1", outgoing=no_address)
    machine.set(GLOO_SOCKET_IFNAME="eth0")
    status, found = host(machine)
    assert status is FAIL
    assert "no default route" in found


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "SLURM_NNODES"])
def test_a_cluster_is_several_nodes(name, machine):
    machine.node = replace(machine.node, resolve=lambda name: "127.0.1.1")
    assert [status for status, _, _ in machine.problems()] == [WARNING]
    machine.set(**{name: "10.0.0.1:6379" if name == "RAY_ADDRESS" else "4"})
    assert [status for status, _, _ in machine.problems()] == [FAIL]


def test_an_empty_number_of_nodes_is_one_node(machine):
    machine.node = replace(machine.node, resolve=lambda name: "127.0.1.1")
    machine.set(SLURM_NNODES="")
    assert [status for status, _, _ in machine.problems()] == [WARNING]


@pytest.mark.parametrize(
    ("variable", "value", "status", "said"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", PASS, "eth0"),
        ("NCCL_SOCKET_IFNAME", "=ib0,eth0", PASS, "eth0, ib0"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", PASS, "eth0, ib0"),
        ("NCCL_SOCKET_IFNAME", "bond0,ib", PASS, "ib0"),
        ("NCCL_SOCKET_IFNAME", "bond0", FAIL, "not there"),
        ("NCCL_SOCKET_IFNAME", "=eth", FAIL, "not there"),
        ("NCCL_SOCKET_IFNAME", "docker", FAIL, "docker0 is down"),
        ("GLOO_SOCKET_IFNAME", "eth0", PASS, "eth0"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", PASS, "eth0, ib0"),
        ("GLOO_SOCKET_IFNAME", "eth", FAIL, "not there"),
        ("GLOO_SOCKET_IFNAME", "eth0,bond0", FAIL, "not there"),
    ],
)
def test_an_interface_that_is_named_must_be_there(variable, value, status, said, machine):
    machine.set(**{variable: value})
    [finding] = network.check_interfaces(machine.node)
    assert finding.status is status
    assert said in finding.found
    assert status is PASS or "eth0" in finding.fix


def test_without_a_named_interface_there_is_nothing_to_say(machine):
    assert list(network.check_interfaces(machine.node)) == []


def infiniband(machine):
    return [(finding.status, finding.found) for finding in network.check_infiniband(machine.node)]


def test_adapters_that_are_up_pass(machine):
    assert infiniband(machine) == [(PASS, "InfiniBand or RoCE ports up: mlx5_0:1"), (PASS, "no limit")]


def test_no_adapter_is_a_warning(machine):
    shutil.rmtree(machine.root / "sys/class/infiniband")
    [finding] = network.check_infiniband(machine.node)
    assert (finding.status, finding.found.partition(":")[0]) == (WARNING, "no InfiniBand or RoCE adapter")
    assert finding.fix.startswith("load the adapter's driver"), "what to do, not what follows"


def test_ports_that_are_down_are_a_warning(machine):
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT\n")
    assert infiniband(machine)[0] == (WARNING, "no port of an adapter is up: mlx5_0:1 2: INIT, mlx5_1:1 1: DOWN")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("mlx5", PASS),
        ("=mlx5_0:1", PASS),
        ("^mlx5_1", PASS),
        ("mlx4", WARNING),
        ("=mlx5_1", WARNING),
        ("^mlx5", WARNING),
    ],
)
def test_adapters_that_nccl_is_told_to_take(value, status, machine):
    machine.set(NCCL_IB_HCA=value)
    assert infiniband(machine)[0][0] is status


def test_a_container_without_the_devices_is_a_warning(machine):
    (machine.root / "dev/infiniband/uverbs0").unlink()
    [(status, found), _] = infiniband(machine)
    assert status is WARNING
    assert "uverbs" in found


def test_little_locked_memory_is_a_warning(machine):
    machine.node = replace(machine.node, locked_memory=64 * 1024)
    assert infiniband(machine)[1] == (WARNING, "at most 64 KiB; InfiniBand locks NCCL's buffers")
    assert replace(machine.node, locked_memory=resource.RLIM_INFINITY).locked_memory == resource.RLIM_INFINITY


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING"])
def test_a_variable_that_makes_nccl_slow_is_a_warning(name, machine):
    machine.set(**{name: "1"})
    [finding] = network.check_variables(machine.node, ())
    assert finding.status is WARNING
    assert finding.found.startswith(f"{name} = 1")
    machine.set(**{name: "0"})
    assert [finding.status for finding in network.check_variables(machine.node, ())] == [PASS]


def test_servers_with_another_nccl_setting_than_the_trainer_are_a_warning(machine):
    def found(*flags):
        return [finding.found for finding in network.check_variables(machine.node, flags) if finding.status is WARNING]

    assert found("--enable-symm-mem") == [], "the run then sets both for the trainer too"
    machine.set(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="0")
    assert found() == [], "servers take what is set"
    assert [text.split()[0] for text in found("--enable-symm-mem")] == ["NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"]
    assert [text.split()[0] for text in found("--enable-nccl-nvls")] == ["NCCL_NVLS_ENABLE"]
    machine.set(NCCL_CUMEM_ENABLE="1", NCCL_NVLS_ENABLE="1")
    assert found("--enable-symm-mem") == []


LISTENING = "   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000\n"


def port_range(machine):
    return [(finding.status, finding.found) for finding in network.check_port_range(machine.node)]


def test_ports_that_the_kernel_gives_away_are_a_warning(machine):
    assert port_range(machine) == [], "a system without /proc"
    machine.write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    assert port_range(machine) == []
    machine.write("proc/sys/net/ipv4/ip_local_port_range", "1024\t65535\n")
    [(status, found)] = port_range(machine)
    assert status is WARNING
    assert "gives 1024-65535" in found


def test_a_range_that_is_taken_is_a_warning(machine):
    rows = [LISTENING.format(port=port, state="0A") for port in network.PORTS[:7000]]
    machine.write("proc/net/tcp", "  sl  local_address\n" + "".join(rows))
    assert port_range(machine) == [(WARNING, "7000 ports of 20000-32767 are taken")]
    connected = [row.replace(" 0A ", " 01 ") for row in rows]
    machine.write("proc/net/tcp", "  sl  local_address\n" + "".join(connected))
    assert port_range(machine) == [], "connections that go out"


def test_the_ranges_are_those_that_the_run_takes():
    assert engine._PORTS == network.PORTS


def test_this_machine_can_be_asked():
    node = Node()
    assert node.host == socket.gethostname()
    assert network.check_host(node, several=False).status in (PASS, WARNING)
    assert all(finding.status is not FAIL for finding in network.check_port_range(node))
