"""An environment of a user's own: wrong answers get another try."""

from reward.environment import End, Episode, Observation


def again(episode: Episode) -> Observation | End:
    """Says whether the answer is right."""
    right = episode.response.rstrip().endswith(f"Answer: {episode.ground_truth}")
    return End(accuracy=True) if right else Observation("Answer: 0", state=len(episode.turns), reward=-0.125)
