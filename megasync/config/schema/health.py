"""The section of when a server counts as dead, and what is done then."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HealthConfig:
    """When a server counts as dead and what is done then: docs/fleet.md. A dead process is seen at once."""

    # Seconds between two probes of a server's HTTP process.
    probe_seconds: float = 2.0
    # Seconds that it has for an answer.
    probe_timeout: float = 20.0
    # Unanswered probes in a row after which it counts as dead.
    probe_failures: int = 3
    # Seconds between two requests through a server's scheduler.
    request_seconds: float = 10.0
    # Seconds that it has for an answer; it answers between two batches, so allow for the longest prefill.
    request_timeout: float = 60.0
    # Unanswered requests in a row after which it counts as dead.
    request_failures: int = 3
    # Weight syncs in a row that a server may fail before it is started again instead of being synced once more.
    sync_failures: int = 2
    # Restarts of a server, and of the router, in any `restart_window`; one that needs more is given up.
    restarts: int = 5
    # Length of that window in seconds.
    restart_window: float = 600.0
