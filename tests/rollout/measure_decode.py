"""`python -m tests.rollout.measure_decode`: cost of reading answers, beside plain `json` in one run."""

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

from rollout.wire.reply import LENGTH_BYTES, Finish, Segment, frame, read_frame, read_part
from tests.rollout.script import Script

RESPONSES, ROUNDS = 60, 7


def answers() -> tuple[list[bytes], list[bytes], int]:
    """Bodies as a server sends them in JSON, and in frames, and their tokens."""
    script, bodies, packed, tokens = Script(), [], [], 0
    for tag in range(RESPONSES):
        length, _ = script.response(tag, tag)
        entries, ids = script.body(tag, tag, 0, length)
        meta = b'"finish_reason":{"type":"length","length":1},"output_token_logprobs":[%b]' % entries
        bodies.append(b'{"output_ids":[%b],"meta_info":{%b}}' % (ids, meta))
        drawn, log_probs = (array.tobytes() for array in script.tokens(tag, tag))
        packed.append(frame(Segment(token_ids=drawn, log_probs=log_probs, finish=Finish("length")))[LENGTH_BYTES:])
        tokens += length
    return bodies, packed, tokens


def frames(content: bytes) -> object:
    """From a server of ours; joined with others, as the fleet does."""
    reply, _ = read_frame(content)
    return reply.token_ids.copy(), reply.log_probs.copy()


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


def costs() -> dict[str, tuple[float, float]]:
    """{way: (CPU nanoseconds a token, the median of the rounds; bytes kept a token)}, the ways in turn."""
    bodies, packed, tokens = answers()
    ways = {"frames": (frames, packed), "JSON into arrays": (read_part, bodies), "plain json": (plain, bodies)}
    rounds = [{name: cpu_ns(*way, tokens) for name, way in ways.items()} for _ in range(ROUNDS)]
    return {
        name: (statistics.median(each[name] for each in rounds), kept_bytes(*way, tokens)) for name, way in ways.items()
    }


def main() -> None:
    bodies, packed, tokens = answers()
    sizes = [sum(map(len, some)) / tokens for some in (bodies, packed)]
    print(f"{len(bodies)} responses, {tokens} tokens, {sizes[0]:.1f} bytes of JSON a token, {sizes[1]:.2f} in frames")
    for name, (cpu, kept) in costs().items():
        print(f"{name}: {cpu:.1f} ns of CPU a token, median of {ROUNDS}; {kept:.1f} bytes kept a token")


if __name__ == "__main__":
    main()
