"""A prompt that several requests of one forward share is computed once: all G responses of a group begin with it.

A prefix cache helps only requests that come after the prompt was computed; the responses of a group come together.
The layers see the rows of the first request with each prompt. Keys and values are written for all requests, and all
get the hidden states. In deterministic inference this changes no request's numbers, since there a row does not depend
on the number of rows. Requests with a part in the prefix cache share nothing.

Legend of shapes: T tokens of the forward (all requests, flat), U of them computed, H hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

KNOWN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Their `model` takes token ids and positions first, and mixes tokens by attention alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Two prompts of 3 tokens, the first one twice: requests=[0, 2], rows=[0, 1, 2, 6, 7, 8],
    places=[0, 1, 2, 0, 1, 2, 3, 4, 5]"""

    requests: list[int]
    """Those that are computed, in order."""
    rows: Tensor
    """[U] of the T tokens, those that are computed."""
    places: Tensor
    """[T] where each token's result is among the U."""


def find_sharing(input_ids: Tensor, cached: Sequence[int], new: Sequence[int]) -> Sharing | None:
    """What can be shared in a forward; None if nothing.

    Args:
        input_ids: [T] the new tokens of one request after the other.
        cached: tokens of each request that were computed before. Those that have some are computed by themselves.
        new: tokens of each request in this forward.
    """
    ids = input_ids.cpu().numpy()
    ends = list(accumulate(new))
    spans = enumerate(zip(cached, ends, new, strict=True))
    prompts = [at if before else ids[end - count : end].tobytes() for at, (before, end, count) in spans]
    first: dict[int | bytes, int] = {}
    firsts = [first.setdefault(prompt, at) for at, prompt in enumerate(prompts)]
    requests = list(first.values())
    if len(requests) == len(new) or ends[-1] != len(ids):
        return None
    begins = dict(zip(requests, accumulate((new[at] for at in requests), initial=0), strict=False))
    rows = [torch.arange(ends[at] - new[at], ends[at]) for at in requests]
    places = [torch.arange(begins[at], begins[at] + new[at]) for at in firsts]
    return Sharing(requests=requests, rows=torch.cat(rows), places=torch.cat(places))


class SharedPrompts:
    """Between a model's inputs and its layers, and between these and its output."""

    def __init__(self, model: Any, *, wanted: bool = True) -> None:
        """
        Args:
            model: SGLang's causal model. Nothing is shared in one that is not known.
            wanted: whether something may be shared at all.
        """
        layers: Any = getattr(model, "model", None)
        self._possible = wanted and type(model).__name__ in KNOWN
        self.now: Sharing | None = None
        """Of the forward that is under way."""
        if self._possible:
            layers.register_forward_pre_hook(self._before)
            layers.register_forward_hook(self._after)

    def begin(self, input_ids: Tensor, cached: Sequence[int], new: Sequence[int]) -> Sharing | None:
        """Plans a forward over several prompts."""
        self.now = find_sharing(input_ids, cached, new) if self._possible else None
        return self.now

    def _before(self, layers: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """(input_ids [T], positions [T], ...) -> those of the U."""
        if self.now is None:
            return None
        input_ids, positions, *others = inputs
        if len(input_ids) != len(self.now.places):  # of a forward that ended before its layers
            raise RuntimeError(f"{len(input_ids)} tokens, but {len(self.now.places)} were planned")
        return input_ids[self.now.rows], positions[self.now.rows], *others

    def _after(self, layers: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
        """[U, H] -> [T, H]."""
        sharing, self.now = self.now, None
        return hidden if sharing is None else hidden[sharing.places]
