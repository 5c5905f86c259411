"""Guess the number: a game over several turns, named in a config as `examples.environments.guess:play`.

    prompt        Guess 10-24
    response      17
    observation   higher
    response      21
    ...

The ground truth is the number. After TRIES responses the game is lost.
"""

import re

from reward.environment import End, Episode, Observation

TRIES = 4
"""With four guesses halving always finds one of 15 numbers."""


def play(episode: Episode) -> Observation | End:
    """What the newest guess brings: right, too low, too high, no number, or the game is over."""
    goal, guess = int(episode.ground_truth), episode.response.strip()
    if re.fullmatch(r"\d{1,3}", guess) and int(guess) == goal:
        return End(accuracy=True, extracted=guess, rule="found")
    if len(episode.turns) >= TRIES:
        return End(accuracy=False, extracted=guess[:20], rule="not-found")
    if not re.fullmatch(r"\d{1,3}", guess):
        return Observation("number?")
    return Observation("higher" if int(guess) < goal else "lower")
