"""Keeps the servers alive: finds those that died or hang, restarts them, and ends waits when all are down too long.

It also has them leave their accelerators' memory to a trainer on the same GPUs, and take it back. SGLang frees weights,
KV cache and CUDA graphs, keeps the weights in host memory, and takes everything back at the same addresses. The server
must be idle: its scheduler crashes on a release while a request runs. On a CPU the calls are the same and free nothing.
"""

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rollout import errors
from rollout.config import QUANTIZATION, RolloutConfig
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, ServerStatistics, State, Timing, beside, end_all
from rollout.fleet.weight_update import Publisher
from rollout.weights import LOADER
from rollout.wire.client import ServerInfo

_POLL_S = 0.25

LATE_FACTOR = 2.0
"""The last servers may take so many times as long as enough servers took to start; each that comes extends it."""
PROBED = 32
"""Servers that are probed every `Timing.probe_interval_s`; of more each less often: it is CPU of the coordinator."""


@dataclass(eq=False)
class Supervisor:
    """One task per server, and one that watches over all of them."""

    config: RolloutConfig
    timing: Timing
    members: Sequence[Member]
    balancer: Balancer
    publisher: Publisher
    report: Callable[[str], None]
    start_deadline_s: float
    """Deadline of each start of a server, the first one and restarts."""
    fp32_head: bool
    """The trainer's."""
    routed_experts: bool
    """Whether the servers are asked for them."""
    statistics: ServerStatistics
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _may_start: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Not set while the memory is the trainer's."""
    _missing: Sequence[str] | None = field(default=None, init=False)
    """Parts of their memory that servers which were released do not have back. None: all."""
    _starts: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """Restarts of servers' processes that are under way."""

    def watch(self) -> None:
        """Begins to watch the servers, once they are started."""
        self._tasks = [asyncio.ensure_future(watch) for watch in [self._watch_fleet(), *map(self._watch, self.members)]]

    async def close(self) -> None:
        """Ends all watching."""
        await end_all(self._tasks)

    async def start_all(self) -> None:
        """Starts all servers and returns when they are READY, or enough of them. The rest failed or takes far longer
        than the others: it is DOWN then, and brought up like a server that is lost later.

        Raises:
            ServerStartError: names each server that is not ready, with the tail of its log. `ServerUnfit`: the first.
        """
        self._may_start.set()
        count, began = len(self.members), time.monotonic()
        may_miss = min(math.floor(count - count * self.config.start_quorum + 1e-6), count - 1)
        tasks = {asyncio.ensure_future(self._start(member)): member for member in self.members}
        problems: dict[Member, errors.ServerStartError] = {}
        pending, patience_s = set(tasks), None
        try:
            while pending and len(problems) <= may_miss:
                done, pending = await asyncio.wait(pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    error = task.exception()
                    if isinstance(error, errors.ServerStartError) and not isinstance(error, errors.ServerUnfit):
                        problems[tasks[task]] = error
                    elif error is not None:
                        raise error
                if patience_s is None and len(pending) + len(problems) <= may_miss:
                    patience_s = (LATE_FACTOR - 1) * (time.monotonic() - began)
        finally:
            await end_all(tuple(tasks))
        missing = [member for member in self.members if member.state is not State.READY]
        if len(missing) > may_miss:
            text = "\n".join(map(str, problems.values()))
            others = f"; {len(missing) - len(problems)} were not awaited" if len(missing) > len(problems) else ""
            raise errors.ServerStartError(f"{len(problems)} of {count} servers did not start{others}\n{text}")
        for member in missing:
            late = f"it was not ready {time.monotonic() - began:.0f} s after the start of the fleet"
            member.late = member not in problems
            member.enter(State.DOWN, str(problems.get(member, late)).splitlines()[0])
        if missing:
            self.report(f"the run begins without {len(missing)} of {count} servers")

    async def release_memory(self) -> tuple[float | None, ...]:
        """Returns when no server holds memory. From then on requests and restarts of servers wait.

        Returns:
            Of each server, the GB on each of its accelerators that it says it gave back, weights and KV cache. None: it
            was not serving, or was ended.

        Raises:
            RolloutError: a request is in flight.
        """
        if (running := sum(member.in_flight for member in self.members)) or self.balancer.waiting:
            raise errors.RolloutError(f"servers cannot leave their memory: {running} requests run; nothing was changed")
        self.balancer.close()
        self._may_start.clear()
        if self._starts:
            await asyncio.wait(self._starts)
        return tuple(await asyncio.gather(*map(self._release, self.members)))

    async def resume_memory(self, *, weights_only: bool) -> None:
        """Returns when every server that gave its memory up has it back. The others may be restarted again.

        Args:
            weights_only: so that new ones can come; the rest is for a second call, and all waits go on until then.
        """
        later = ("kv_cache", "cuda_graph")  # by SGLang's names
        parts, self._missing = (("weights",), later) if weights_only else (self._missing, None)
        await asyncio.gather(*(self._resume(member, parts) for member in self.members if member.serving))
        if not weights_only:
            self._may_start.set()
            self.balancer.open()

    async def _release(self, member: Member) -> float | None:
        try:
            if member.serving:
                await member.call(member.client.flush_cache())  # refused while anything runs
                claimed = await member.call(member.client.memory_gb())
                with member.busy():
                    await member.call(member.client.release_memory(self.timing.load_deadline_s))
                return claimed
        except errors.ServerUnavailable as error:
            member.enter(State.DOWN, f"release of its memory: {error}")
        await member.engine.close()
        return None

    async def _resume(self, member: Member, parts: Sequence[str] | None) -> None:
        try:
            with member.busy():
                await member.call(member.client.resume_memory(self.timing.load_deadline_s, parts))
        except errors.ServerUnavailable as error:
            member.enter(State.DOWN, f"taking its memory back: {error}")

    async def _start(self, member: Member) -> None:
        """Starts a server and returns when it is READY. A server that ends meanwhile is started once more.

        Raises:
            As `_wait_ready`.
        """
        deadline = time.monotonic() + self.start_deadline_s
        await member.engine.start()
        for ended in itertools.count(1):
            try:
                await self._wait_ready(member, deadline)
                return member.enter(State.READY)
            except errors.ServerStartError as error:
                if member.engine.alive() or ended > 1 or time.monotonic() > deadline:
                    raise
                self.report(f"server {str(error).splitlines()[0]}; starting it again")
            await asyncio.sleep(self.timing.first_backoff_s)
            await member.engine.restart()
            await member.forget_client()

    async def _wait_ready(self, member: Member, deadline: float) -> None:
        """Returns when the server's HTTP process and its scheduler answer, and notes what it says of itself.

        Args:
            deadline: `start_deadline_s` after its start (time.monotonic).

        Raises:
            ServerStartError: it did not answer in time, or ended; with the tail of its log.
            ServerUnfit: it answers, but the run cannot use it.
        """
        problem = "no answer yet"
        while True:
            if not member.engine.alive():
                raise errors.ServerStartError(f"{member.url}: it ended while it started\n{member.engine.log_tail()}")
            try:
                await member.probe(self.timing.probe_deadline_s)
                member.info = await member.client.server_info(self.timing.probe_deadline_s)
                member.weight_label = await member.client.weight_label()
                if unfit := self._unfit(member.info):
                    raise errors.ServerUnfit(f"{member.url}: {unfit}")
                return
            except errors.AccessDenied as error:
                if not member.engine.ours:  # a restart would not change it
                    raise errors.ServerUnfit(f"{error}\nIts key belongs in the file of rollout.api_key_file") from None
                problem = f"{error}: another program listens there; ours will end and be started on another port"
            except (errors.ServerUnavailable, errors.ServerRefused) as error:
                problem = str(error)
            if time.monotonic() > deadline:
                late = f"not ready within {self.start_deadline_s:g} s: {problem}"
                raise errors.ServerStartError(f"{member.url}: {late}\n{member.engine.log_tail()}")
            await asyncio.sleep(_POLL_S)

    def _unfit(self, info: ServerInfo) -> str | None:
        """Why the run cannot use such a server."""
        if self.config.deterministic and not info.deterministic:
            return "rollout.deterministic needs a server with --enable-deterministic-inference"
        if info.dtype != "float32" and info.fp32_head != self.fp32_head:
            there, here = ("without", "true") if self.fp32_head else ("with", "false")
            why = "engine and trainer would round log-probs differently"
            return f"it runs {there} --enable-fp32-lm-head, but model.fp32_head = {here}: {why}; change one of the two"
        if self.routed_experts and not info.routed_experts:
            return "actor.routing_replay needs a server with --enable-return-routed-experts"
        if self.config.on_publish == "keep" and not info.caches_responses:
            options = "without --disable-radix-cache, --strip-thinking-cache, --enable-deterministic-inference"
            return f"rollout.on_publish = keep needs a server that keeps responses in its prefix cache: {options}"
        if info.speculative != self.config.speculative.algorithm.removesuffix("off"):
            there, here = info.speculative or "off", self.config.speculative.algorithm
            return f"its speculative decoding is {there}, but rollout.speculative.algorithm = {here}; make them equal"
        if info.quantized != (self.config.quantization != "none"):
            option = f"--json-model-override-args '{json.dumps({'quantization_config': QUANTIZATION})}'"
            there = "without" if info.quantized else "with"
            return f"rollout.quantization = {self.config.quantization} needs a server {there} {option}"
        if self.config.weight_sync == "delta" and not info.takes_changes:
            return f"rollout.weight_sync = delta needs a server with --custom-weight-loader {LOADER}"
        if info.altered:
            return f"it runs with {info.altered}, so that its weights cannot be verified; start it without"
        return None

    async def _watch(self, member: Member) -> None:
        while True:
            try:
                reason = await self._until_failure(member)
            except Exception as error:  # a fault of ours must not leave a server unwatched
                reason = f"looking after it failed ({type(error).__name__}: {error})"
            self.report(f"server {member.url} is down: {reason}; restarting it")
            member.enter(State.DOWN, reason)
            self.balancer.dispatch()  # requests that avoid another server may go there now
            await self._revive(member)
            self.report(f"server {member.url} is back with weight version {member.weight_version}")

    async def _until_failure(self, member: Member) -> str:
        """Checks the server until it has to be restarted; returns why."""
        failed, probed = 0, 0.0
        interval_s = self.timing.probe_interval_s * max(1.0, len(self.members) / PROBED)
        with beside(self._until_scheduler_fails(member)) as scheduler, beside(self._sample(member)):
            while True:
                if member.state is State.DOWN:
                    return member.reason
                if not member.engine.alive():
                    return "its process ended or was stopped"
                if scheduler.done():
                    return scheduler.result()
                asked = time.monotonic()
                try:
                    # An answer to a request says as much as one to a probe, and costs nothing.
                    if member.state is State.SUSPECT or asked - max(member.last_answer, probed) > interval_s:
                        probed = asked
                        await member.call(member.probe(self.timing.probe_deadline_s))
                    failed = 0
                    if member.state is State.SUSPECT:
                        member.enter(State.READY)
                        self.balancer.dispatch()
                except (errors.ServerUnavailable, errors.ServerRefused) as error:
                    failed += member.last_answer < asked
                    if failed >= self.timing.failed_probes:
                        return f"{failed} probes failed, the last one: {error}"
                await asyncio.sleep(self.timing.probe_interval_s)

    async def _until_scheduler_fails(self, member: Member) -> str:
        while True:
            await asyncio.sleep(self.timing.scheduler_interval_s)
            asked = time.monotonic()
            try:
                await member.client.server_info(self.timing.scheduler_deadline_s)
            except (errors.ServerUnavailable, errors.ServerRefused) as error:
                if not member.busy_calls and member.last_answer < asked:
                    return f"its scheduler does not answer: {error}"

    async def _sample(self, member: Member) -> None:
        """Asks the server for its load. One that does not tell, such as one of `rollout.urls`, is none the worse."""
        while True:
            await asyncio.sleep(self.timing.load_interval_s)
            kv_use, queue = None, 0
            with suppress(errors.ServerUnavailable, errors.ServerRefused):
                load = await member.client.load(self.timing.probe_deadline_s)
                self.statistics.sampled(load)
                kv_use, queue = load.kv_use, load.waiting
            if not self.config.deterministic:  # where requests go is no matter of how fast servers answer there
                self.balancer.told(member, kv_use, queue)

    async def _revive(self, member: Member) -> None:
        """Restarts the server until it serves the newest weights."""
        patience_s = self.start_deadline_s + self.timing.load_deadline_s
        member.restart_deadline = time.monotonic() + patience_s if member.engine.ours else 0.0
        for attempt in itertools.count():
            try:
                return await self._restart(member)
            except Exception as error:  # whatever it was: this task is the only one that brings the server back
                backoff_s = self.timing.backoff_s(attempt)
                member.restart_deadline = 0.0
                member.enter(State.DOWN, (str(error) or type(error).__name__).splitlines()[0])
                self.report(f"server {member.url} did not come back, next attempt in {backoff_s:g} s: {error}")
            await asyncio.sleep(backoff_s)

    async def _restart(self, member: Member) -> None:
        still_starting = member.late and member.engine.alive()
        member.late = False
        if not still_starting:
            member.restarts += 1
            weights = await self.publisher.to_start_with(member)
            while not self._may_start.is_set():
                await self._may_start.wait()
                weights = await self.publisher.to_start_with(member)
            start = asyncio.ensure_future(member.engine.restart(weights))
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)
            await start
            await member.forget_client()
        member.enter(State.STARTING, member.reason)
        await self._wait_ready(member, time.monotonic() + self.start_deadline_s)
        if not member.engine.ours:
            # It was not restarted: its device may still wait in a broken process group, although its processes answer.
            with member.busy():
                await member.client.checksums(self.timing.load_deadline_s)
        with beside(self._until_failure(member)) as failure:
            await member.call(self.publisher.bring_up_to_date(member), failure)

    async def _watch_fleet(self) -> None:
        """Reports while no server serves. Ends the waits of requests once that lasts longer than `fleet_deadline_s` and
        no first restart is under way."""
        deadline_s = self.config.fleet_deadline_s
        down_since = reported = None
        while True:
            await asyncio.sleep(_POLL_S)
            now = time.monotonic()
            if any(member.serving for member in self.members) or not self._may_start.is_set():
                down_since = reported = None
                continue
            down_since = down_since or now
            states = ", ".join(f"{member.url} ({member.state}: {member.reason})" for member in self.members)
            if reported is None or now - reported > self.timing.report_interval_s:
                reported = now
                waiting = f"{self.balancer.waiting} requests wait for {states}"
                self.report(f"all servers are down for {now - down_since:.0f} s (of {deadline_s:g} s); {waiting}")
            if now - down_since > deadline_s and not any(member.restart_deadline >= now for member in self.members):
                tails = "\n".join(f"{member.url}:\n{member.engine.log_tail()}" for member in self.members)
                told = f"all servers are down for longer than rollout.fleet_deadline_s = {deadline_s:g}: {states}"
                self.balancer.refuse(errors.FleetLost(f"{told}; last words:\n{tails}"))
