"""Verifier `remote` against a service of our own that misbehaves on purpose."""

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from reward.config import RemoteConfig, RewardConfig
from reward.pool import remote
from reward.pool.pool import RewardPool
from reward.verdict import Verdict, VerificationRequest

Answer = tuple[int, bytes]


def right(requests: list[dict[str, str]]) -> Answer:
    verdicts = [{"accuracy": r["response"] == r["ground_truth"], "extracted": r["response"][:3]} for r in requests]
    return 200, json.dumps({"verdicts": verdicts}).encode()


@contextmanager
def service(answer: Callable[[int, list[dict[str, str]]], Answer]) -> Iterator[tuple[str, list[int]]]:
    """A server whose answer is a function of the number of the request; yields its URL and the batch sizes seen."""
    sizes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["requests"]
            sizes.append(len(requests))
            status, body = answer(len(sizes), requests)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if body.startswith(b"\x1f\x8b"):
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/judge", sizes
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(response: str, verifier: str = "remote") -> VerificationRequest:
    return VerificationRequest(response=response, ground_truth="42", verifier=verifier)


def judge(url: str | None, *requests: VerificationRequest, **options: float) -> list[Verdict]:
    service_config = RemoteConfig(url=url, **{"deadline_s": 20.0} | options)

    async def verify() -> list[Verdict]:
        pool = RewardPool(RewardConfig(workers=1, remote=service_config))
        try:
            return await asyncio.wait_for(pool.verify(requests), 60)
        finally:
            pool.close()

    return asyncio.run(verify())


def test_batches_in_order_beside_verifiers_of_the_pool():
    requests = [
        ask("42"),
        ask("Answer: 42", "robust"),
        ask("41"),
        ask("Answer: 41", "robust"),
        ask("42"),
        ask("\ud83d"),
    ]
    with service(lambda number, asked: right(asked)) as (url, sizes):
        verdicts = judge(url, *requests, batch=2)
    assert [verdict.accuracy for verdict in verdicts] == [True, True, False, False, True, False]
    assert [verdict.rule for verdict in verdicts[:2]] == ["remote", "integer"]
    assert verdicts[2].extracted == "41"
    assert sizes == [2, 2]
    assert not any(verdict.error for verdict in verdicts)


@pytest.mark.parametrize(
    "failure",
    [
        (503, b"busy"),
        (429, b""),
        (200, b"not json"),
        (200, b"[]"),
        (200, b'{"verdicts": []}'),
        (200, b'{"verdicts": [{"accuracy": 0.5}]}'),
        (200, b'{"verdicts": [{"accuracy": NaN}]}'),
        (200, b'{"verdicts": [{"accuracy": null}]}'),
        (200, b'{"verdicts": [{"accuracy": true, "extracted": 7}]}'),
    ],
)
def test_what_may_pass_is_tried_again(failure):
    with service(lambda number, asked: failure if number < 3 else right(asked)) as (url, sizes):
        (verdict,) = judge(url, ask("42"))
    assert verdict.accuracy
    assert len(sizes) == 3


def test_as_many_are_asked_at_once_as_the_key_says():
    together = threading.Barrier(120, timeout=30)

    def all_at_once(number, requests):
        together.wait()
        return right(requests)

    with service(all_at_once) as (url, _):
        config = RemoteConfig(url=url, connections=120, batch=1, attempt_s=40.0, deadline_s=40.0)
        asked = [VerificationRequest(response="7", ground_truth="7") for _ in range(120)]
        assert all(verdict.accuracy for verdict in asyncio.run(remote.verify(config, asked)))


def test_a_refusal_is_final_and_nobodys_fault():
    with service(lambda number, asked: (401, b"who are you")) as (url, sizes):
        verdicts = judge(url, ask("42"), ask("1"))
    assert sizes == [2]
    assert all(verdict.unjudged and not verdict.accuracy for verdict in verdicts)
    assert "status 401: 'who are you" in (verdicts[0].error or "")


