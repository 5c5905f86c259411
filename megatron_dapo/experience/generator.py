"""A prompt becomes a scored group: G responses of the fleet, their verdicts, shaped rewards. Evaluation asks the same
`Responder`."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Literal, TypeVar

import torch

from megatron_dapo.algorithm.overlong import raw_reward, shaped_rewards
from megatron_dapo.config.algorithm_config import AlgorithmConfig
from megatron_dapo.config.base import ConfigError
from megatron_dapo.data.prompts import Prompt, PromptSet
from megatron_dapo.data.tokenizer import Decoder
from megatron_dapo.experience.episodes import Play, Rules
from megatron_dapo.experience.groups import ScoredGroup, ScoredResponse, unjudged
from megatron_dapo.monitor.console import Count
from reward.pool.pool import RewardPool
from reward.registry import other_accuracy
from reward.verdict import Verdict, VerificationRequest
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import end_all
from rollout.generation import FinishReason, Generation, GenerationRequest, RoutingShape, SamplingParams, nothing_drawn

T = TypeVar("T")
Generate = Callable[[str, GenerationRequest], Awaitable[Generation]]
"""(place for errors, request) -> the turn."""
PlayAll = Callable[[str, Play], Awaitable[None]]
"""(place for errors, play) -> when all its turns are there."""
OnKept = Callable[[ScoredGroup], None]
SamplingAt = Callable[[int], SamplingParams]
"""Weight version at the dispatch of a group -> how its responses are drawn."""


class EngineAborted(RuntimeError):
    """A server answered without a token, or gave a response up."""

    exit_code = 5


class Unjudged(RuntimeError):
    """A response could not be judged, by no fault of its own. Counted as wrong it would teach the actor noise."""

    exit_code = 1


def response_seed(seed: int, position: int, sample: int) -> int:
    """Seed of one response, 31 bits: from the run's seed, the prompt's position and the response's number in the
    group."""
    digest = hashlib.blake2b(f"{seed}:{position}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


@dataclass(kw_only=True, eq=False)
class Responder:
    """Fleet, detokenizer and reward pool of one run or evaluation."""

    fleet: RolloutFleet
    pool: RewardPool
    decoder: Decoder
    rules: Rules = None
    """Of episodes; None: every prompt has one answer."""
    elsewhere: PlayAll | None = None
    """Plays in other processes."""

    async def play(self, place: str, play: Play, generate: Generate | None = None) -> None:
        """The response; of a prompt with an environment turn after turn, until that ends the episode. Elsewhere, if
        that is given, unless this process must `generate`.

        Args:
            place: names the prompt in an error.
            generate: draws one turn; None: `generate` does.

        Raises:
            EngineAborted: a turn is not there.
            Unjudged: the environment cannot be asked, by no fault of the response.
        """
        if self.elsewhere is not None and generate is None:
            return await self.elsewhere(place, play)
        over, environment = False, play.prompt.environment
        while not over:
            play.newest = await (generate or self.generate)(place, play.request)
            if environment is None or play.rules is None:
                return
            text = self._text(play.done)
            stepped = await self.pool.step(environment, play.episode(text))
            if stepped.unjudged:
                raise Unjudged(f"{place}: environment {environment!r}: {stepped.error}")
            over = play.settle(stepped, text)

    def _text(self, turn: Generation) -> str:
        return self.decoder.decode(turn.token_ids, skip_special_tokens=True)

    async def generate(self, place: str, request: GenerationRequest) -> Generation:
        """A finished response.

        Args:
            place: names the prompt in an error.

        Raises:
            EngineAborted: there is none.
        """
        generation = await self.fleet.generate(request)
        if generation.finish_reason is FinishReason.ABORT or len(generation.token_ids) == 0:
            raise EngineAborted(f"{place}: a server gave up on response {generation.request_id}")
        return generation

    def so_far(self, request: GenerationRequest) -> Generation:
        """What was drawn of a response until now; it ends by ABORT unless it is complete."""
        return self.fleet.so_far(request.request_id) or request.begun or nothing_drawn(request.request_id)

    async def judge(
        self, place: str, prompt: Prompt, plays: Sequence[Play]
    ) -> tuple[list[VerificationRequest], list[Verdict]]:
        """The texts of responses to one prompt (of an episode, the newest turn), as requests to the pool, and their
        verdicts, in order; an environment's where it gave one.

        A verdict that is missing for a reason within the response (a time-out, say) counts as wrong.

        Args:
            place: names the prompt in an error.
            plays: complete ones.

        Raises:
            Unjudged: a verdict is missing for a reason that lies elsewhere.
        """
        about = {"ground_truth": prompt.answer, "prompt": prompt.text, "verifier": prompt.verifier}
        requests = [VerificationRequest(response=self._text(play.done), **about) for play in plays]
        asked = [request for request, play in zip(requests, plays, strict=True) if play.verdict is None]
        judged = iter(await self.pool.verify(asked) if asked else ())
        verdicts = [play.verdict or next(judged) for play in plays]
        for verdict in verdicts:
            if verdict.unjudged:
                raise Unjudged(f"{place}: no verdict by {prompt.verifier!r}: {verdict.error}")
        return requests, verdicts


async def gather_or_cancel(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one call fails the others are cancelled and awaited, so that none is left behind."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await end_all(tasks)
        raise


@dataclass(eq=False)
class GroupGenerator:
    """Writes and judges the groups of one run's prompts."""

    responder: Responder
    prompts: InitVar[PromptSet]
    sampling: SamplingAt
    algorithm: AlgorithmConfig
    seed: int
    routing: RoutingShape | None = None
    """Of the model, where responses are to come with the experts of their tokens."""

    def __post_init__(self, prompts: PromptSet) -> None:
        self._prompts, self._order = prompts.prompts, prompts.order(self.seed)
        self._clock = RewardClock()
        self._writing: dict[int, tuple[int, Sequence[Play]]] = {}
        """(weights at the dispatch, responses) of groups under way, by position; after a failure of those that were."""
        self._restored: dict[int, ScoredGroup] = {}
        self.finished = 0
        """Groups written and judged, since the start."""

    def prompt_at(self, position: int) -> int:
        """Index of the prompt at `position` of the endless order."""
        index, count = int(self._order.index_at(position)), len(self._prompts)
        if not 0 <= index < count:  # in an order of one's own; the first positions were tried before the start
            raise ConfigError(f"data.order: index_at({position}) = {index} is no index of the {count} prompts")
        return index

    async def group(self, position: int, weight_version: int) -> ScoredGroup:
        """The responses to the prompt at `position` of the endless order, judged."""
        prompt = self._prompts[self.prompt_at(position)]
        place = f"prompt {position} ({prompt.place})"
        begun: Sequence[ScoredResponse | None] = [None] * self.algorithm.group_size
        restored = self._restored.pop(position, None)
        if restored is not None and restored.weight_version == weight_version:  # else it became too old
            begun = restored.responses
        asked = [self._request(prompt, position, weight_version, sample) for sample in range(len(begun))]
        plays = [Play.of(prompt, one, self.responder.rules, drawn) for one, drawn in zip(asked, begun, strict=True)]
        self._writing[position] = weight_version, plays
        turn = self._turn if self.responder.elsewhere is None else None
        with self._clock.measure("playing" if prompt.environment and turn else "writing"):
            await gather_or_cancel(self.responder.play(place, play, turn) for play in plays)
        with self._clock.measure("judging"):
            responses = await self._judge(place, prompt, plays, self.sampling(weight_version).max_new_tokens)
        del self._writing[position]
        self.finished += 1
        oldest = min(int(response.generation.weight_versions.min()) for response in responses)
        return self._group_of(position, oldest, responses)

    def restore(self, groups: Iterable[ScoredGroup]) -> None:
        """Groups of `unfinished`, of a run that was ended: `group` goes on from what was drawn of them."""
        self._restored = {group.position: group for group in groups}

    def unfinished(self, position: int, weight_version: int) -> ScoredGroup | None:
        """What was drawn until now of a group under way that was sent with these weights; not judged. None: nothing."""
        version, plays = self._writing.get(position, (None, ()))
        if version != weight_version:
            return self._restored.get(position)
        drawn = [play.generation(play.newest or self.responder.so_far(play.request)) for play in plays]
        if not any(generation.token_ids.size for generation in drawn):
            return None
        begun = (unjudged(all_, play.earlier, play.state) for all_, play in zip(drawn, plays, strict=True))
        return self._group_of(position, weight_version, tuple(begun))

    @property
    def failing(self) -> int:
        """Responses under way whose environment failed on the newest turn."""
        newest = [turn for _, plays in self._writing.values() for play in plays for turn in play.earlier[-1:]]
        return sum(turn.error is not None for turn in newest)

    def take_seconds(self) -> dict[str, float]:
        """Seconds, since the last call, in which no response was being written: `environment`, of which at least one
        was awaited; `reward`, verdicts alone."""
        return self._clock.take()

    def _group_of(self, position: int, weight_version: int, responses: tuple[ScoredResponse, ...]) -> ScoredGroup:
        index = self.prompt_at(position)
        ids = self._prompts[index].ids
        return ScoredGroup(
            position=position, prompt_index=index, prompt_ids=ids, weight_version=weight_version, responses=responses
        )

    async def _turn(self, place: str, request: GenerationRequest) -> Generation:
        with self._clock.measure("writing"):
            return await self.responder.generate(place, request)

    def _request(self, prompt: Prompt, position: int, weight_version: int, sample: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"p{position}-v{weight_version}-s{sample}.",  # the dot: SGLang aborts by prefix
            group_id=f"p{position}",
            prompt_ids=prompt.ids,
            sampling=self.sampling(weight_version),
            seed=response_seed(self.seed, position, sample),
            priority=position,  # the batch waits for the earliest first
            holdable=True,
            routing=self.routing,
        )

    async def _judge(
        self, place: str, prompt: Prompt, plays: Sequence[Play], longest: int
    ) -> tuple[ScoredResponse, ...]:
        requests, verdicts = await self.responder.judge(place, prompt, plays)
        answers = [play.generation(play.done) for play in plays]
        raw, overlong = raw_reward(torch.tensor([verdict.accuracy for verdict in verdicts])), self.algorithm.overlong
        for at, verdict in enumerate(verdicts):
            raw[at] = raw[at] if verdict.reward is None else verdict.reward
            raw[at] += plays[at].turn_rewards if self.algorithm.turn_rewards else 0.0
        lengths = torch.tensor([answer.drawn for answer in answers])
        shaped = shaped_rewards(
            raw, lengths, shape=overlong.shape, max_length=longest, buffer=overlong.buffer, factor=overlong.factor
        ).tolist()
        return tuple(
            ScoredResponse(
                generation=answers[at],
                text=request.response,
                verdict=verdicts[at],
                accuracy=verdicts[at].accuracy,
                reward_raw=float(raw[at]),
                reward_shaped=shaped[at],
                other_accuracy=other_accuracy(request) if plays[at].verdict is None else None,
                by_environment=plays[at].verdict is not None,
                earlier=tuple(plays[at].earlier),
            )
            for at, request in enumerate(requests)
        )


