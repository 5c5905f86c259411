"""What the pairs of rungs say: differences over seeds, and whether an effect may be called seen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from examples.ablation.paired import ALPHA, Paired, holm, paired
from examples.ablation.results import (
    ENTROPY,
    GREEDY,
    LENGTH,
    ROLLOUTS,
    SAMPLED,
    TRUNCATED,
    Measure,
    Outcome,
    accuracy_at,
    cumulative_tokens,
)
from examples.ablation.rungs import AGAINST_PAPER, LADDER_STEPS, SWITCHED_OFF, SWITCHED_ON, Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """An effect that the paper reports, as a difference between two rungs."""

    text: str
    where: str
    """Figure or table of the paper."""
    measure: Measure
    one: str
    other: str
    sign: int
    """Of `other` minus `one`, as the paper has it."""


CLAIMS = (
    Claim(text="clip-higher keeps entropy up", where="fig. 2", measure=ENTROPY, one="filter", other="clip", sign=1),
    Claim(text="the same, off in DAPO", where="fig. 2", measure=ENTROPY, one="no-clip", other="full", sign=1),
    Claim(
        text="token-level loss holds entropy down", where="fig. 4", measure=ENTROPY, one="soft", other="token", sign=-1
    ),
    Claim(text="the same, off in DAPO", where="fig. 4", measure=ENTROPY, one="no-token", other="full", sign=-1),
    Claim(
        text="token-level loss keeps length healthy", where="fig. 4", measure=LENGTH, one="soft", other="token", sign=-1
    ),
    Claim(
        text="soft punishment: fewer cut off", where="sec. 3.4", measure=TRUNCATED, one="no-soft", other="full", sign=-1
    ),
    Claim(
        text="dynamic sampling: further at equal rollout steps",
        where="fig. 6",
        measure=ROLLOUTS,
        one="token",
        other="full",
        sign=1,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A comparison with what its seeds say."""

    what: str
    one: str
    other: str
    difference: Paired | None
    """None: no seed has both rungs."""
    verdict: str
    equal_tokens: Paired | None = None
    """The difference of rollout accuracy where both have generated as many tokens as the thriftier of the two."""
    greedy: Paired | None = None
    paper: float | None = None
    where: str = ""
    measure: Measure = SAMPLED


NOT_RUN = "not run"
ONE_SEED = "one seed: no interval"
NOISE = "inside the noise"
UNSURE = "not shown: its own interval excludes 0, but not once all comparisons are counted"


def verdict(found: Paired | None, adjusted: float | None, *, sign: int = 1, words: tuple[str, str]) -> str:
    """What may be said of one difference.

    Args:
        adjusted: Holm's probability in its family.
        sign: of the difference that `words[0]` stands for.
        words: what is said of a difference of that sign, and of the other one.
    """
    if found is None:
        return NOT_RUN
    if adjusted is None:
        return ONE_SEED
    if adjusted < ALPHA:
        return words[0] if found.mean * sign > 0 else words[1]
    return UNSURE if found.excludes_zero else NOISE


def differences(outcomes: Sequence[Outcome], one: str, other: str, of: Callable[[Outcome], float]) -> list[float]:
    """`other` minus `one` for every seed in which both have figures."""
    pairs = both(outcomes, one, other)
    return [of(after) - of(before) for before, after in pairs]


def both(outcomes: Sequence[Outcome], one: str, other: str) -> list[tuple[Outcome, Outcome]]:
    """The two rungs' runs of every seed that has both, in the order of the seeds."""
    at = {(outcome.rung, outcome.seed): outcome for outcome in outcomes if not outcome.failure}
    seeds = sorted({seed for _, seed in at})
    return [(at[one, seed], at[other, seed]) for seed in seeds if (one, seed) in at and (other, seed) in at]


FAMILIES = (
    {"ladder": LADDER_STEPS, "on": SWITCHED_ON, "off": SWITCHED_OFF},
    {"presets": AGAINST_PAPER},
)
"""Tables of comparisons; those of one family are corrected together."""


def compare(outcomes: Sequence[Outcome]) -> dict[str, list[Found]]:
    """All tables, of differences in held-out accuracy."""
    return {name: rows for family in FAMILIES for name, rows in _compare(outcomes, family).items()}


def _compare(outcomes: Sequence[Outcome], tables: Mapping[str, Sequence[Comparison]]) -> dict[str, list[Found]]:
    pairs = {(c.one, c.other) for comparisons in tables.values() for c in comparisons}
    by_pair = {pair: _paired(differences(outcomes, *pair, SAMPLED.of)) for pair in sorted(pairs)}
    adjusted = holm({pair: found.p for pair, found in by_pair.items() if found and found.p is not None})

    def row(comparison: Comparison) -> Found:
        pair = comparison.one, comparison.other
        return Found(
            what=comparison.what,
            one=comparison.one,
            other=comparison.other,
            difference=by_pair[pair],
            verdict=verdict(by_pair[pair], adjusted.get(pair), words=("gains", "loses")),
            equal_tokens=_paired(_at_equal_tokens(outcomes, *pair)),
            greedy=_paired(differences(outcomes, *pair, GREEDY.of)),
            paper=comparison.paper,
        )

    return {name: [row(comparison) for comparison in comparisons] for name, comparisons in tables.items()}


def claims(outcomes: Sequence[Outcome]) -> list[Found]:
    """The paper's other effects; a family of their own."""
    found = [_paired(differences(outcomes, claim.one, claim.other, claim.measure.of)) for claim in CLAIMS]
    adjusted = holm({at: item.p for at, item in enumerate(found) if item and item.p is not None})
    return [
        Found(
            what=claim.text,
            one=claim.one,
            other=claim.other,
            difference=item,
            verdict=verdict(item, adjusted.get(at), sign=claim.sign, words=("shows", "shows the opposite")),
            where=claim.where,
            measure=claim.measure,
        )
        for at, (claim, item) in enumerate(zip(CLAIMS, found, strict=True))
    ]


def _paired(values: Sequence[float]) -> Paired | None:
    return paired(values) if values else None


def _at_equal_tokens(outcomes: Sequence[Outcome], one: str, other: str) -> list[float]:
    found = []
    for before, after in both(outcomes, one, other):
        budget = min(cumulative_tokens(run.lines)[-1] for run in (before, after))
        found.append(accuracy_at(after.lines, budget) - accuracy_at(before.lines, budget))
    return found
