"""Tokens per second of the product's SGLang server against Hugging Face's batched `generate`, in one run.

python -m tools.measure_generate examples/quickstart/dapo.yaml

As many responses at once as a rollout step of the config asks for (prompts_per_step x group_size), on its model, its
prompts and its sampling. The servers are started as a run starts them, one as configured and one with
`rollout.deterministic` the other way round; each answers with the log-prob of every token. Hugging Face's `generate`
runs in this process on `--threads` threads (a server computes on one) and returns no log-probs. The ways take turns.
Two loads: responses as long as the model makes them, and all of `max_new_tokens` (the end of text forbidden).
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from megatron_dapo.cluster.engines import api_key, own_engines
from megatron_dapo.config import Config, load_config
from megatron_dapo.coordinator.inputs import Inputs, read_inputs
from megatron_dapo.experience.responder import response_seed
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import GenerationRequest, SamplingParams
from rollout.server.engine import LocalServer

FORBIDDEN = -1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is generated: prompts, each answered once, and how."""

    prompts: list[np.ndarray]
    sampling: SamplingParams
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """One batch of responses by one way."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def loads(config: Config, inputs: Inputs) -> list[Load]:
    """The prompts of one rollout step, each `group_size` times, to be answered freely and at full length."""
    chosen = inputs.prompts.prompts[: config.algorithm.prompts_per_step]
    prompts = [prompt.ids for prompt in chosen for _ in range(config.algorithm.group_size)]
    ends = inputs.text.stop_token_ids
    free = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature, stop_token_ids=ends
    )
    full = replace(free, logit_bias=dict.fromkeys(ends, FORBIDDEN))
    return [
        Load(prompts=prompts, sampling=free, name="as long as the model makes them"),
        Load(prompts=prompts, sampling=full, name=f"{free.max_new_tokens} tokens each"),
    ]


async def by_fleet(fleet: RolloutFleet, processes: Sequence[psutil.Process], load: Load, seed: int) -> Took:
    """All requests at once through the fleet that a run uses."""
    requests = [
        GenerationRequest(
            request_id=f"r{seed}-{at}.",
            group_id=f"g{seed}-{prompt.tobytes().hex()}",
            prompt_ids=prompt,
            sampling=load.sampling,
            seed=response_seed(seed, at, 0),
        )
        for at, prompt in enumerate(load.prompts)
    ]
    clock, cpu = time.monotonic(), cpu_seconds(processes)
    answers = await asyncio.gather(*map(fleet.generate, requests))
    seconds, used = time.monotonic() - clock, cpu_seconds(processes) - cpu
    return Took(tokens=sum(answer.token_ids.size for answer in answers), seconds=seconds, cpu_seconds=used)


@torch.no_grad()
def by_generate(model: torch.nn.Module, load: Load, threads: int, seed: int) -> Took:
    """One padded batch; tokens after a response's end are not counted."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    width = max(prompt.size for prompt in load.prompts)
    ids = torch.zeros(len(load.prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(load.prompts):
        ids[row, width - prompt.size :] = torch.from_numpy(prompt)
        mask[row, width - prompt.size :] = 1
    ends = list(load.sampling.stop_token_ids)
    clock, cpu = time.monotonic(), time.process_time()
    out = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=load.sampling.max_new_tokens,
        do_sample=True,
        temperature=load.sampling.temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=ends,
        suppress_tokens=ends if load.sampling.logit_bias else None,
    )[:, width:]
    seconds, used = time.monotonic() - clock, time.process_time() - cpu
    ended = torch.isin(out, torch.tensor(ends)).cumsum(1)
    counted = int((ended == 0).sum() + (ended.amax(1) > 0).sum())
    return Took(tokens=counted, seconds=seconds, cpu_seconds=used)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system time of this process and of `processes`."""
    own = time.process_time()
    return own + sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(config: Config, threads: Sequence[int], rounds: int, folder: Path) -> None:
    """Start both servers, let the ways take turns, print a table a load."""
    inputs = read_inputs(config)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, local_files_only=True).eval()
    fleets = {}
    try:
        ways: dict[str, Callable[[Load, int], Awaitable[Took]]] = {}
        for deterministic in (config.rollout.deterministic, not config.rollout.deterministic):
            name = "SGLang, deterministic" if deterministic else "SGLang"
            fleets[name] = await start(config, inputs, folder / str(deterministic), deterministic=deterministic)
            ways[name] = fleet_way(fleets[name])
        for count in threads:
            ways[f"generate, {count} thread{'s' * (count > 1)}"] = generate_way(model, count)
        for load in loads(config, inputs):
            for way in ways.values():
                await way(load, 0)  # first calls are slower
            took: dict[str, list[Took]] = {name: [] for name in ways}
            for number in range(1, rounds + 1):
                for name, way in ways.items():
                    took[name].append(await way(load, number))
            print_table(load, took)
    finally:
        await asyncio.gather(*(fleet.close() for fleet in fleets.values()))


async def start(config: Config, inputs: Inputs, folder: Path, *, deterministic: bool) -> RolloutFleet:
    """The servers of a run, and their key, in a folder of their own."""
    folder.mkdir()
    config = replace(config, rollout=replace(config.rollout, deterministic=deterministic))
    key = api_key(config, folder)
    fleet = RolloutFleet(
        config.rollout,
        own_engines(config, folder / "logs", gpus=()),
        vocab_size=inputs.text.vocab_size,
        report=print,
        api_key=key,
    )
    await fleet.start(config.run.start_deadline_s)
    return fleet


def fleet_way(fleet: RolloutFleet) -> Callable[[Load, int], Awaitable[Took]]:
    """The fleet as a way of `measure`."""
    roots = [engine.process for engine in fleet.engines if isinstance(engine, LocalServer)]
    pids = [root.pid for root in roots if root is not None]
    processes = [
        found for pid in pids for found in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    ]
    return lambda load, seed: by_fleet(fleet, processes, load, seed)


def generate_way(model: torch.nn.Module, threads: int) -> Callable[[Load, int], Awaitable[Took]]:
    """Hugging Face as a way of `measure`; nothing else happens in this process meanwhile."""

    async def way(load: Load, seed: int) -> Took:
        return by_generate(model, load, threads, seed)

    return way


def print_table(load: Load, took: dict[str, list[Took]]) -> None:
    """Medians over the rounds; the ratio is to the last way, round by round."""
    *_, last = took
    print(f"\n{len(load.prompts)} responses at once, {load.name}, {len(took[last])} rounds\n")
    print(f"| way | tokens a response | tokens/s | least, most | CPU microseconds a token | speed, of {last} |")
    print("|---|---|---|---|---|---|")
    for name, rounds in took.items():
        speeds = [one.speed for one in rounds]
        ratios = [one.speed / other.speed for one, other in zip(rounds, took[last], strict=True)]
        length = statistics.mean(one.tokens for one in rounds) / len(load.prompts)
        cost = statistics.median(one.cpu_seconds / one.tokens for one in rounds) * 1e6
        print(
            f"| {name} | {length:.1f} | {statistics.median(speeds):.0f} | {min(speeds):.0f}, {max(speeds):.0f} "
            f"| {cost:.0f} | {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] |",
            flush=True,
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="such as model.path=runs/quickstart/model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of generate, one way each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="all processes share the first so many")
    options = parser.parse_intermixed_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    config = load_config(options.config, options.overrides)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(config, options.threads, options.rounds, Path(folder)))


if __name__ == "__main__":
    main()
