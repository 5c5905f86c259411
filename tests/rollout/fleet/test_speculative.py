"""Servers that draft tokens: what they are started with, which weights they get and how, what is verified of them."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import ConfigError, load_config
from rollout.config import RolloutConfig, SpeculativeConfig
from rollout.errors import ServerUnfit, WeightMismatch
from rollout.fleet.fleet import RolloutFleet
from rollout.server import launch_server
from rollout.server.server_command import server_arguments
from rollout.weights.checksums import expected_checksums
from rollout.weights.sender import Sent
from rollout.weights.transport import Failure, Target
from tests.config.conftest import MINIMAL
from tests.rollout.fleet.test_fleet_stream import FromMemory
from tests.rollout.fleet_kit import FAST, fleet_of, request, run, until
from tests.rollout.server.test_launch import sglang_text, spec, value
from tests.rollout.standin import StandIn

NGRAM = SpeculativeConfig(algorithm="ngram")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(MINIMAL)
    return file


def drafting() -> StandIn:
    server = StandIn()
    server.says = {"speculative_algorithm": "NGRAM"}
    return server


def test_without_the_key_no_argument_says_anything_of_it() -> None:
    assert "specul" not in " ".join(server_arguments(RolloutConfig(), spec(device="cuda"), 31000))


def test_sglangs_arguments_follow_from_the_keys() -> None:
    config = RolloutConfig(speculative=SpeculativeConfig(algorithm="eagle3", draft_model="draft", draft_tokens=5))
    arguments = server_arguments(config, spec(device="cuda", draft_model=Path("/draft"), shares_memory=True), 31000)
    assert value(arguments, "--speculative-algorithm") == "EAGLE3"
    assert value(arguments, "--speculative-draft-model-path") == "/draft"
    chain = [value(arguments, f"--speculative-{name}") for name in ("num-draft-tokens", "num-steps", "eagle-topk")]
    assert chain == ["5", "4", "1"], "a chain of four and the token that follows in any case"
    assert "--enable-draft-weights-cpu-backup" in arguments
    config = RolloutConfig(speculative=SpeculativeConfig(algorithm="ngram", draft_tokens=8))
    arguments = server_arguments(config, spec(device="cuda"), 31000)
    given = {word: value(arguments, word) for word in arguments if word.startswith("--speculative")}
    assert given == {"--speculative-algorithm": "NGRAM", "--speculative-num-draft-tokens": "8"}


def test_sglang_does_what_the_code_relies_on() -> None:
    """By its text: nobody without a GPU can see it run."""
    names = sglang_text("speculative/spec_info.py").partition("class SpeculativeAlgorithm")[2].partition("    def ")[0]
    assert all(re.search(rf"\b{name}\b", names) for name in ("NGRAM", "EAGLE", "EAGLE3", "STANDALONE"))
    sampling = sglang_text("speculative/eagle_utils.py")
    assert "if sampling_info.is_all_greedy or _is_cpu" in sampling, "on a CPU it draws the likeliest token alone"
    updates = sglang_text("managers/scheduler_components/weight_updater.py")
    assert "if recv_req.disable_draft_model:\n                worker = self.tp_worker" in updates
    assert 'merged_checksums[f"draft.{name}"] = chk' in updates
    assert "self.draft_worker.update_weights_from_disk(recv_req)" in updates, "a folder goes into the draft model too"
    distributed = re.search(r"def update_weights_from_distributed.*?(?=\n    def )", updates, re.DOTALL)
    assert distributed is not None
    assert "draft" not in distributed[0]
    assert "gathered_logits / temperatures" in sglang_text("layers/logprob_processor.py")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("rollout.deterministic=true", "rollout.deterministic, what a response is would depend"),
        ("rollout.weight_sync=disk", "rollout.weight_sync, such a server cannot read new weights from a folder"),
        ("rollout.urls=[http://a:1]", "rollout.urls, such a server"),
        ("actor.device=cpu", "actor.device, SGLang draws from the distribution on GPUs alone"),
    ],
)
def test_what_cannot_be_together_with_it_is_refused(config_file: Path, other: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(config_file, ["rollout.speculative.algorithm=ngram", other])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.extra_args=[--speculative-algorithm, EAGLE]", "set rollout.speculative.algorithm"),
        ("rollout.extra_args=[--speculative-accept-threshold-acc, '0.9']", "not be drawn from the model"),
        ("rollout.speculative.draft_tokens=4", "draft_tokens: rollout.speculative.algorithm = off reads neither"),
        ("rollout.speculative.algorithm=eagle", "set rollout.speculative.draft_model too"),
        ("rollout.speculative={algorithm: ngram, draft_model: x}", "draft_model = x: ngram drafts without a model"),
    ],
)
def test_keys_that_say_too_little_or_too_much_are_refused(config_file: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(config_file, [override])


@pytest.mark.parametrize(
    ("more", "way"), [([], "distributed"), (["run.mode=colocated", "actor.offload.between_phases=all"], "tensor")]
)
def test_weights_never_go_by_a_folder(config_file: Path, more: list[str], way: str) -> None:
    config = load_config(config_file, ["rollout.speculative.algorithm=ngram", *more])
    assert config.way_of_weights(on_gpus=True) == way
    assert config.way_of_weights(on_gpus=True, shared=True) == way


@pytest.mark.parametrize(("says", "key"), [({"speculative_algorithm": "EAGLE"}, NGRAM), ({}, NGRAM)])
def test_a_server_that_drafts_in_another_way_ends_the_start(says: dict[str, Any], key: SpeculativeConfig) -> None:
    async def test() -> None:
        server = StandIn()
        server.says = says
        fleet = RolloutFleet(RolloutConfig(speculative=key), [server], vocab_size=9, report=print, timing=FAST)
        with pytest.raises(ServerUnfit, match=r"rollout\.speculative\.algorithm = ngram; make them equal"):
            await fleet.start(5.0)

    run(test)


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_missed_weights_starts_again_with_them(folders: list[Path], answers: bool) -> None:
    async def test() -> None:
        servers = [drafting(), drafting()]
        async with fleet_of(*servers, speculative=NGRAM) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            stream = FromMemory(folders[1], *servers)
            stream.fails = {servers[0].url: Failure(reason="the group broke", answers=answers)}
            await fleet.publish_stream(stream, 2)
            await until(lambda: all(seen.state == "ready" for seen in fleet.members))
            assert [server.starts for server in servers] == [2, 1]
            assert (servers[0].loaded, servers[0].label) == (folders[1], "2")
            assert not [call for server in servers for call in server.calls if call.startswith("update")]
            assert {seen.weight_version for seen in fleet.members} == {2}
            assert set((await fleet.generate(request())).weight_versions) == {2}

    run(test)


def test_one_that_started_while_new_weights_came_starts_once_more(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [drafting(), drafting()]
        async with fleet_of(*servers, speculative=NGRAM) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            servers[0].may_start.clear()
            await servers[0].die()
            await until(lambda: servers[0].starts == 2)
            await fleet.publish_stream(FromMemory(folders[1], *servers), 2)
            servers[0].may_start.set()
            await until(lambda: all(seen.state == "ready" for seen in fleet.members))
            assert servers[0].starts == 3
            assert (servers[0].loaded, servers[0].label) == (folders[1], "2")

    run(test)


class KnowsSums(FromMemory):
    """The trainer knows this kind of server: nothing is read from disk until one starts."""

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        sent = await super().send(targets, label, more=more)
        return replace(sent, checksums={one.info: expected_checksums(self.folder, one.info) for one in targets})


def test_none_starts_in_memory_that_became_the_trainers_while_its_weights_were_written(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [drafting(), drafting()]
        async with fleet_of(*servers, speculative=NGRAM) as fleet:
            stream = KnowsSums(folders[0], *servers)
            stream.may_write.clear()
            await fleet.publish_stream(stream, 1)
            await servers[0].die()
            await until(lambda: fleet.members[0].state == "down")
            await asyncio.sleep(0.1)
            await fleet.release_memory()
            stream.may_write.set()
            await until(lambda: stream.written == 1)
            await asyncio.sleep(0.1)
            assert servers[0].starts == 1
            await fleet.resume_memory()
            await until(lambda: all(seen.state == "ready" for seen in fleet.members))
            assert (servers[0].starts, servers[0].loaded) == (2, folders[0])

    run(test)


def test_a_draft_model_that_a_publish_changed_is_found(folders: list[Path]) -> None:
    async def test() -> None:
        server = drafting()
        server.draft = {"model.embed_tokens.weight": "the model's", "fc.weight": "a" * 16}
        async with fleet_of(server, speculative=NGRAM) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], server), 1)
            await fleet.publish_stream(FromMemory(folders[1], server), 2)  # the embedding is shared, and follows
            server.draft = {**server.draft, "fc.weight": "b" * 16}
            with pytest.raises(WeightMismatch, match=r"its draft model: .*draft\.fc\.weight"):
                await fleet.publish_stream(FromMemory(folders[0], server), 3)

    run(test)


def test_a_draft_may_know_fewer_positions_than_the_model() -> None:
    """SGLang gives it the model's context length and refuses one that its config does not have."""
    variable = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    config = RolloutConfig(speculative=SpeculativeConfig(algorithm="eagle3", draft_model="draft", draft_tokens=5))
    for device in ("cuda", "cpu"):
        drafting = server_arguments(config, spec(device=device, dtype="bfloat16", draft_model=Path("/draft")), 31000)
        assert launch_server.environment(drafting)[variable] == "1"
        plain = server_arguments(RolloutConfig(), spec(device=device, dtype="bfloat16"), 31000)
        assert variable not in launch_server.environment(plain), "the model's own positions count"
    assert f"{variable} = EnvBool" in sglang_text("environ.py")
