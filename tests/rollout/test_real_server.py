"""Real, unmodified SGLang over HTTP, on the CPU, with tiny random models. The reference is Hugging Face's forward.

Two servers start once for the module: a deterministic Qwen3 and a fast Qwen2 (tied embeddings, biases).
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.checksums import expected_checksums, verify
from rollout.command import ServerSpec
from rollout.config import RolloutConfig
from rollout.errors import ServerRefused, ServerStartError, WeightMismatch
from rollout.fleet import RolloutFleet
from rollout.messages import FinishReason, Generation, GenerationRequest, SamplingParams
from rollout.server import LocalServer
from rollout.timing import Timing
from tests.rollout.folders import CONTEXT, VOCABULARY, save_model

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these servers are started for the CPU"),
]
T = TypeVar("T")
START_S = 300.0
# An MLP width that SGLang fills up, and an embedding that is the head.
SHAPES: dict[str, dict[str, object]] = {"qwen3": {}, "qwen2": {"tie_word_embeddings": True, "intermediate_size": 100}}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A fleet of one real server, in a loop that each test runs for a while."""

    loop: asyncio.AbstractEventLoop
    fleet: RolloutFleet
    server: LocalServer
    folder: Path
    model: torch.nn.Module
    reports: list[str]

    def run(self, work: Awaitable[T], seconds: float = START_S) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, seconds))