class BatchCounter:
    """How far a batch of groups is. Made when it is begun; `keep` passes each group on that is kept."""

    def __init__(self, generator: GroupGenerator, fleet: RolloutFleet, wanted: int, on_kept: OnKept) -> None:
        self._generator, self._fleet, self._wanted, self._on_kept = generator, fleet, wanted, on_kept
        self._kept, self._finished, self._drawn = 0, generator.finished, fleet.load()[0]
        self._since = time.monotonic()

    def keep(self, group: ScoredGroup) -> None:
        self._kept += 1
        self._on_kept(group)

    def count(self) -> Count:
        """The rate of tokens is the mean since the batch was begun."""
        tokens, running, longest_s = self._fleet.load()
        rate = (tokens - self._drawn) / max(time.monotonic() - self._since, 1e-3)
        figures = {"tokens/s": rate, "longest_running_s": longest_s, "responses_running": running}
        figures["groups_finished"] = self._generator.finished - self._finished
        figures |= {"environments_failing": failing} if (failing := self._generator.failing) else {}
        return Count(self._kept, self._wanted, "groups kept", figures)


class RewardClock:
    """Adds up the time in which no response is being written, by what is awaited."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._since = time.monotonic()
        self._seconds = {"environment": 0.0, "reward": 0.0}

    @contextmanager
    def measure(self, what: Literal["writing", "playing", "judging"]) -> Iterator[None]:
        """`playing`: a group of episodes that are not all over, of which those that are `writing` count too."""
        self._add()
        self._under_way[what] += 1
        try:
            yield
        finally:
            self._add()
            self._under_way[what] -= 1

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        self._add()
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _add(self) -> None:
        now, busy = time.monotonic(), self._under_way
        if not busy["writing"] and (busy["playing"] or busy["judging"]):
            self._seconds["environment" if busy["playing"] else "reward"] += now - self._since
        self._since = now
