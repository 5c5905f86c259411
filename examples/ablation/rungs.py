"""What is run and what is compared: techniques as switches, rungs as sets of them, comparisons as pairs of rungs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_dapo.config import Config, load_config

CONFIG = Path(__file__).with_name("ladder.yaml")
PRESETS_CONFIG = CONFIG.with_name("presets.yaml")
"""The same task, without a key of the algorithm: a preset sets them."""
BASELINE_START = "Answer:"
"""The base that may not guess is measured in the rung `naive` alone: it is the same base in all of a seed."""


class Switch(StrEnum):
    """One technique of the paper. `ladder.yaml` has none of them."""

    FILTER = "filter"
    CLIP = "clip"
    SOFT = "soft"
    TOKEN = "token"
    DYNAMIC = "dynamic"


OVERRIDES = {
    Switch.FILTER: "algorithm.overlong.filter=true",
    Switch.CLIP: "algorithm.clip.high=0.28",
    Switch.SOFT: "algorithm.overlong.shape=soft",
    Switch.TOKEN: "algorithm.aggregation=token_mean",
    Switch.DYNAMIC: "algorithm.dynamic_sampling.filter=refill",
}

WORDS = {
    Switch.FILTER: "overlong filtering",
    Switch.CLIP: "clip-higher",
    Switch.SOFT: "soft overlong punishment",
    Switch.TOKEN: "token-level loss",
    Switch.DYNAMIC: "dynamic sampling",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One config: a name, which is also its folder's, and what is switched on in `ladder.yaml`, or a preset."""

    name: str
    on: frozenset[Switch]
    label: str
    preset: str | None = None

    @property
    def file(self) -> Path:
        return CONFIG if self.preset is None else PRESETS_CONFIG

    @property
    def overrides(self) -> tuple[str, ...]:
        """What it changes in `file`."""
        if self.preset is not None:
            return (f"preset={self.preset}",)
        return tuple(OVERRIDES[switch] for switch in Switch if switch in self.on)


def _rung(name: str, label: str, *on: Switch) -> Rung:
    return Rung(name=name, on=frozenset(on), label=label)


_FULL = (Switch.CLIP, Switch.SOFT, Switch.TOKEN, Switch.DYNAMIC)

