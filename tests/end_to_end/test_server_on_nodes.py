"""A server that is larger than a node of the Ray cluster: two processes of SGLang, of one rank each, on two nodes."""

import hashlib

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.end_to_end.joined import command, ray_nodes, server_processes
from tests.processes import ROOT, Running

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"
SMALL = (
    "run.rollout_steps=2",
    "run.checkpoint_every=0",
    "algorithm.prompts_per_step=4",
    "algorithm.mini_batch_responses=16",
    "evaluation.limit=4",
    "actor.layout.data=1",
    "rollout.servers=1",
    "rollout.tensor_parallel=2",
)
BOTH = ["0", "1"]
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")

pytestmark = pytest.mark.timeout(900)


def start(run_dir, *overrides):
    arguments = ["train", str(CONFIG), f"run.dir={run_dir}", *SMALL, *overrides]
    return Running(*arguments, log=run_dir.parent / f"{run_dir.name}.txt")


def digests(run_dir):
    """Of what was trained, and of what was written on the way."""
    files = (run_dir / "model" / "model.safetensors", run_dir / "samples.jsonl")
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.fixture(scope="module")
def address():
    """Three nodes of one CPU, each with an address of its own."""
    with ray_nodes(*(f"1@{address}" for address in ADDRESSES)) as joined:
        yield joined


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory):
    """Digests of the run with the same two ranks in one server on this machine."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    finished = start(run_dir).finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    return digests(run_dir)


def option(process, flag):
    return command(process).partition(f"{flag} ")[2].split()[0]


def parts():
    """The server's processes, by the number of their node."""
    return {option(process, "--node-rank"): process for process in server_processes()}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "killed"), [("disk", "0"), ("distributed", "1")])
def test_it_trains_to_the_same_weights_also_when_one_of_its_processes_is_lost(
    on_one_node, address, tmp_path, way, killed
):
    run_dir = tmp_path / "run"
    running = start(run_dir, f"rollout.weight_sync={way}")
    running.wait_for("held-out problems before training", 300)
    before = parts()
    assert sorted(before) == BOTH
    hosts = [option(before[rank], "--host") for rank in BOTH]
    assert set(hosts) < set(ADDRESSES)
    assert len(set(hosts)) == 2, "a node each"
    for process in before.values():
        assert option(process, "--dist-init-addr").startswith(f"{hosts[0]}:"), "they meet on the first"
    before[killed].kill()
    running.wait_for("is back with weight version", 300)
    after = parts()
    assert sorted(after) == BOTH
    assert not {process.pid for process in before.values()} & {process.pid for process in after.values()}
    finished = running.finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert "is down" in finished.output
    assert digests(run_dir) == on_one_node, "nothing is lost, and each publish reached both ranks"
    for name, rank in (("server0.log", "0"), ("server0.node1.log", "1")):
        log = (run_dir / "logs" / name).read_text()
        assert log.count(f"--nnodes 2 --node-rank {rank} --dist-init-addr {hosts[0]}:") == 2, "the start, the restart"
    assert finished.left_behind == ()
    assert not server_processes()


@pytest.mark.slow
def test_more_nodes_than_there_are_is_explained_before_anything_loads(address, tmp_path):
    finished = start(tmp_path / "run", "rollout.tensor_parallel=4").finish(60)
    assert finished.code == ExitCode.CONFIG, finished.output
    assert "no node has room for a part of a server (TP 4 on 4 nodes)" in finished.output
    assert "4 x part of a server (TP 4 on 4 nodes): 1 CPUs on one node" in finished.output
    assert finished.left_behind == ()
