"""The service as the watch page shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model. Times are in seconds."""

    id: str
    rank: int
    steps: int
    loss: float | None
    queued: int
    # How long the oldest queued request has waited.
    waited: float
    on_ranks: bool


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """A tenant, its models that have not ended, newest first, and what counts against its limits."""

    sessions: int
    models: Sequence[ModelStatus]
    # Optimizer steps of all models that it ever had, and tokens of passes since the service opened.
    steps: int
    tokens: int
    # Of training and sampling, in the last minute.
    tokens_per_second: float
    pending: int
    pending_tokens: int
    kept: int
    snapshots: int
    checkpoints: int
    disk: int


@dataclass(frozen=True, slots=True)
class Status:
    """All tenants, how often the ranks were restarted, and why the service has failed, if it has."""

    tenants: Mapping[str, TenantStatus]
    restarts: int
    failure: str


class Rate:
    """Tokens per second over the last minute, weighted towards now."""

    SECONDS = 60.0

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at = 0.0

    def add(self, now: float, tokens: int) -> None:
        self._tokens = self._decayed(now) + tokens
        self._at = now

    def per_second(self, now: float) -> float:
        return self._decayed(now) / self.SECONDS

    def _decayed(self, now: float) -> float:
        return self._tokens * math.exp(-max(0.0, now - self._at) / self.SECONDS)
