"""The life of one server of the fleet, as a pure state machine: no I/O, no Ray, and the clock is passed in.

                  started               synced                  a failed probe or request
    restarting ───────────▶ stale ─────────────────▶ healthy ─────────────────────────────▶ suspect
        ▲                    │ ▲                      │   ▲                                  │   │
        │ begin_restart      │ └──── sync_failed ─────┘   └────── both streaks are over ─────┘   │
        │                    │       (also from suspect)                                         │
        │                    ▼                                                                   ▼
       dead ◀── too many failures in a row, the process died, too many failed syncs, a gray failure ─┘
        │
        └──▶ retired (no restart is left, or it was scaled away): final

The transition that must not exist is the one from `restarting`, or from a failed sync, to `healthy` without `synced`: such
a server would answer with the weights it was started with, under their old version number or a mixture, and nothing
would look wrong. `synced` is the only line that makes a server healthy that was not serving before.

Probes and requests have streaks of their own: a probe asks the HTTP process how it is, a request goes through the
scheduler. A wedged scheduler leaves the probes green, so a good probe must not end a streak of failed requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from megasync.config.schema import HealthConfig
from megasync.serving.restarts import Restarts


class State(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"

    @property
    def up(self) -> bool:
        """The process runs and is probed."""
        return self in (State.HEALTHY, State.SUSPECT, State.STALE)

    @property
    def serves(self) -> bool:
        """A sync has completed since its last start, and none has failed since."""
        return self in (State.HEALTHY, State.SUSPECT)


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Failures in a row after which a server counts as dead, by kind; restarts allowed in a window of seconds."""

    probe_failures: int
    request_failures: int
    sync_failures: int
    restarts: int
    restart_window: float

    @classmethod
    def of(cls, config: HealthConfig) -> HealthPolicy:
        return cls(
            config.probe_failures, config.request_failures, config.sync_failures, config.restarts, config.restart_window
        )


class ServerHealth:
    """Begins as `restarting`: the first start is a start like any other."""

    def __init__(self, policy: HealthPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._restarts = Restarts(policy.restarts, policy.restart_window, clock)
        self._probe_streak = 0
        self._request_streak = 0
        self._sync_streak = 0
        self._syncing = False
        # Of a dead server: whether its death takes no restart from the budget, and whether it has taken one.
        self._excused = False
        self._charged = False
        # Of a dead server: whether requests that it ran may have killed it.
        self.to_blame = False
        self.state = State.RESTARTING
        # Why the state is what it is; empty where it speaks for itself.
        self.reason = ""

    @property
    def up(self) -> bool:
        return self.state.up

    @property
    def serves(self) -> bool:
        """It may be in the router."""
        return self.state.serves

    @property
    def syncing(self) -> bool:
        """New weights are on their way into it."""
        return self._syncing

    def sync_began(self) -> None:
        self._syncing = True

    def sync_ended(self) -> None:
        """However it ended."""
        self._syncing = False

    def started(self) -> None:
        if self.state is State.RESTARTING:
            self._probe_streak = self._request_streak = self._sync_streak = 0
            self._become(State.STALE, "no sync since its start")

    def synced(self) -> None:
        """A complete sync has brought it the published version. Without effect on a server that went down meanwhile."""
        if not self.up:
            return
        self._sync_streak = 0
        if self.state is State.STALE:
            self._become(State.HEALTHY)
            self._suspect()

    def sync_failed(self, reason: str) -> None:
        """It may hold a mixture, or an old version: it serves no more until `synced`."""
        if not self.up:
            return
        self._sync_streak += 1
        if self._sync_streak >= self._policy.sync_failures:
            self.condemn(f"{self._sync_streak} syncs in a row failed: {reason}")
        else:
            self._become(State.STALE, reason)

    def probe_ok(self) -> None:
        self._probe_streak = 0
        self._recover()

    def probe_failed(self, reason: str) -> None:
        self._probe_streak += 1
        self._count("probes", self._probe_streak, self._policy.probe_failures, reason)

    def request_ok(self) -> None:
        self._request_streak = 0
        self._recover()

    def request_failed(self, reason: str) -> None:
        self._request_streak += 1
        self._count("requests", self._request_streak, self._policy.request_failures, reason)

    def died(self, reason: str) -> None:
        """Its process is gone, did not start, or does not answer. Requests may be the cause, unless weights were on their
        way into it."""
        to_blame = self.serves and not self._syncing
        self.condemn(reason)
        self.to_blame = to_blame

    def condemn(self, reason: str) -> None:
        """It is to be killed and started again, for a fault that no request has caused."""
        if self.state is not State.RETIRED:
            self.to_blame = False
            self._become(State.DEAD, reason)

    def excuse(self) -> None:
        """A death, this one or one before, was a request's doing: it takes no restart from the budget.

        One call excuses one death, so a server that died three times for the same prompt is excused three times.
        """
        if self.state is State.DEAD and not self._excused and not self._charged:
            self._excused = True
        else:
            self._restarts.forgive()

    def next_restart(self) -> float | None:
        """Of a dead server: seconds until it may start again; None, and retired, when it has used up its restarts."""
        if self.state is not State.DEAD:
            return None
        if self._excused:
            return 0.0
        wait = self._restarts.next_wait()
        if wait is None:
            limit, window = self._policy.restarts, self._policy.restart_window
            self._become(
                State.RETIRED, f"{limit} restarts in {window:g} s were not enough; the last time: {self.reason}"
            )
        self._charged = wait is not None
        return wait

    def begin_restart(self) -> None:
        if self.state is State.DEAD:
            self._syncing = self._excused = self._charged = False
            self._become(State.RESTARTING, self.reason)

    def retire(self, reason: str) -> None:
        """It is not wanted any more."""
        if self.state is not State.RETIRED:
            self._become(State.RETIRED, reason)

    def _count(self, kind: str, streak: int, limit: int, reason: str) -> None:
        if not self.up:
            return
        if streak >= limit:
            self.died(f"{streak} {kind} in a row failed: {reason}")
        elif self.state is State.HEALTHY:
            self._become(State.SUSPECT, reason)

    def _suspect(self) -> None:
        if self._probe_streak or self._request_streak:
            self._become(State.SUSPECT, "it failed before its sync and has not answered since")

    def _recover(self) -> None:
        if self.state is State.SUSPECT and not self._probe_streak and not self._request_streak:
            self._become(State.HEALTHY)

    def _become(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason
