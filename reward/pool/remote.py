"""Verifier and environment `remote`: a service is asked over HTTP, with retries and a deadline.

    POST url   {"requests": [{"prompt": "...", "response": "...", "ground_truth": "..."}, ...]}
    200        {"verdicts": [{"accuracy": true}, ...]}      in order; may hold "extracted" (text) and "rule" (text) too

    POST url   the fields of a `reward.environment.Episode`: {"prompt": "...", "turns": [{"response": "...", ...}], ...}
    200        {"outcome": {"text": "higher"}}              the fields of an Observation; or those of an End, as
               {"outcome": {"accuracy": true}}; or null: the prompt's verifier judges

What may pass is tried again with growing pauses until `deadline_s`: no connection, no answer in time, status 408, 429
and 5xx, a body that is not this JSON. Any other status is final. What stays without an answer is `unjudged`: the
responses are not to blame.
"""

import asyncio
import json
import random
import time
from asyncio import Semaphore
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward.config import RemoteConfig, ServiceConfig
from reward.environment import Episode, Outcome, Stepped, outcome_of, sendable
from reward.verdict import EXTRACTED_LIMIT, Rule, Verdict, VerificationRequest

if TYPE_CHECKING:
    import aiohttp

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
ANSWER_BYTES = 64 << 20
"""Longest answer that is read."""

RULE = "remote"
"""The rule's name in `Verdict.rule` where the service gives none."""


_RETRIED = frozenset({408, 425, 429})


class _Refused(Exception):
    """A failed attempt; the message says what happened."""


class _Final(_Refused):
    """One that no further attempt could get past."""


async def verify(config: RemoteConfig, requests: Sequence[VerificationRequest]) -> list[Verdict]:
    """One verdict for each request, in order; whatever the service answers."""
    if config.url is None or not requests:
        return [_unjudged("reward.remote.url is not set; give the address of the service", 0.0)] * len(requests)
    batches = [requests[at : at + config.batch] for at in range(0, len(requests), config.batch)]
    free = Semaphore(config.connections)
    async with open_session() as session:
        judged = await asyncio.gather(*(_judge(config, session, free, batch) for batch in batches))
    return [verdict for verdicts in judged for verdict in verdicts]


