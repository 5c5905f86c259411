"""Errors of the fleet and its servers."""

from collections.abc import Sequence


class RolloutError(RuntimeError):
    """Base of all errors of the fleet."""

    exit_code = 5


class ServerRefused(RolloutError):
    """The server answered 4xx: the request is wrong and would be refused again. Never retried."""


class AccessDenied(ServerRefused):
    """401 or 403: the server wants another API key than it got."""


class ServerUnavailable(RolloutError):
    """No answer, a broken one, or 5xx: another attempt, elsewhere or later, can succeed."""


class ServerStartError(RolloutError):
    """A server could not be started or did not get ready; the message holds the tail of its log."""


class ServerUnfit(ServerStartError):
    """It answers, but this run cannot use it, and a restart would not change that."""


class KeyFileError(RolloutError):
    """A file that should hold an API key. The message names it and the fix."""

    exit_code = 2


class FleetLost(RolloutError):
    """Every server was down for longer than `rollout.fleet_deadline_s`."""


class WeightMismatch(RolloutError):
    """A server's weights are not those that were published."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        super().__init__(f"{where}: {len(problems)} tensors differ from the published weights: {shown}")
        self.problems = tuple(problems)
