"""Ranks and servers on Ray nodes that claim GPUs: who gets which, and what happens when a node is lost."""

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.cluster.fake_gpus"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360)
    line = next((line for line in finished.stdout.splitlines() if line.startswith("{")), None)
    assert line, finished.stdout[-4000:] + finished.stderr[-4000:]
    return json.loads(line)


def test_ranks_are_numbered_by_node_and_gpu_whatever_order_ray_gives_them(found):
    ranks = sorted(found["ranks"])
    assert [rank for rank, _, _ in ranks] == list(range(8))
    assert [gpu for _, _, gpu in ranks] == ["0", "1", "2", "3"] * 2
    nodes = [node for _, node, _ in ranks]
    assert len(set(nodes)) == 2
    assert nodes[:4] == [nodes[0]] * 4
    assert nodes[4:] == [nodes[4]] * 4


def test_a_start_ends_with_a_forward_of_the_longest_sequence_on_every_rank(found):
    """So that what is broken or too large on a GPU is known before the first rollout."""
    assert found["asked"] == [[[4, 128]]] * 8


def test_a_colocated_server_is_on_the_node_and_the_gpus_of_its_ranks(found):
    ranks = sorted(found["ranks"])
    expected = [f"http://{ranks[at][1]}/{ranks[at][2]},{ranks[at + 1][2]}" for at in range(0, 8, 2)]
    assert found["servers"] == expected


def test_other_servers_can_be_started_again_while_one_has_no_node(found):
    before, after = found["replaced"]["other"]
    assert before == after


def test_a_server_whose_node_is_lost_says_what_it_waits_for_and_moves_to_a_node_that_joins(found):
    replaced = found["replaced"]
    assert "its node is gone, and no other node of the Ray cluster has room" in replaced["words"]
    assert replaced["added"] != replaced["lost"]
    assert replaced["now"] == f"http://{replaced['added']}/0,1"


def test_a_server_on_two_nodes_has_all_gpus_of_both_and_meets_on_the_first(found):
    for places in (found["divided"]["before"], found["divided"]["after"]):
        parts = [url.split("/") for url, _ in places]
        assert [part[3] for part in parts] == ["0,1,2,3"] * 2
        assert parts[0][2] != parts[1][2], "two nodes"
        assert {part[4] for part in parts} == {f"meeting.{parts[0][2]}:1"}
    assert found["divided"]["url"] == found["divided"]["after"][0][0], "the first answers"


def test_a_server_that_loses_one_of_its_nodes_starts_again_whole(found):
    before, after = found["divided"]["before"], found["divided"]["after"]
    assert before[1][0].split("/")[2] not in after[0][0] + after[1][0], "it moved from the lost node"
    assert not {pid for _, pid in before} & {pid for _, pid in after}, "also its other part is a new process"