class RemoteEnvironment:
    """Environment `remote`. Used in one event loop."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config, self._free = config, Semaphore(config.connections)
        self._session: aiohttp.ClientSession | None = None

    async def step(self, episode: Episode) -> Stepped:
        """What the service makes of the newest turn; `unjudged` where it makes nothing of it."""
        async with self._free:
            began = time.monotonic()
            try:
                self._session = self._session or open_session()
                outcome = await _answered(self._config, self._session, asdict(episode), _outcome)
            except _Refused as error:
                return Stepped(seconds=time.monotonic() - began, error=str(error), unjudged=True)
            return Stepped(outcome=outcome, seconds=time.monotonic() - began)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def open_session() -> "aiohttp.ClientSession":
    """For requests to a service."""
    import aiohttp  # only services need it

    connector = aiohttp.TCPConnector(limit=0)  # `connections` is the limit
    headers = {"Content-Type": "application/json"}
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(), headers=headers)


async def _judge(
    config: RemoteConfig, session: "aiohttp.ClientSession", free: Semaphore, batch: Sequence[VerificationRequest]
) -> list[Verdict]:
    asked = [{"prompt": r.prompt, "response": r.response, "ground_truth": r.ground_truth} for r in batch]
    async with free:
        began = time.monotonic()
        try:
            answers = await _answered(config, session, {"requests": asked}, lambda said: _verdicts(said, len(batch)))
        except _Refused as refused:
            return [_unjudged(str(refused), (time.monotonic() - began) / len(batch))] * len(batch)
        seconds = (time.monotonic() - began) / len(batch)
    return [Verdict(accuracy=right, extracted=text, rule=rule, seconds=seconds) for right, text, rule in answers]


async def _answered(
    config: ServiceConfig, session: "aiohttp.ClientSession", asked: dict[str, Any], read: Callable[[bytes], Any]
) -> Any:
    """The service's answer as `read` takes it, which raises _Refused for what is none. Raises _Refused: there is none
    by the deadline."""
    body = json.dumps(asked).encode("ascii")  # lone surrogates of a response pass as JSON escapes
    began, pause, attempts = time.monotonic(), FIRST_PAUSE_S, 0
    while True:
        attempts += 1
        try:
            return read(await _attempt(config, session, body))
        except _Refused as refused:
            spent = time.monotonic() - began
            if isinstance(refused, _Final) or spent + pause > config.deadline_s:
                raise _Refused(f"{config.url}: {refused} ({attempts} attempts in {spent:.0f} s)") from None
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # so that many callers do not come back at once
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def _attempt(config: ServiceConfig, session: "aiohttp.ClientSession", body: bytes) -> bytes:
    import aiohttp

    try:
        header = {"Authorization": f"Bearer {Path(config.key_file).read_text().strip()}"} if config.key_file else {}
        # aiohttp's own deadline swallows a cancellation that comes at the same time (its issue 5979).
        async with (
            asyncio.timeout(config.attempt_s),
            session.post(str(config.url), data=body, headers=header, allow_redirects=False) as answer,
        ):
            content, status = await _content(answer), answer.status
    except TimeoutError:
        raise _Refused(f"no answer within {config.attempt_s:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:  # a key that no header can hold is a ValueError
        raise _Refused(f"{type(error).__name__}: {error}") from None
    if status != 200:
        kind = _Final if status not in _RETRIED and status < 500 else _Refused
        raise kind(f"status {status}: {content[:200].decode('utf-8', 'replace')!r}")
    return content


async def _content(answer: "aiohttp.ClientResponse") -> bytes:
    content = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):  # counted as it comes: compressed, its length says little
        content += part
        if len(content) > ANSWER_BYTES:
            raise _Refused(f"an answer of more than {ANSWER_BYTES >> 20} MiB")
    return bytes(content)


def _unjudged(reason: str, seconds: float) -> Verdict:
    return Verdict(accuracy=False, extracted=None, rule=Rule.UNJUDGED.value, seconds=seconds, error=reason)


def _outcome(content: bytes) -> Outcome:
    try:
        return outcome_of(json.loads(content)["outcome"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Refused(f'the answer has no "outcome" that can be used ({error}): {content[:100]!r}') from None


def _verdicts(content: bytes, count: int) -> list[tuple[bool, str | None, str]]:
    """(accuracy, extracted, rule) of each verdict. A list that is too short or too long is an error."""
    try:
        verdicts = json.loads(content)["verdicts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _Refused(f'the answer is no JSON object with "verdicts": {content[:100]!r}') from None
    if not isinstance(verdicts, list) or len(verdicts) != count:
        raise _Refused(f'"verdicts" is no list of {count} entries, one for each request: {content[:100]!r}')
    return [_verdict(verdict) for verdict in verdicts]


def _verdict(verdict: Any) -> tuple[bool, str | None, str]:
    if not isinstance(verdict, dict) or verdict.get("accuracy") not in (0, 1):  # True and 1.0 are equal to 1
        raise _Refused(f'a verdict without an "accuracy" of true or false: {str(verdict)[:100]}')
    extracted, rule = verdict.get("extracted"), verdict.get("rule")
    if not (extracted is None or isinstance(extracted, str)) or not (rule is None or isinstance(rule, str)):
        raise _Refused(f'a verdict whose "extracted" or "rule" is no text: {str(verdict)[:100]}')
    text, rule = (each and sendable(each[:EXTRACTED_LIMIT]) for each in (extracted, rule))
    return bool(verdict["accuracy"]), text, rule or RULE
