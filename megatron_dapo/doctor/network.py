"""How GPU nodes find and reach each other: names, interfaces, InfiniBand, NCCL's variables, ports."""

import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress

from megatron_dapo.config import Config
from megatron_dapo.doctor.probing import Finding, Node, failed, passed, warning

PORTS = range(20000, 32768)
"""From which servers and trainer ranks take theirs (rollout.server.engine, cluster.trainer)."""

_NET = "sys/class/net"
_INFINIBAND = "sys/class/infiniband"
_LISTENING = "0A"
_SAME = {"NCCL_CUMEM_ENABLE": ("--enable-symm-mem",), "NCCL_NVLS_ENABLE": ("--enable-nccl-nvls", "--enable-symm-mem")}
"""Variables that must be equal in trainer and servers, and the options by which SGLang sets them to 1 in any case."""

_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of this node talk through host memory, not NVLink",
    "NCCL_SHM_DISABLE": "ranks of this node talk over the network",
    "NCCL_IB_DISABLE": "nodes talk over TCP, not InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
}


def check_host(node: Node, *, several: bool) -> Finding:
    """The node's name and its address towards others. Gloo listens on the address of the name; Ray, where there is no
    route to the outside.

    Args:
        several: the run is on several nodes.
    """
    address = outside = ""
    with suppress(OSError):
        address = node.resolve(node.host)
    with suppress(OSError):
        outside = node.outgoing()
    if address and address != "::1" and not address.startswith("127."):
        return passed("host name", f"{node.host} is {address}")
    found = f"{node.host} resolves to {address or 'nothing'}{'' if outside else ', and there is no default route'}"
    fix = f"give {node.host} its address in /etc/hosts, and no line with 127.0.1.1; or set GLOO_SOCKET_IFNAME"
    helped = bool(outside) and "GLOO_SOCKET_IFNAME" in node.environment
    if several and not helped:
        return failed("host name", f"{found}: other nodes cannot meet this one", fix)
    return warning("host name", f"{found}: a run on several nodes would not meet", fix)


def check_interfaces(node: Node) -> Iterator[Finding]:
    """What NCCL_SOCKET_IFNAME (beginnings of names, `=` exact, `^` all others) and GLOO_SOCKET_IFNAME (names) say."""
    there = [name for name in node.names(_NET) if name != "lo"]
    for variable, exact in (("NCCL_SOCKET_IFNAME", False), ("GLOO_SOCKET_IFNAME", True)):
        value = node.environment.get(variable)
        if not value or value == "lo":
            continue
        chosen = [name for name in there if _selects(value, name, exact=exact)]
        up = [name for name in chosen if node.text(f"{_NET}/{name}/operstate") != "down"]
        if up and (not exact or len(chosen) == len(value.split(","))):
            yield passed("interfaces", f"{variable} = {value}: {', '.join(up)}")
            continue
        what = f"{', '.join(chosen)} is down" if chosen and not up else "names an interface that is not there"
        yield failed("interfaces", f"{variable} = {value}: {what}", f"take one of {', '.join(there) or 'none'}")


def _selects(value: str, name: str, *, exact: bool) -> bool:
    """Whether a list as NCCL reads it selects `name`; a `:port` behind a name is left out."""
    others, words = value.startswith("^"), value.lstrip("^")
    exact = exact or words.startswith("=")
    names = [word.partition(":")[0] for word in words.lstrip("=").split(",")]
    return any(name == word if exact else name.startswith(word) for word in names) != others


