"""The limits of one tenant, so that none starves another or fills the disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each tenant, and times of the service in seconds."""

    # Sessions whose clients show signs of life.
    sessions: int = 1_000
    # Models that train, each with its adapters and its optimizer's state.
    models: int = 16
    # Adapters that servers are offered; a snapshot beyond them replaces the one that was not used for longest.
    adapters: int = 64
    # Bytes of the checkpoints, states and snapshots.
    disk: int = 200 * 10**9
    # Bytes of one recorded request.
    request: int = 64 * 10**6
    # Tokens of the requests that have no outcome yet; a sample counts with all that it may generate.
    tokens: int = 16_000_000
    # Requests that have no outcome yet.
    pending: int = 10_000
    # Bytes of recorded requests: of those without an outcome, and of passes since the last optimizer step.
    recorded: int = 4 * 10**9
    # Requests for samples that run at the same time.
    samples: int = 256
    # Outcomes that are kept: their number, their bytes, and for how long.
    kept: int = 20_000
    kept_bytes: int = 4 * 10**9
    kept_seconds: float = 24 * 3600.0
    # Time that requests wait for one with an earlier number that has not arrived.
    gap_seconds: float = 120.0
    # Time without a sign of life after which a session is silent: its models leave the ranks, and come back when they
    # are used.
    heartbeat_seconds: float = 600.0
    # Time after which a silent session ends, and for which the checkpoints are kept that its models' states become.
    silent_seconds: float = 3 * 24 * 3600.0
    silent_kept_seconds: float = 7 * 24 * 3600.0
    # Sessions, models, samplers and checkpoints in the record, of each kind, also those that have ended. Beyond it the
    # oldest that nobody can use anymore is forgotten, and of samplers the one that was not used for longest.
    records: int = 10_000
    # Tokens of the passes that the ranks are given in one call.
    batch: int = 65_536
