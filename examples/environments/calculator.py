"""A tool: what stands in a call is calculated. Named in a config as `examples.environments.calculator:calculate`.

    prompt        Zoe has 27 boxes with 348 cards. Zoe loses 512. How many now?
    response      <call>27*348</call>
    observation   9396
    response      <call>9396-512</call>
    observation   8884
    response      Answer: 8884

A turn ends with </call> (`rollout.turn_end`) or with the end of the text. A response without a call is the last one:
None hands it to the row's verifier.
"""

import re

from reward.environment import Episode, Observation

CALL, END = "<call>", "</call>"
_CALL = re.compile(rf"{CALL}(?P<text>[^<>]*){END}\s*\Z")
_SUM = re.compile(r"(\d{1,12})([-+*])(\d{1,12})")


def calculate(episode: Episode) -> Observation | None:
    """The result of the call that ends the newest response; None without one."""
    call = _CALL.search(episode.response)
    return None if call is None else Observation(result(call["text"]), role="tool")


def result(text: str) -> str:
    """The value of two whole numbers with + - or * between, `error` for anything else."""
    parts = _SUM.fullmatch(text.strip())
    if parts is None:
        return "error"
    left, right = int(parts[1]), int(parts[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[parts[2]])
