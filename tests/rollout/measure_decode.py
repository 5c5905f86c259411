"""`python -m tests.rollout.measure_decode`: cost of answers as arrays, beside plain `json` in the same run."""

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

from rollout.reply import read_reply
from tests.rollout.script import Script

RESPONSES, ROUNDS = 60, 7


def answers() -> tuple[list[bytes], int]:
    """Bodies as a server sends them, and their tokens."""
    script, bodies, tokens = Script(), [], 0
    for tag in range(RESPONSES):
        length, _ = script.response(tag, tag)
        entries, ids = script.body(tag, tag, 0, length)
        meta = b'"finish_reason":{"type":"length","length":1},"output_token_logprobs":[%b]' % entries
        bodies.append(b'{"output_ids":[%b],"meta_info":{%b}}' % (ids, meta))
        tokens += length
    return bodies, tokens


def plain(content: bytes) -> tuple[list[int], list[float]]:
    """The same with `json`, kept as Python lists."""
    answer = json.loads(content)
    drawn = answer["meta_info"]["output_token_logprobs"]
    ids = [entry[1] for entry in drawn]
    assert ids == answer["output_ids"]
    return ids, [entry[0] for entry in drawn]


def cpu_ns(decode: Callable[[bytes], object], bodies: list[bytes], tokens: int) -> float:
    start = time.process_time()
    for body in bodies:
        decode(body)
    return (time.process_time() - start) / tokens * 1e9


def kept_bytes(decode: Callable[[bytes], object], bodies: list[bytes], tokens: int) -> float:
    tracemalloc.start()
    results = [decode(body) for body in bodies]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(results) == len(bodies)
    return size / tokens


def main() -> None:
    bodies, tokens = answers()
    print(f"{len(bodies)} responses, {tokens} tokens, {sum(map(len, bodies)) / tokens:.1f} bytes of JSON a token")
    pairs = [(cpu_ns(read_reply, bodies, tokens), cpu_ns(plain, bodies, tokens)) for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(slow / fast for fast, slow in pairs)
    print(f"CPU a token, median of {ROUNDS}: arrays {ours:.0f} ns, json {theirs:.0f} ns, ratio {ratio:.1f}")
    sizes = kept_bytes(read_reply, bodies, tokens), kept_bytes(plain, bodies, tokens)
    print(f"kept a token: arrays {sizes[0]:.1f} bytes, json {sizes[1]:.1f} bytes, ratio {sizes[1] / sizes[0]:.1f}")


if __name__ == "__main__":
    main()