# From "soft" on the punishment stands in the filter's place: a response whose loss is masked cannot be punished.
LADDER = (
    _rung("naive", "naive GRPO"),
    _rung("filter", "+ overlong filtering", Switch.FILTER),
    _rung("clip", "+ clip-higher", Switch.FILTER, Switch.CLIP),
    _rung("soft", "+ soft overlong (for the filter)", Switch.CLIP, Switch.SOFT),
    _rung("token", "+ token-level loss", Switch.CLIP, Switch.SOFT, Switch.TOKEN),
    _rung("full", "+ dynamic sampling = DAPO", *_FULL),
)
ON_ALONE = (
    _rung("only-clip", "clip-higher alone", Switch.CLIP),
    _rung("only-soft", "soft overlong alone", Switch.SOFT),
    _rung("only-token", "token-level loss alone", Switch.TOKEN),
    _rung("only-dynamic", "dynamic sampling alone", Switch.DYNAMIC),
)
OFF_ALONE = (
    _rung("no-clip", "DAPO without clip-higher", Switch.SOFT, Switch.TOKEN, Switch.DYNAMIC),
    _rung("no-soft", "DAPO without soft overlong", Switch.CLIP, Switch.TOKEN, Switch.DYNAMIC),
    _rung("no-token", "DAPO with the sample mean", Switch.CLIP, Switch.SOFT, Switch.DYNAMIC),
    _rung("filtered", "DAPO, filter for soft", Switch.CLIP, Switch.FILTER, Switch.TOKEN, Switch.DYNAMIC),
)
PRESETS = tuple(
    Rung(name=name, on=frozenset(), label=f"preset {name}", preset=name)
    for name in ("paper", "dr_grpo", "cispo", "gspo", "scalerl")
)
RUNGS = {rung.name: rung for rung in (*LADDER, *ON_ALONE, *OFF_ALONE, *PRESETS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """`other` minus `one`, over the seeds that have both."""

    what: str
    one: str
    other: str
    paper: float | None = None
    """What the paper's table 1 gains by it, in points."""


LADDER_STEPS = (
    Comparison(what="overlong filtering", one="naive", other="filter", paper=6),
    Comparison(what="clip-higher", one="filter", other="clip", paper=2),
    Comparison(what="soft overlong punishment", one="clip", other="soft", paper=3),
    Comparison(what="token-level loss", one="soft", other="token", paper=1),
    Comparison(what="dynamic sampling", one="token", other="full", paper=8),
    Comparison(what="all of it", one="naive", other="full", paper=20),
)
SWITCHED_ON = (
    Comparison(what="overlong filtering", one="naive", other="filter"),
    Comparison(what="clip-higher", one="naive", other="only-clip"),
    Comparison(what="soft overlong punishment", one="naive", other="only-soft"),
    Comparison(what="token-level loss", one="naive", other="only-token"),
    Comparison(what="dynamic sampling", one="naive", other="only-dynamic"),
)
SWITCHED_OFF = (
    Comparison(what="clip-higher", one="no-clip", other="full"),
    Comparison(what="soft overlong punishment", one="no-soft", other="full"),
    Comparison(what="soft punishment for the filter", one="filtered", other="full"),
    Comparison(what="token-level loss", one="no-token", other="full"),
    Comparison(what="dynamic sampling", one="token", other="full"),
)
AGAINST_PAPER = tuple(
    Comparison(what=rung.label, one=PRESETS[0].name, other=rung.name) for rung in PRESETS if rung is not PRESETS[0]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the ladder writes: `data/`, `bases/seed_S/`, `seed_S/RUNG/`."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def base(self, seed: int) -> Path:
        return self.folder / "bases" / f"seed_{seed}"

    def run(self, rung: str, seed: int) -> Path:
        return self.folder / f"seed_{seed}" / rung


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One run: a rung at a seed, with the arguments of `megatron-dapo train`."""

    rung: Rung
    seed: int
    folder: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"seed {self.seed}, {self.rung.name}"

    def config(self) -> Config:
        """What the run is asked to do. Raises ConfigError as any other config."""
        return load_config(self.rung.file, self.overrides)


def plan(
    place: Place, rungs: Sequence[str], seeds: Sequence[int], *, steps: int | None = None, more: Sequence[str] = ()
) -> list[Planned]:
    """All runs, seed after seed, so that the first seed's whole table is there first.

    Args:
        steps: rollout steps instead of the config's.
        more: overrides for every run, after the rungs' own.

    Raises:
        ValueError: a rung that is not known, or one that `more` would undo.
    """
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise ValueError(f"no such rung: {', '.join(unknown)}; there are {', '.join(RUNGS)}")
    taken = {"preset", *(override.split("=")[0] for override in OVERRIDES.values())}
    if undone := [override for override in more if override.split("=")[0] in taken]:
        raise ValueError(f"{', '.join(undone)}: this key is what the rungs differ in; choose another rung instead")
    length = () if steps is None else (f"run.rollout_steps={steps}",)
    return [_planned(place, RUNGS[name], seed, (*length, *more)) for seed in seeds for name in RUNGS if name in rungs]


def _planned(place: Place, rung: Rung, seed: int, more: tuple[str, ...]) -> Planned:
    folder = place.run(rung.name, seed)
    baseline = (f'evaluation.forbidden_start="{BASELINE_START}"',) if rung.name == "naive" else ()
    own = (
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"model.path={place.base(seed)}",
        f"data.path={place.data / 'train.jsonl'}",
        f"evaluation.path={place.data / 'heldout.jsonl'}",
        *rung.overrides,
        *baseline,
        *more,
    )
    return Planned(rung=rung, seed=seed, folder=folder, overrides=own)
