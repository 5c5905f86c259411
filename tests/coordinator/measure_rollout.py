"""`python -m tests.coordinator.measure_rollout`: what one rollout step costs the coordinator at the paper's size.

The real fleet, generator, sampler, ledger and reward pool fill batches of 512 x 16 responses of up to 20k tokens with
log-probs; 64 scripted servers in processes of their own answer at a modelled speed, compressed in time. Counted are
the CPU seconds and the peak resident memory of this process alone. `--profile` prints where the seconds go. With
`--turns 8` the same tokens come in eight turns, an environment in the pool's workers answering each but the last. With
`--client-processes 4` four others talk to the servers and the environment.
"""

import argparse
import asyncio
import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import ray
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.cluster.clients import Clients
from megatron_dapo.config.algorithm_config import AlgorithmConfig
from megatron_dapo.coordinator.run import tune_collector
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.data.tokenizer import Decoder, decoder_of, load_text_tools
from megatron_dapo.experience.episodes import TurnRules
from megatron_dapo.experience.generator import GroupGenerator, Responder
from megatron_dapo.experience.groups import Admission, SamplerState
from megatron_dapo.storage.ledger import Ledger
from reward.config import RewardConfig
from reward.environment import Episode, Observation
from reward.pool.pool import RewardPool
from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import SamplingParams
from rollout.server.engine import RemoteServer
from tests.actor.peak_memory import begin_peak, peak_resident
from tests.coordinator.scripted import scripted_prompts
from tests.processes import ROOT
from tests.rollout import measure_decode
from tests.rollout.script import END, RIGHT, VOCABULARY, WRONG, Script
from tests.rollout.serve_scripts import served

STEP_S = 300.0
"""A rollout step on a GPU cluster, of which the coordinator may take a tenth of one core."""
PROMPTS = 5000
ENVIRONMENT = "tests.coordinator.measure_rollout:observed"
GIB = 2**30


def words() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose words are four or five letters; the script's last word is the answer."""
    entries = {f"Ġ{number:x}": number for number in range(VOCABULARY)}
    named = {RIGHT: "ĊĊAnswer:Ġ42", WRONG: "ĊĊAnswer:Ġ41", END: "<end>"}
    entries = {text: number for text, number in entries.items() if number not in named}
    entries |= {text: number for number, text in named.items()}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


