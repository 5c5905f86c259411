"""An OpenAI-compatible chat endpoint whose every reply is kept: asked again, the same question costs nothing.

A reply is on the disk before anybody reads it. When the asking ends early, for an error or Ctrl-C, no further question
is sent, and the replies under way are waited for and kept. Only a kill or a crash loses those under way, at most
`concurrency` of them: what they would have said nobody knows, and they are asked for again.
"""

import asyncio
import errno
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from megatron_dapo.storage.durable import drop_torn_line, naming

ATTEMPT_S = 600.0
"""That one reply may take."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
_RETRIED = frozenset({408, 409, 425, 429})

Messages = list[dict[str, str]]


class EndpointError(RuntimeError):
    """The endpoint gives no reply. What it said before is in the journal; the same command goes on from there."""


class ChatEndpoint:
    """Asks `POST <url>/chat/completions`, at most `concurrency` questions at a time.

    The journal is a file of one JSON object a line, {"key", "reply"}; the key hashes model, messages and settings.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        journal: Path,
        key: str | None,
        concurrency: int,
        deadline_s: float,
        settings: dict[str, Any],
    ) -> None:
        """Reads the journal.

        Args:
            key: API key, sent as a bearer token.
            deadline_s: seconds after which a question without a reply, asked again and again, is an error.
            settings: further fields of each request, such as temperature.
        """
        self._url = url.rstrip("/") + "/chat/completions"
        self._model, self._settings = model, settings
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._deadline_s = deadline_s
        self._free = asyncio.Semaphore(concurrency)
        self._replies = _read_journal(journal)
        self._asked: dict[str, asyncio.Task[str]] = {}
        self._under_way = 0
        self._ending = False
        self._path, self._journal = journal, journal.open("ab", buffering=0)
        self.questions = 0
        """Requests sent by this object, repetitions after a failure included."""

    async def __aenter__(self) -> "ChatEndpoint":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        if self._under_way:
            print(f"waiting for {self._under_way} replies under way; Ctrl-C drops them", file=sys.stderr)
        try:
            await asyncio.gather(*self._asked.values(), return_exceptions=True)
        finally:
            await self._session.close()
            self._journal.close()

    async def ask(self, messages: Messages) -> str:
        """The reply. One that is known, or under way, is not asked for again. Raises EndpointError."""
        body = {"model": self._model, "messages": messages} | self._settings
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if key in self._replies:
            return self._replies[key]
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self._fetch(key, body))
        return await asyncio.shield(self._asked[key])

    async def _fetch(self, key: str, body: dict[str, Any]) -> str:
        async with self._free:
            try:
                reply = await self._persist(body)
                self._keep(key, reply)
            except (EndpointError, OSError):
                self._ending = True  # before the next question takes this one's place
                raise
        self._replies[key] = reply
        return reply

    def _keep(self, key: str, reply: str) -> None:
        """Returns when the reply is on the disk. After a failure nothing more is written: half a line stays last."""
        line = (json.dumps({"key": key, "reply": reply}) + "\n").encode()
        try:
            with naming(self._path):
                written = self._journal.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._journal.fileno())
        except OSError:
            self._journal.close()
            raise

    async def _persist(self, body: dict[str, Any]) -> str:
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            if self._ending:
                raise EndpointError(f"{self._url}: not asked, for the asking ends")
            self._under_way += 1
            try:
                return await self._attempt(body)
            except (TimeoutError, aiohttp.ClientError, _Refused) as error:
                if time.monotonic() - began + pause > self._deadline_s:
                    reason = f"{type(error).__name__}: {error}".removeprefix("_Refused: ")
                    raise EndpointError(f"{self._url}: {reason} (tried for {time.monotonic() - began:.0f} s)") from None
            finally:
                self._under_way -= 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _attempt(self, body: dict[str, Any]) -> str:
        self.questions += 1
        # aiohttp's own deadline swallows a cancellation that comes at the same time (its issue 5979).
        async with asyncio.timeout(ATTEMPT_S), self._session.post(self._url, json=body) as answer:
            content = await answer.read()
        if answer.status != 200:
            said = f"status {answer.status}: {content[:200].decode('utf-8', 'replace')}"
            if answer.status in _RETRIED or answer.status >= 500:
                raise _Refused(said)
            raise EndpointError(f"{self._url}: {said}")
        try:
            # null: it refused, or thought up to its limit.
            reply = json.loads(content)["choices"][0]["message"]["content"] or ""
        except (ValueError, KeyError, IndexError, TypeError):
            raise _Refused(f"no chat completion: {content[:200]!r}") from None
        if not isinstance(reply, str):
            raise _Refused(f"a completion without text: {content[:200]!r}")
        return reply


class _Refused(Exception):
    """An attempt that may succeed later."""


def _read_journal(path: Path) -> dict[str, str]:
    """Replies by key. Half a last line, from a kill, is cut off."""
    if not path.exists():
        return {}
    drop_torn_line(path)
    replies = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entry = json.loads(line)
            replies[entry["key"]] = entry["reply"]
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{path}:{number}: no entry of a journal ({error}); move the file away") from None
    return replies
