"""Environment `remote` against a service of our own that misbehaves on purpose."""

import asyncio
import json
from dataclasses import asdict

import pytest
from aiohttp import web

from megatron_dapo.config import ConfigError, load_config
from reward.check import check_environments, check_verifiers
from reward.config import RemoteConfig, RewardConfig, ServiceConfig
from reward.environment import End, Episode, Observation, Turn
from reward.pool import remote
from reward.pool.pool import RewardPool
from reward.verdict import PoolError, VerificationRequest, VerifierError
from tests.processes import ROOT

EPISODE = Episode("Guess.", "7", (Turn("5", "higher", (5, 2)), Turn("call", token_ids=(9,))), state={"left": 2})


def guesses(number, asked):
    said, truth = asked["turns"][-1]["response"], asked["ground_truth"]
    return {"outcome": {"accuracy": True} if said == truth else {"text": "higher", "state": number}}


def asked_of(answer, *episodes, key=None, together=True, **options):
    """What the pool says to `episodes` where `answer` (number of the request, its body) is what the service answers, or
    (status, text); and the requests that it saw."""
    seen, keys = [], []

    async def handle(request):
        seen.append(await request.json())
        keys.append(request.headers.get("Authorization"))
        said = answer(len(seen), seen[-1])
        said = await said if asyncio.iscoroutine(said) else said
        return web.Response(status=said[0], text=said[1]) if isinstance(said, tuple) else web.json_response(said)

    async def ask():
        application = web.Application()
        application.router.add_post("/step", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/step"
        service = ServiceConfig(url=url, key_file=key and str(key), **{"deadline_s": 20.0} | options)
        pool = RewardPool(RewardConfig(workers=1, remote_environment=service))
        try:
            return await asyncio.gather(*(pool.step("remote", episode) for episode in episodes))
        finally:
            await asyncio.to_thread(pool.close)
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(ask(), 60)), seen, keys


def test_the_service_gets_the_whole_episode_and_its_outcome_is_the_environments(tmp_path):
    key = tmp_path / "key"
    key.write_text("abc\n")
    right = Episode("Guess.", "7", (Turn("7 \ud83d"[0]),), last=True)
    (low, over), seen, keys = asked_of(guesses, EPISODE, right, key=key)
    assert low.outcome in (Observation("higher", state=1), Observation("higher", state=2))
    assert over.outcome == End(accuracy=True)
    assert (low.error, low.unjudged) == (None, False)
    assert json.loads(json.dumps(asdict(EPISODE))) in seen
    assert [set(each) for each in seen] == [{"prompt", "ground_truth", "turns", "state", "last"}] * 2
    assert set(keys) == {"Bearer abc"}
    (left,), _, keys = asked_of(lambda *_: {"outcome": None}, EPISODE)
    assert (left.outcome, left.error, keys) == (None, None, [None])


@pytest.mark.parametrize(
    "failure",
    [
        (500, "broken"),
        (429, ""),
        (200, "<html>"),
        (200, "[1"),
        (200, '{"outcome": {"text": 5}}'),
        (200, '{"outcome": {"accuracy": 1}}'),
        (200, '{"outcome": {"accuracy": true, "more": 1}}'),
        (200, '{"outcome": {"text": "a", "role": "system"}}'),
        (200, '{"outcome": [7]}'),
        (200, '{"outcome": {"text": "a", "reward": NaN}}'),
        (200, "{}"),
    ],
)
def test_what_may_pass_is_tried_again(failure):
    (found,), seen, _ = asked_of(lambda number, asked: failure if number == 1 else guesses(number, asked), EPISODE)
    assert (found.outcome, found.error) == (Observation("higher", state=2), None)
    assert seen[0] == seen[1]