def make_place(
    loop: asyncio.AbstractEventLoop, root: Path, kind: str, *, deterministic: bool, **changes: object
) -> Place:
    folder, reports = root / kind, list[str]()
    model = save_model(folder, kind, seed=1, **changes)
    config = RolloutConfig(
        deterministic=deterministic, max_running_requests=64, kv_cache_tokens=32768, memory_fraction=0.5
    )
    spec = ServerSpec(
        model_path=folder,
        device="cpu",
        dtype="float32",
        context_length=CONTEXT,
        seed=3,
        log_path=root / f"{kind}.log",
    )
    server = LocalServer(config, spec)
    fleet = RolloutFleet(config, [server], vocab_size=VOCABULARY, report=reports.append)
    return Place(loop=loop, fleet=fleet, server=server, folder=folder, model=model, reports=reports)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    root, loop = tmp_path_factory.mktemp("servers"), asyncio.new_event_loop()
    made = {
        "qwen3": make_place(loop, root, "qwen3", deterministic=True, **SHAPES["qwen3"]),
        "qwen2": make_place(loop, root, "qwen2", deterministic=False, **SHAPES["qwen2"]),
    }

    async def each(action: Callable[[RolloutFleet], Awaitable[object]]) -> None:
        await asyncio.gather(*(action(place.fleet) for place in made.values()))

    try:
        loop.run_until_complete(each(lambda fleet: fleet.start(START_S)))
        groups = [place.server.process.pid for place in made.values() if place.server.process is not None]
        yield made
    finally:
        loop.run_until_complete(each(lambda fleet: fleet.close()))
        loop.close()
    assert not [process for process in psutil.process_iter() if _group(process.pid) in groups], "servers left behind"


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def requests_of(count: int, seed: int, tokens: int = 40, **sampling: object) -> list[GenerationRequest]:
    """Prompts of 1 to 300 tokens, in groups of four."""
    draw = np.random.default_rng(seed)
    lengths = draw.choice([1, 2, 9, 40, 130, 300], -(-count // 4))
    prompts = [draw.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]
    made = []
    for index in range(count):
        params = SamplingParams(max_new_tokens=int(draw.integers(1, tokens + 1)), **sampling)  # type: ignore[arg-type]
        made.append(
            GenerationRequest(
                request_id=f"{seed}/{index}",
                group_id=f"{seed}/{index // 4}",
                prompt_ids=prompts[index // 4],
                sampling=params,
                seed=int(draw.integers(2**62)),
            )
        )
    return made


async def all_of(fleet: RolloutFleet, asked: list[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*map(fleet.generate, asked))


def reference(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs [T] by Hugging Face's forward over prompt and response."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0, prompt.size - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, prompt.size :, None])[:, 0].numpy()


def assert_log_probs(model: torch.nn.Module, asked: list[GenerationRequest], answers: list[Generation]) -> None:
    for one, answer in zip(asked, answers, strict=True):
        expected = reference(model, one.prompt_ids, answer.token_ids, one.sampling.temperature or 1.0)
        np.testing.assert_allclose(answer.log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_model(places: dict[str, Place], kind: str, temperature: float) -> None:
    place = places[kind]
    asked = requests_of(24, seed=1, temperature=temperature)
    answers = place.run(all_of(place.fleet, asked))
    assert_log_probs(place.model, asked, answers)
    assert [answer.token_ids.size for answer in answers] == [one.sampling.max_new_tokens for one in asked]
    assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}
    assert len({tuple(answer.token_ids[:3]) for answer in answers}) > 12  # drawn, not greedy


def test_greedy_is_the_most_likely_token(places: dict[str, Place]) -> None:
    place = places["qwen2"]
    (one,) = requests_of(1, seed=2, temperature=0.0)
    answer = place.run(place.fleet.generate(one))
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, answer.token_ids])).long()[None]
    with torch.no_grad():
        best = place.model(ids).logits[0, one.prompt_ids.size - 1 : -1].argmax(-1)
    np.testing.assert_array_equal(answer.token_ids, best.numpy())


def test_sampling_parameters_reach_the_sampler(places: dict[str, Place]) -> None:
    place = places["qwen2"]
    prompt = np.array([4, 8, 15], np.int32)

    def ask(index: int, **sampling: object) -> GenerationRequest:
        params = SamplingParams(max_new_tokens=30, **sampling)  # type: ignore[arg-type]
        return GenerationRequest(request_id=f"s{index}", group_id="s", prompt_ids=prompt, sampling=params, seed=0)

    async def work() -> None:
        forced = await place.fleet.generate(ask(0, logit_bias={77: 100.0}))
        assert set(forced.token_ids) == {77}
        stopped = await place.fleet.generate(ask(1, logit_bias={77: 100.0}, stop_token_ids=(77,)))
        assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([77], FinishReason.STOP)
        narrow = await place.fleet.generate(ask(2, top_p=1e-6))
        greedy = await place.fleet.generate(ask(3, temperature=0.0))
        np.testing.assert_array_equal(narrow.token_ids, greedy.token_ids)
        with pytest.raises(ServerRefused, match="context length"):
            await place.fleet.generate(
                GenerationRequest(
                    request_id="long",
                    group_id="l",
                    prompt_ids=prompt,
                    sampling=SamplingParams(max_new_tokens=CONTEXT),
                    seed=0,
                )
            )

    place.run(work())


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_score_is_the_models_opinion_of_a_given_response(places: dict[str, Place], kind: str) -> None:
    place, draw = places[kind], np.random.default_rng(5)

    async def work() -> None:
        for prompt_size, size in ((1, 1), (7, 30), (200, 100)):
            prompt, response = (draw.integers(0, VOCABULARY, n).astype(np.int32) for n in (prompt_size, size))
            for _ in range(2):  # the second time from the prefix cache
                scores = await place.fleet.score(prompt, response)
                np.testing.assert_allclose(scores, reference(place.model, prompt, response), atol=1e-4, rtol=0)

    place.run(work())


def test_a_seed_decides_the_response_whatever_shares_the_batch(places: dict[str, Place]) -> None:
    place = places["qwen3"]
    asked = requests_of(60, seed=6, tokens=90)

    async def work() -> None:
        alone = [await place.fleet.generate(one) for one in asked[:12]]
        together = await all_of(place.fleet, asked)
        backwards = (await all_of(place.fleet, asked[::-1]))[::-1]
        for first, second in [*zip(alone, together, strict=False), *zip(together, backwards, strict=True)]:
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_array_equal(first.log_probs.view(np.int32), second.log_probs.view(np.int32))
        others = [await place.fleet.generate(_with_seed(one, one.seed + 1)) for one in asked[:12]]
        longer = [index for index in range(12) if alone[index].token_ids.size > 4]
        assert longer
        assert all(alone[index].token_ids.tolist() != others[index].token_ids.tolist() for index in longer)

    place.run(work())


def _with_seed(one: GenerationRequest, seed: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=one.request_id, group_id=one.group_id, prompt_ids=one.prompt_ids, sampling=one.sampling, seed=seed
    )


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_published_weights_serve_and_their_checksums_agree(places: dict[str, Place], kind: str, tmp_path: Path) -> None:
    place = places[kind]
    changed = save_model(tmp_path / "new", kind, seed=9, **SHAPES[kind])
    asked = requests_of(16, seed=7)

    async def work() -> None:
        before = await all_of(place.fleet, asked)
        report = await place.fleet.publish(tmp_path / "new", 5)
        assert report.servers[0].tensors == {"qwen3": 35, "qwen2": 30}[kind]
        after = await all_of(place.fleet, asked)
        assert {version for answer in after for version in answer.weight_versions} == {5}
        assert_log_probs(changed, asked, after)
        # The same prompts were in the cache: keys and values of the old weights would show here.
        assert any(not np.array_equal(old.log_probs, new.log_probs) for old, new in zip(before, after, strict=True))
        await place.fleet.publish(place.folder, 6)
        assert_log_probs(place.model, asked, await all_of(place.fleet, asked))

    place.run(work())


def test_publish_in_the_middle_of_responses(places: dict[str, Place], tmp_path: Path) -> None:
    place = places["qwen2"]
    changed = save_model(tmp_path / "new", "qwen2", seed=10, **SHAPES["qwen2"])
    asked = [
        GenerationRequest(
            request_id=f"m{index}",
            group_id=f"m{index}",
            prompt_ids=np.array([index, 3], np.int32),
            sampling=SamplingParams(max_new_tokens=300),
            seed=index,
        )
        for index in range(8)
    ]

    async def work() -> None:
        await place.fleet.publish(place.folder, 20)
        tasks = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked]
        await asyncio.sleep(0.3)
        report = await place.fleet.publish(tmp_path / "new", 21)
        answers = await asyncio.gather(*tasks)
        assert report.interrupted == 8
        for one, answer in zip(asked, answers, strict=True):
            assert answer.token_ids.size == 300
            assert set(answer.weight_versions) <= {20, 21}
            old = answer.weight_versions == 20
            assert (np.diff(answer.weight_versions) >= 0).all()
            for mask, model in ((old, place.model), (~old, changed)):
                expected = reference(model, one.prompt_ids, answer.token_ids)
                np.testing.assert_allclose(answer.log_probs[mask], expected[mask], atol=1e-4, rtol=0)
        assert any(len(set(answer.weight_versions)) == 2 for answer in answers)
        await place.fleet.publish(place.folder, 22)

    place.run(work())


def test_one_wrong_number_in_one_tensor_is_found(places: dict[str, Place], tmp_path: Path) -> None:
    place = places["qwen2"]
    tensors = load_file(place.folder / "model.safetensors")
    tensors["model.layers.2.self_attn.k_proj.bias"][5] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((place.folder / "config.json").read_text())
    member = place.fleet._members[0]

    async def work() -> None:
        await member.client.update_weights_from_disk(tmp_path, "wrong", 60)
        assert member.info is not None
        expected = expected_checksums(place.folder, member.info)
        with pytest.raises(WeightMismatch) as caught:
            verify(expected, await member.client.checksums(60), place.server.url)
        assert len(caught.value.problems) == 1
        assert "model.layers.2.self_attn.qkv_proj.bias" in str(caught.value)
        await place.fleet.publish(place.folder, 30)

    place.run(work())


def test_a_killed_server_is_replaced_and_the_responses_are_the_same(places: dict[str, Place]) -> None:
    place = places["qwen3"]
    asked = requests_of(16, seed=8, tokens=200)

    async def work() -> None:
        await place.fleet.publish(place.folder, 40)
        undisturbed = await all_of(place.fleet, asked)
        tasks = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked]
        await asyncio.sleep(0.2)
        assert place.server.process is not None
        os.kill(place.server.process.pid, signal.SIGKILL)
        for first, second in zip(undisturbed, await asyncio.gather(*tasks), strict=True):
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_array_equal(first.log_probs, second.log_probs)
            assert set(second.weight_versions) == {40}
        assert place.fleet.status()[0].restarts == 1
        assert any("its process ended" in line for line in place.reports)

    place.run(work())


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = ServerSpec(
            model_path=tmp_path, device="cpu", dtype="float32", context_length=8, seed=0, log_path=tmp_path / "log"
        )
        server = LocalServer(RolloutConfig(port=port), spec)
        with pytest.raises(ServerStartError, match=f"rollout.port = {port}"):
            asyncio.run(server.start())
        assert server.process is None
        assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    spec = ServerSpec(
        model_path=tmp_path, device="cpu", dtype="float32", context_length=8, seed=0, log_path=tmp_path / "log"
    )
    config = RolloutConfig(extra_args=("--no-such-flag",))
    fleet = RolloutFleet(config, [LocalServer(config, spec)], vocab_size=8, report=print)
    with pytest.raises(ServerStartError, match=r"(?s)ended while it started.*no-such-flag"):
        asyncio.run(fleet.start(START_S))