def check_infiniband(node: Node) -> Iterator[Finding]:
    """Adapters of this node, whether a port of one is up, whether NCCL may use it."""
    adapters = node.names(_INFINIBAND)
    if not adapters:
        fix = "load the adapter's driver (lspci lists the hardware), or keep a run on one node"
        yield warning("network", "no InfiniBand or RoCE adapter: several nodes talk over TCP, which is slow", fix)
        return
    states = {
        f"{adapter}:{port}": node.text(f"{_INFINIBAND}/{adapter}/ports/{port}/state")
        for adapter in adapters
        for port in node.names(f"{_INFINIBAND}/{adapter}/ports")
    }
    active = [port for port, state in states.items() if state.endswith("ACTIVE")]
    chosen = node.environment.get("NCCL_IB_HCA", "^")
    used = [port for port in active if chosen == "^" or _selects(chosen, port.partition(":")[0], exact=False)]
    if not active:
        shown = ", ".join(f"{port} {state}" for port, state in states.items())
        fix = "check cable, switch and subnet manager (ibstat)"
        yield warning("network", f"no port of an adapter is up: {shown}", fix)
    elif not used:
        found = f"NCCL_IB_HCA = {chosen} selects none of {', '.join(active)}"
        yield warning("network", found, "correct it or unset it, else nodes talk over TCP")
    elif not any(name.startswith("uverbs") for name in node.names("dev/infiniband")):
        found = f"{', '.join(used)} up, but no /dev/infiniband/uverbs*: this container cannot use it"
        yield warning("network", found, "give the container /dev/infiniband (docker: --device /dev/infiniband)")
    else:
        yield passed("network", f"InfiniBand or RoCE ports up: {', '.join(used)}")
    if node.locked_memory != resource.RLIM_INFINITY:
        found = f"at most {node.locked_memory / 1024:.0f} KiB; InfiniBand locks NCCL's buffers"
        yield warning("locked memory", found, "ulimit -l unlimited before the run (docker: --ulimit memlock=-1)")
    else:
        yield passed("locked memory", "no limit")


def check_variables(node: Node, extra_args: Sequence[str]) -> Iterator[Finding]:
    """Variables that make NCCL slow, or another one in the servers than in the trainer.

    Args:
        extra_args: config's rollout.extra_args.
    """
    wrong = [
        warning("environment", f"{name} = 1: {what}", f"unset {name}")
        for name, what in _SLOW.items()
        if node.environment.get(name) == "1"
    ]
    for name, flags in _SAME.items():
        value = node.environment.get(name, "1")
        flag = next((flag for flag in flags if flag in extra_args), None)
        if flag and value != "1":
            found = f"{name} = {value} for the trainer, while {flag} makes it 1 in servers"
            wrong.append(warning("environment", found, f"unset {name}: NCCL cannot join the two"))
    yield from wrong or [passed("environment", "no variable of NCCL or CUDA is in the way")]


def check_port_range(node: Node) -> Iterator[Finding]:
    """Whether the kernel gives ports of `PORTS` to outgoing connections, and how many are taken."""
    span = node.text("proc/sys/net/ipv4/ip_local_port_range").split()
    shown = f"{PORTS.start}-{PORTS.stop - 1}"
    if len(span) == 2 and int(span[0]) < PORTS.stop and int(span[1]) >= PORTS.start:
        found = f"servers and ranks listen on {shown}; the kernel gives {'-'.join(span)} to outgoing connections"
        fix = f"sysctl net.ipv4.ip_local_port_range='{PORTS.stop} 60999', or ip_local_reserved_ports={shown}"
        yield warning("port range", found, fix)
    rows = [line.split() for name in ("tcp", "tcp6") for line in node.text(f"proc/net/{name}").splitlines()[1:]]
    listening = {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTENING}
    taken = len(listening.intersection(PORTS))
    if taken > len(PORTS) // 2:
        yield warning("port range", f"{taken} ports of {shown} are taken", "end what listens there (ss -ltnp)")


def check_network(node: Node, config: Config | None, *, several: bool) -> Iterator[Finding]:
    """All of these on a GPU node."""
    yield check_host(node, several=several)
    yield from check_interfaces(node)
    yield from check_infiniband(node)
    yield from check_variables(node, () if config is None else config.rollout.extra_args)
