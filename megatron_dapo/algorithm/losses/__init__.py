"""The table of policy losses: `algorithm.policy_loss` -> where it is and which keys it reads. No torch here: the config
reads it. One outside the table is `module:name`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A loss of the package. Its class is called with the values of `reads` and `options`, by their last names."""

    path: str
    reads: tuple[str, ...] = ("clip.low", "clip.high")
    """Keys of section `algorithm`."""
    options: tuple[str, ...] = ()
    """Names that `algorithm.loss_options` may hold."""
    needs_rollout_log_probs: bool = False
    """Its ratio is to the engine's log-probs."""


_HERE = "megatron_dapo.algorithm.losses"

LOSSES: dict[str, Entry] = {
    "clipped": Entry(path=f"{_HERE}.clipped:Clipped", reads=("clip.low", "clip.high", "clip.dual")),
    "cispo": Entry(path=f"{_HERE}.cispo:CISPO"),
    "gspo": Entry(path=f"{_HERE}.gspo:GSPO"),
    "gmpo": Entry(path=f"{_HERE}.gmpo:GMPO"),
    "sapo": Entry(path=f"{_HERE}.sapo:SAPO", reads=(), options=("positive", "negative")),
    "reinforce": Entry(path=f"{_HERE}.reinforce:Reinforce", reads=("importance.upper",), needs_rollout_log_probs=True),
}
