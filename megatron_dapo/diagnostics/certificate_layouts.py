"""Which layouts a certificate tries: all that fit the model and the processes, and a seeded choice of them."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.base import ConfigError


def fitting_layouts(hf: HFModelConfig, processes: int) -> list[LayoutConfig]:
    """Every layout of at most `processes` ranks that divides the model, one process without any split first."""
    fitting = []
    for tensor, pipeline, context, data in itertools.product(range(1, processes + 1), repeat=4):
        plain = LayoutConfig(tensor=tensor, pipeline=pipeline, context=context, data=data)
        if plain.world_size > processes:
            continue
        stages = [None, *(range(2, hf.num_layers // pipeline + 1) if pipeline > 1 else ())]
        sequences, ranks = [False, True] if tensor > 1 else [False], tensor * context * data
        cuts = [(1, 1)]
        if hf.experts is not None:
            sizes = range(1, ranks + 1)
            cuts = [(expert, width) for expert in sizes for width in sizes if ranks % (expert * width) == 0]
        for virtual, sequence, (expert, expert_tensor) in itertools.product(stages, sequences, cuts):
            split = {"expert": expert, "expert_tensor": expert_tensor}
            layout = replace(plain, virtual_pipeline=virtual, sequence_parallel=sequence, **split)
            with suppress(ConfigError):
                check_layout(hf, layout)
                fitting.append(layout)
    return fitting


def choose_layouts(
    candidates: Sequence[LayoutConfig], count: int, *, seed: int, always: LayoutConfig
) -> list[LayoutConfig]:
    """One process (other packings alone), `always`, and a random choice up to `count` in all.

    Each next one is drawn from those that bring most kinds of parallelism that are not there yet: 4 of the layouts of
    two ranks have all kinds.
    """
    rng = np.random.default_rng(seed)
    chosen = list(dict.fromkeys([LayoutConfig(), always]))[:count]
    left = [layout for layout in candidates if layout not in chosen]
    seen = {kind for layout in chosen for kind in kinds(layout)}
    while left and len(chosen) < count:
        news = [len(kinds(layout).keys() - seen) for layout in left]
        best = [layout for layout, new in zip(left, news, strict=True) if new == max(news)]
        layout = best[int(rng.integers(len(best)))]
        chosen.append(layout)
        left.remove(layout)
        seen |= kinds(layout).keys()
    return chosen


def kinds(layout: LayoutConfig) -> dict[str, int]:
    """The kinds of parallelism in a layout, of TP, SP, PP, VPP, CP, DP, EP, ETP, with their sizes."""
    sizes = {
        "TP": layout.tensor,
        "SP": layout.tensor if layout.sequence_parallel else 1,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline or 1,
        "CP": layout.context,
        "DP": layout.data,
        "EP": layout.expert,
        "ETP": layout.expert_tensor,
    }
    return {kind: size for kind, size in sizes.items() if size > 1}


def label(layout: LayoutConfig) -> str:
    """A layout in a table: "TP2+SP PP2 VPP2", or "one process"."""
    text = " ".join("+SP" if kind == "SP" else f"{kind}{size}" for kind, size in kinds(layout).items())
    return text.replace(" +SP", "+SP") or "one process"