def test_a_service_that_is_late_is_asked_again():
    async def late(number, asked):
        if number == 1:
            await asyncio.sleep(3)
        return guesses(number, asked)

    (found,), seen, _ = asked_of(late, EPISODE, attempt_s=0.5)
    assert found.outcome == Observation("higher", state=2)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("answer", "options", "reason"),
    [
        (lambda *_: (404, "nothing here"), {}, r"/step: status 404: 'nothing here' \(1 attempts"),
        (
            lambda *_: {"outcome": {"accuracy": "yes"}},
            {"deadline_s": 0.1},
            r'/step: the answer has no "outcome" that can be used \(it returned .*no Observation .*\(1 attempts',
        ),
        (lambda *_: asyncio.sleep(3), {"attempt_s": 0.3, "deadline_s": 0.5}, r"/step: no answer within 0\.3 s \("),
    ],
)
def test_a_service_that_gives_no_outcome_stops_the_run_in_words(answer, options, reason):
    (found,), _, _ = asked_of(answer, EPISODE, **options)
    assert found.unjudged
    assert found.outcome is None
    with pytest.raises(VerifierError, match=reason):
        raise VerifierError(found.error)


def test_no_more_requests_at_a_time_than_connections():
    running, most = [0], [0]

    async def slow(number, asked):
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.05)
        running[0] -= 1
        return guesses(number, asked)

    found, seen, _ = asked_of(slow, *[EPISODE] * 20, connections=4)
    assert (len(found), len(seen), most[0]) == (20, 20, 4)


def test_a_pool_that_is_closed_ends_the_wait(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 5.0)

    async def ask():
        service = ServiceConfig(url="http://127.0.0.1:9/step")
        pool = RewardPool(RewardConfig(workers=1, remote_environment=service))
        waiting = asyncio.ensure_future(pool.step("remote", EPISODE))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(pool.close)
        with pytest.raises(PoolError, match="it is closed"):
            await waiting

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_before_a_start_address_and_key_are_looked_at(tmp_path):
    names = {"remote": "data.environment"}
    with pytest.raises(VerifierError, match=r"data.environment = remote: reward.remote_environment.url is not set"):
        check_environments(names, RewardConfig())
    there = {"url": "http://127.0.0.1:9/step", "key_file": str(tmp_path / "key")}
    for check, section in ((check_environments, "remote_environment"), (check_verifiers, "remote")):
        kind = ServiceConfig if section == "remote_environment" else RemoteConfig
        config = RewardConfig(**{section: kind(**there)})
        with pytest.raises(VerifierError, match=rf"remote: reward.{section}.key_file: .*No such file"):
            check(names, config)
    config = RewardConfig(remote_environment=ServiceConfig(**there))
    for wrong in ("", "a\nb", "k\u00e9y"):
        (tmp_path / "key").write_text(wrong)
        with pytest.raises(VerifierError, match=r"reward.remote_environment.key_file: .*(one key|ascii)"):
            check_environments(names, config)
    (tmp_path / "key").write_text("abc\n")
    check_environments(names, config)


def test_the_key_goes_to_the_service_of_the_verifier_too(tmp_path):
    key, seen = tmp_path / "key", []
    key.write_text("abc\n")

    async def judge(request):
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"verdicts": [{"accuracy": True}]})

    async def ask():
        application = web.Application()
        application.router.add_post("/judge", judge)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/judge"
        pool = RewardPool(RewardConfig(workers=1, remote=RemoteConfig(url=url, key_file=str(key))))
        try:
            return await pool.verify([VerificationRequest(response="a", ground_truth="b", verifier="remote")])
        finally:
            await asyncio.to_thread(pool.close)
            await runner.cleanup()

    (verdict,) = asyncio.run(asyncio.wait_for(ask(), 60))
    assert (verdict.accuracy, seen) == (True, ["Bearer abc"])


def test_keys_that_nothing_reads_or_that_come_too_late_are_refused():
    def refused(*overrides):
        with pytest.raises(ConfigError) as error:
            load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", overrides)
        return str(error.value)

    service = "reward.remote_environment.url=http://127.0.0.1:9/step"
    assert "reward.remote_environment: no prompt has environment remote" in refused(service)
    late = refused(service, "data.environment=remote", "reward.remote_environment.deadline_s=1e9")
    assert "reward.remote_environment.deadline_s = 1e+09: must be below run.step_deadline_s" in late
