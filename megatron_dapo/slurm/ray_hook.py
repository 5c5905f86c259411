"""What `ray start` calls before it starts anything, as RAY_START_HOOK names it."""

from typing import Any


def without_client_server(parameters: Any, head: bool) -> None:
    """No server for Ray Client: nobody here connects by it, no option switches it off, and its one fixed port would
    meet that of another job on the same node.

    Args:
        parameters: Ray's own RayParams.
    """
    parameters.ray_client_server_port = None