@pytest.mark.slow
def test_a_stopped_server_is_noticed_and_replaced(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    place = make_place(loop, tmp_path, "llama", deterministic=False)
    fleet = RolloutFleet(
        place.fleet.config,
        [place.server],
        vocab_size=VOCABULARY,
        report=place.reports.append,
        timing=Timing(probe_deadline_s=2.0, failed_probes=2, scheduler_interval_s=1.0, scheduler_deadline_s=10.0),
    )
    asked = requests_of(8, seed=9, tokens=200)

    async def work(victim: Callable[[psutil.Process], psutil.Process]) -> None:
        tasks = [asyncio.ensure_future(fleet.generate(one)) for one in asked]
        await asyncio.sleep(0.2)
        assert place.server.process is not None
        main = psutil.Process(place.server.process.pid)
        everything = [main, *main.children(recursive=True)]
        victim(main).suspend()
        assert_log_probs(place.model, asked, await asyncio.gather(*tasks))
        assert psutil.wait_procs(everything, 1)[1] == []

    try:
        place.run(fleet.start(START_S))
        place.run(fleet.publish(place.folder, 1))
        place.run(work(lambda main: main))
        place.run(work(lambda main: max(main.children(), key=lambda child: child.memory_info().rss)))  # the scheduler
        assert fleet.status()[0].restarts == 2
    finally:
        place.run(fleet.close())
        loop.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_tensor_parallel_ranks_hold_their_shares(tmp_path: Path, kind: str) -> None:
    """A vocabulary of 200 is filled up to 256 rows, an MLP of 100 to two times 64."""
    loop = asyncio.new_event_loop()
    folder = tmp_path / "model"
    model = save_model(folder, kind, seed=4, intermediate_size=100)
    config = RolloutConfig(tensor_parallel=2, max_running_requests=8, kv_cache_tokens=8192, memory_fraction=0.5)
    spec = ServerSpec(
        model_path=folder, device="cpu", dtype="float32", context_length=CONTEXT, seed=0, log_path=tmp_path / "log"
    )
    fleet = RolloutFleet(config, [LocalServer(config, spec)], vocab_size=VOCABULARY, report=print)

    async def work() -> None:
        await fleet.start(START_S)
        report = await fleet.publish(folder, 1)
        assert report.servers[0].tensors == {"qwen2": 62, "qwen3": 70}[kind]
        asked = requests_of(8, seed=10)
        assert_log_probs(model, asked, await all_of(fleet, asked))
        await fleet.close()

    try:
        loop.run_until_complete(asyncio.wait_for(work(), START_S))
    finally:
        loop.run_until_complete(fleet.close())
        loop.close()


@pytest.mark.slow
def test_the_server_and_its_children_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3", seed=1)
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from rollout.command import ServerSpec\nfrom rollout.config import RolloutConfig\n"
        "from rollout.fleet import RolloutFleet\nfrom rollout.server import LocalServer\n"
        "config = RolloutConfig(kv_cache_tokens=4096, memory_fraction=0.5)\n"
        "root = Path(sys.argv[1])\n"
        "spec = ServerSpec(model_path=root / 'model', device='cpu', dtype='float32', context_length=64, seed=0,\n"
        "                  log_path=root / 'log')\n"
        "server = LocalServer(config, spec)\n"
        "async def main():\n"
        f"    await RolloutFleet(config, [server], vocab_size=9, report=print).start({START_S})\n"
        "    print(server.process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    import subprocess
    import sys

    parent = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        main = psutil.Process(int(parent.stdout.readline()))
        everything = [main, *main.children(recursive=True)]
        assert len(everything) >= 2
        parent.kill()
        began = time.monotonic()
        assert psutil.wait_procs(everything, 20)[1] == [], f"alive after {time.monotonic() - began:.0f} s"
    finally:
        parent.kill()
        parent.wait(10)
