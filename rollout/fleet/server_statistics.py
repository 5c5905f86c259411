"""What the servers say of their KV cache and their queues, summed up over a rollout step."""

from collections import defaultdict

from rollout.generation import ServedPart
from rollout.wire.client import ServerLoad


class ServerStatistics:
    """Sums of samples and answers until `take`. What no server tells is left out."""

    def __init__(self) -> None:
        self._sums = defaultdict[str, float](float)
        self._largest: dict[str, float | int] = {}

    def sampled(self, load: ServerLoad) -> None:
        """A server's load, as it was asked for."""
        self._sums["samples"] += 1
        for name, value in (("kv_use", load.kv_use), ("queue", load.waiting)):
            self._sums[name] += value
            self._largest[name] = max(value, self._largest.get(name, 0))

    def served(self, part: ServedPart) -> None:
        """A server's answer to a request."""
        if part.cached_tokens is not None:
            self._sums["prompt_tokens"] += part.prompt_tokens
            self._sums["cached_tokens"] += min(part.cached_tokens, part.prompt_tokens)
        if part.retractions is not None:
            self._sums["retractions"] += part.retractions

    def take(self) -> dict[str, float | int]:
        """The metrics `servers/*` since the last call."""
        sums, largest, metrics = self._sums, self._largest, dict[str, float | int]()
        self._sums, self._largest = defaultdict(float), {}
        for name, value in largest.items():
            metrics |= {f"servers/{name}": sums[name] / sums["samples"], f"servers/{name}_max": value}
        if sums["prompt_tokens"]:
            metrics["servers/prefix_hits"] = sums["cached_tokens"] / sums["prompt_tokens"]
        if "retractions" in sums:
            metrics["servers/retractions"] = int(sums["retractions"])
        return metrics