def test_an_answer_is_read_up_to_its_limit_however_it_is_sent(monkeypatch):
    monkeypatch.setattr(remote, "ANSWER_BYTES", 1 << 20)
    with service(lambda number, asked: (200, gzip.compress(right(asked)[1]))) as (url, _):
        assert judge(url, ask("42"))[0].accuracy
    with service(lambda number, asked: (200, gzip.compress(right(asked)[1] + b" " * (2 << 20)))) as (url, _):
        (verdict,) = judge(url, ask("42"), deadline_s=0.5)
    assert verdict.unjudged
    assert "more than 1 MiB" in (verdict.error or "")


def test_a_service_that_is_away_is_unjudged_after_the_deadline():
    with service(lambda number, asked: right(asked)) as (url, _):
        pass
    away, near = judge(url, ask("42"), ask("Answer: 42", "robust"), deadline_s=1.0)
    assert away.unjudged
    assert url in (away.error or "")
    assert "attempts" in (away.error or "")
    assert near.accuracy


def test_a_service_that_hangs_is_given_up():
    release = threading.Event()

    def hang(number: int, asked: list[dict[str, str]]) -> Answer:
        release.wait(10)
        return right(asked)

    with service(hang) as (url, _):
        (verdict,) = judge(url, ask("42"), attempt_s=0.3, deadline_s=0.5)
        release.set()
    assert verdict.unjudged
    assert "no answer within 0.3 s" in (verdict.error or "")


def test_a_caller_that_gives_up_as_an_attempt_ends_is_let_go():
    free = threading.Event()

    def hang(number: int, requests: list[dict[str, str]]) -> Answer:
        free.wait(20)
        return right(requests)

    async def give_up(url: str, sizes: list[int]) -> float:
        config = RemoteConfig(url=url, attempt_s=2.0, deadline_s=20.0)
        asked = asyncio.ensure_future(remote.verify(config, [ask("42")]))
        while not sizes:
            await asyncio.sleep(0.01)
        time.sleep(2.2)  # the event loop stands still: then both are due at once
        await asyncio.sleep(0)
        asked.cancel()
        began = time.monotonic()
        await asyncio.gather(asked, return_exceptions=True)
        return time.monotonic() - began

    with service(hang) as (url, sizes):
        seconds = asyncio.run(give_up(url, sizes))
        free.set()
    assert sizes == [1]
    assert seconds < 5


def test_without_an_address_nothing_is_judged():
    (verdict,) = judge(None, ask("42"))
    assert verdict.unjudged
    assert "reward.remote.url" in (verdict.error or "")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h:99999/x", "port number"),
        ("http://h:-1", "port number"),
        ("http://h:0/", "port 0"),
        ("http://h:abc/", "port number"),
        ("http://h:1" + "0" * 5000, "port number"),
        ("http://:80/", "empty host"),
        ("http://%zz/", "domain name"),
        ("http://1.2.3.999/", "IPv4"),
        ("http://a..b/", "host name: label empty"),
        ("http://[::1/", "IPv6"),
        ("http://[::1]:99999/", "port number"),
        ("http://h h/", "space"),
        ("http://h/\n", "space"),
        ("http://h/\u00fc", "%XX"),
        ("h:80", "'http' or 'https'"),
        ("ftp://h/", "'http' or 'https'"),
        ("", "empty"),
    ],
)
def test_an_address_that_cannot_be_asked_is_an_error_of_the_config(url, said):
    with pytest.raises(ValidationError, match=said):
        RemoteConfig(url=url)


@pytest.mark.parametrize(
    "url",
    ["http://h", "https://judge.example.com/v1?x=1", "http://10.0.0.7:8123/judge", "http://[::1]:80/x", "http://h:/",
     "http://user:pw@my_host-2:65535", "HTTP://h/", "http://h."],
)  # fmt: skip
def test_an_address_that_can_be_asked_stays_as_it_is(url):
    assert RemoteConfig(url=url).url == url


def test_the_command_line_names_the_address(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("{}\n")
    command = [sys.executable, "-m", "reward", "grade", str(file), "--remote-url", "http://h:99999/"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "url = 'http://h:99999/': " in refused.stderr
    assert "invalid port number" in refused.stderr


def test_an_unexpected_error_surfaces_as_itself(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(remote, "_verdicts", broken)
    with service(lambda number, asked: right(asked)) as (url, _), pytest.raises(KeyError, match="a bug"):
        judge(url, ask("42"), ask("41"), batch=1)