async def fill(urls: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
    rollout = RolloutConfig(
        max_running_requests=options.slots,
        request_deadline_s=600.0,
        stream_every=options.stream_every,
        client_processes=options.client_processes,
    )
    fleet = RolloutFleet(rollout, [RemoteServer(url) for url in urls], vocab_size=VOCABULARY, report=print)
    reward = RewardConfig(workers=1, environment_workers=options.environment_workers, timeout_s=60.0)
    algorithm = AlgorithmConfig(
        prompts_per_step=options.prompts, group_size=options.group_size, mini_batch_responses=options.group_size
    )
    decoder = words() if options.plain_text else decoder_of(words())
    rules = rules_of(options.turns, decoder)
    async with AsyncExitStack() as stack:
        pool, ledger = RewardPool(reward), Ledger(folder / "ledger.jsonl")
        stack.callback(pool.close)
        stack.callback(ledger.close)
        stack.push_async_callback(fleet.close)
        await fleet.start(60.0)
        clients = None
        if rollout.client_processes:
            clients = Clients(fleet, print, reward, decoder, rules, thinking=None)
            stack.push_async_callback(clients.close)
            await clients.start()
        generator = GroupGenerator(
            Responder(
                fleet=fleet, pool=pool, decoder=decoder, rules=rules, elsewhere=clients.play if clients else None
            ),
            scripted_prompts(
                PROMPTS, answer="42", verifier="robust", environment=ENVIRONMENT if options.turns > 1 else None
            ),
            lambda version: SamplingParams(max_new_tokens=Script().max_new_tokens + 1, stop_token_ids=(2,)),
            algorithm,
            seed=0,
        )
        start = SamplerState(cursor=0, pass_rate=PassRate.start(0.7), carried=())
        sampler = DynamicSampler(algorithm, generator.group, ledger, start)
        stack.push_async_callback(sampler.close)
        tune_collector()
        base = begin_peak()
        cpu, wall = time.process_time(), time.monotonic()
        admission = await sampler.fill(1, 0)
        gc.collect()
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        report(admission, cpu=cpu, wall=wall, base=base, peak=peak_resident())


def rules_of(turns: int, decoder: Decoder) -> TurnRules | None:
    """Of `turns` turns. The observation's text goes through a real tokenizer, whose ids no word of the script has."""
    if turns == 1:
        return None
    text = load_text_tools(ROOT / "examples" / "quickstart" / "base")
    between = {(False, role): ("\n<result>\n", "\n</result>\n") for role in ("user", "tool")}
    return TurnRules(turns, 512, (), between, text, 1 << 20)


def observed(episode: Episode) -> Observation | None:
    """The environment: four hundred characters to each turn but the last, which the verifier judges."""
    return None if episode.last else Observation("The sum of all parts is then 7.\n" * 13, state=len(episode.turns))


def report(admission: Admission, *, cpu: float, wall: float, base: int, peak: int) -> None:
    responses = [response for group in admission.generated for response in group.responses]
    tokens = sum(group.tokens for group in admission.generated)
    errors = sum(response.verdict.error is not None for response in responses)
    right = sum(response.accuracy for response in responses)
    print(
        f"{len(admission.kept)} groups kept of {len(admission.generated)} generated; {len(responses)} responses, "
        f"{tokens / 1e6:.1f} M tokens, longest {max(len(one.generation.token_ids) for one in responses)}; "
        f"{right} right, {errors} without a verdict"
    )
    turns = sum(1 + len(response.earlier) for response in responses)
    given = sum(tokens for response in responses for _, tokens in response.generation.given)
    print(f"{turns} turns, {given / 1e6:.1f} M tokens given between them")
    print(f"coordinator: {cpu:.1f} CPU s ({cpu / tokens * 1e9:.0f} ns a token), {wall:.0f} s of wall-clock")
    print(f"share of a core in a step of {STEP_S:g} s: {cpu / STEP_S:.1%}")
    print(f"peak resident: {peak / GIB:.2f} GiB, {(peak - base) / GIB:.2f} of it since the step began")
    for name, (each, size) in measure_decode.costs().items():
        print(f"reading, {name}: {each * tokens / 1e9:.1f} CPU s and {size * tokens / GIB:.2f} GiB for as many tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=64, help="an even number: in two processes")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--slots", type=int, default=128, help="responses that one server runs at once")
    parser.add_argument("--compress", type=float, default=4.0, help="modelled seconds in a real one")
    parser.add_argument("--stream-every", type=int, default=RolloutConfig().stream_every, help="as the config's key")
    parser.add_argument("--json", action="store_true", help="answers in JSON, as of servers that someone else runs")
    parser.add_argument("--plain-text", action="store_true", help="the tokenizer's own decode instead of the table")
    parser.add_argument("--turns", type=int, default=1, help="of an episode")
    parser.add_argument("--environment-workers", type=int, default=2)
    parser.add_argument("--client-processes", type=int, default=0, help="as the config's key")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    half = options.servers // 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        speeds = {"compress": options.compress, "stream_every": options.stream_every, "as_json": options.json}
        speeds["turns"] = options.turns
        processes = [stack.enter_context(served(half, first=at * half, **speeds)) for at in range(2)]
        urls = [url for process in processes for url in process]
        if options.client_processes:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            stack.callback(ray.shutdown)
        profile = cProfile.Profile(time.process_time) if options.profile else None
        if profile is None:
            asyncio.run(fill(urls, options, folder))
        else:
            profile.runcall(asyncio.run, fill(urls, options, folder))
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
