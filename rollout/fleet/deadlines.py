"""How long the fleet waits for a server's answers. Waits of the run's own are in section `rollout` of the config."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds, where nothing else is said."""

    probe_interval_s: float = 1.0
    """Between two looks at a server's process and /health."""
    probe_deadline_s: float = 5.0
    """For one answer of /health."""
    failed_probes: int = 3
    """Unanswered ones in a row after which a server is restarted."""
    scheduler_interval_s: float = 15.0
    """Between two questions to a server's scheduler: /health is answered by the HTTP process alone."""
    scheduler_deadline_s: float = 180.0
    """For its answer, which comes between two forward passes."""
    control_deadline_s: float = 30.0
    """For pause, continue, abort and flush."""
    load_deadline_s: float = 1800.0
    """For loading weights from a folder, and for computing checksums."""
    first_backoff_s: float = 1.0
    """Pause after a start that failed; doubled up to `longest_backoff_s`."""
    longest_backoff_s: float = 30.0
    report_interval_s: float = 15.0
    """Between two reports of a wait that goes on."""
    silence_s: float = 60.0
    """Between two looks whether any server has sent anything; `rollout.fleet.in_flight`."""
