"""The prompt order: a pure function of seed and data, with the weights kept on every stretch."""

from collections import Counter

import numpy as np
import pytest

from megatron_dapo.config.base import ConfigError
from megatron_dapo.data.order import PromptOrder, Span, _drawn
from megatron_dapo.data.prompts import Prompt, PromptSet


def prompt_at(position: int, count: int, seed: int) -> int:
    """The order of one file in independent epochs."""
    epoch, at = divmod(position, count)
    return int(np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)[at])


def spans(*sizes):
    starts = np.cumsum([0, *[count for count, _ in sizes]])
    return [Span(start=int(starts[at]), count=count, weight=weight) for at, (count, weight) in enumerate(sizes)]


def test_the_order_is_a_new_permutation_every_epoch_and_depends_on_the_seed():
    one, other = (PromptOrder(spans((50, 1.0)), seed) for seed in (3, 4))
    first = [one.index_at(p) for p in range(50)]
    second = [one.index_at(p) for p in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == [one.index_at(p) for p in range(50)]
    assert first != [other.index_at(p) for p in range(50)]


def test_one_file_has_the_order_of_prompt_at():
    order, shuffled = (PromptOrder(spans((50, 2.5)), 3, spaced=spaced) for spaced in (True, False))
    assert [shuffled.index_at(p) for p in range(250)] == [prompt_at(p, 50, 3) for p in range(250)]
    even = [p for p in range(250) if p // 50 % 2 == 0]
    assert [order.index_at(p) for p in even] == [prompt_at(p, 50, 3) for p in even]


@pytest.mark.parametrize("spaced", [True, False])
def test_the_key_selects_the_order(spaced):
    name = "spaced" if spaced else "shuffled"
    chosen = PromptSet(prompts=(), spans=tuple(spans((50, 1.0))), counts=Counter(), content_hash="", ordered=name)
    order, wanted = chosen.order(3), PromptOrder(spans((50, 1.0)), 3, spaced=spaced)
    assert [order.index_at(p) for p in range(100)] == [wanted.index_at(p) for p in range(100)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 50, 301])
def test_a_prompt_does_not_come_again_within_a_quarter_of_its_file(count):
    for seed in range(5):
        order = PromptOrder(spans((count, 1.0)), seed)
        used = {}
        for position in range(9 * count):
            index = order.index_at(position)
            assert position - used.get(index, -count) > count // 4, (seed, position)
            used[index] = position
        assert len(used) == count


def test_an_odd_epoch_puts_every_prompt_anywhere():
    """Mean position of each of 40 prompts over 2000 seeds: 19.5, standard error 0.26."""
    places = np.zeros(40)
    for seed in range(2000):
        order = PromptOrder(spans((40, 1.0)), seed)
        for at in range(40):
            places[order.index_at(40 + at)] += at
    assert np.abs(places / 2000 - 19.5).max() < 1.2


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_every_stretch_holds_the_files_as_the_weights_say(seed):
    files = spans((40, 1.0), (1000, 5.0), (7, 2.0))
    order = PromptOrder(files, seed)
    indices = np.array([order.index_at(p) for p in range(20_000)])
    owner = np.searchsorted([40, 1040], indices, side="right")
    for start in range(0, 20_000, 512):
        counts = np.bincount(owner[start : start + 512], minlength=3)
        size = counts.sum()
        assert np.abs(counts - size * np.array([1, 5, 2]) / 8).max() <= 5, (start, counts)


def test_each_file_is_gone_through_whole_before_it_repeats():
    order = PromptOrder(spans((40, 1.0), (90, 2.0)), 5)
    indices = [order.index_at(p) for p in range(1000)]
    for low, high in ((0, 40), (40, 130)):
        own = [index for index in indices if low <= index < high]
        size = high - low
        for start in range(0, len(own) - size, size):
            assert sorted(own[start : start + size]) == list(range(low, high))


def test_a_position_has_its_prompt_whichever_was_asked_before():
    files = spans((40, 1.0), (90, 2.0))
    forward, far = PromptOrder(files, 5), PromptOrder(files, 5)
    at = [0, 1, 16383, 16384, 40_000, 50_001]
    backward = {p: far.index_at(p) for p in reversed(at)}
    assert [forward.index_at(p) for p in at] == [backward[p] for p in at]
    assert [PromptOrder(files, 6).index_at(p) for p in range(50)] != [forward.index_at(p) for p in range(50)]


def test_many_files_are_drawn_once_an_epoch():
    """Computed anew at each position, the order of a hundred files would take longer than a batch."""
    files = spans(*[(20, 1.0)] * 100)
    order = PromptOrder(files, 12345)
    before = _drawn.cache_info().misses
    for position in range(2 * 2000 + 50):
        order.index_at(position)
    assert _drawn.cache_info().misses - before == 3 * 100, "epochs 0 and 1, and 2 for the end of 1"


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1e9, 1.7e307])
def test_only_the_ratio_of_the_weights_counts(scale):
    order = PromptOrder(spans((40, 1.0), (90, 2.0), (7, 5.0)), 5)
    scaled = PromptOrder(spans((40, scale), (90, 2 * scale), (7, 5 * scale)), 5)
    assert [scaled.index_at(p) for p in range(2000)] == [order.index_at(p) for p in range(2000)]


ORDERS_OF_ONES_OWN = """
import random
class ByAnswer:
    def __init__(self, prompts, seed):
        self.indices = sorted(range(len(prompts)), key=lambda index: (prompts[index].answer, index + seed))
    def index_at(self, position):
        return self.indices[position % len(self.indices)]
class Random(ByAnswer):
    def index_at(self, position):
        return random.randrange(len(self.indices))
class Counting(ByAnswer):
    asked = 0
    def index_at(self, position):
        self.asked += 1
        return self.asked % len(self.indices)
class TooFar(ByAnswer):
    def index_at(self, position):
        return position
"""


def test_an_order_of_ones_own_names_the_same_prompt_whenever_it_is_asked(tmp_path, monkeypatch):
    (tmp_path / "orders_of_ones_own.py").write_text(ORDERS_OF_ONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    answers = [(3 * at) % 7 for at in range(7)]
    prompts = tuple(
        Prompt(text="", answer=str(answer), ids=np.zeros(1, np.int32), place="", source="", verifier="exact")
        for answer in answers
    )

    def order_of(name):
        ordered = f"orders_of_ones_own:{name}"
        return PromptSet(prompts=prompts, spans=(), counts=Counter(), content_hash="", ordered=ordered).order(0)

    order = order_of("ByAnswer")
    assert [answers[order.index_at(position)] for position in range(9)] == [*range(7), 0, 1]
    for name, fault in {
        "Random": "another prompt when it is asked again",
        "Counting": "another prompt when it is asked again",
        "TooFar": r"index_at\(7\) = 7 is no index of the 7 prompts",
        "Absent": "no function or class Absent",
    }.items():
        with pytest.raises(ConfigError, match=f"data.order = orders_of_ones_own:{name}: .*{fault}"):
            order_of(name)
