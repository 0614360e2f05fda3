"""The life of one server of the fleet, as a pure state machine: no I/O, no Ray, and the clock is passed in.

                  started               synced                  a failed probe or request
    restarting ───────────▶ stale ─────────────────▶ healthy ─────────────────────────────▶ suspect
        ▲                    │ ▲                      │   ▲                                  │   │
        │ begin_restart      │ └──── sync_failed ─────┘   └────── both streaks are over ─────┘   │
        │                    │       or missed_sync (also from suspect)                          │
        │                    ▼                                                                   ▼
       dead ◀── too many failures in a row, the process died, too many failed syncs, a gray failure ─┘
        │
        └──▶ retired (the restart budget is spent, or the server was scaled away): final

The transition that must not exist leads from `restarting`, or from a failed sync, to `healthy` without `synced`: such a
server would answer with its initial weights, under their old version number, or with a mixture, and nothing would look
wrong. `synced` is the only method that makes a server healthy that was not serving before.

Probes and requests have separate streaks: a probe asks the HTTP process for its state, a request passes through the
scheduler. A wedged scheduler leaves the probes green, so a good probe must not end a streak of failed requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from megasync.config.schema import HealthConfig
from megasync.serving.restart_budget import RestartBudget


class ServerState(StrEnum):
    """The states of a server, as in the diagram of this module."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"

    @property
    def up(self) -> bool:
        """Whether the process runs and is probed."""
        return self in (ServerState.HEALTHY, ServerState.SUSPECT, ServerState.STALE)

    @property
    def serves(self) -> bool:
        """Whether a sync has completed since the last start, and none has failed since."""
        return self in (ServerState.HEALTHY, ServerState.SUSPECT)


class ServerHealth:
    """Begins as `restarting`: the first start is like any other."""

    def __init__(self, policy: HealthConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._restarts = RestartBudget(policy.restarts, policy.restart_window, clock)
        self._probe_streak = 0
        self._request_streak = 0
        self._sync_streak = 0
        # For a stale server: whether it has missed a sync, without any failure.
        self.behind = False
        # Whether a weight sync to this server is in progress.
        self.syncing = False
        # Weight syncs of this server that have begun, over all its starts.
        self.syncs = 0
        # For a dead server: whether its death takes no restart from the budget, and whether it has taken one.
        self._free_restart = False
        self._charged = False
        # For a dead server: whether requests that it ran may have killed it.
        self.requests_suspected = False
        # For a dead server: whether it lives but does not answer, or fails its syncs.
        self.silent = False
        self.state = ServerState.RESTARTING
        # Why the server is in this state; empty where the state explains itself.
        self.reason = ""

    @property
    def up(self) -> bool:
        return self.state.up

    @property
    def serves(self) -> bool:
        """Whether the router may send it requests."""
        return self.state.serves

    def sync_began(self) -> None:
        self.syncing = True
        self.syncs += 1

    def sync_ended(self) -> None:
        """The sync has ended, successfully or not."""
        self.syncing = False

    def started(self) -> None:
        if self.state is ServerState.RESTARTING:
            self._probe_streak = self._request_streak = self._sync_streak = 0
            self._enter(ServerState.STALE, "not synced since its start")

    def synced(self) -> None:
        """A complete sync has delivered the published version. No effect on a server that went down meanwhile."""
        if not self.up:
            return
        self._sync_streak = 0
        if self.state is ServerState.STALE:
            if self._probe_streak or self._request_streak:
                self._enter(ServerState.SUSPECT, "it failed before its sync and has not recovered since")
            else:
                self._enter(ServerState.HEALTHY)

    def sync_failed(self, reason: str) -> None:
        """Records a failed sync: it may hold a mixture or an old version, so it does not serve until `synced`."""
        if not self.up:
            return
        self._sync_streak += 1
        if self._sync_streak >= self._policy.sync_failures:
            self.mark_dead(f"{self._sync_streak} syncs in a row failed: {reason}")
            self.silent = True
        else:
            self._enter(ServerState.STALE, reason)

    def missed_sync(self, reason: str) -> None:
        """Records that syncs left the server out: it holds an older version, so it does not serve until `synced`."""
        if self.serves:
            self._enter(ServerState.STALE, reason)
            self.behind = True

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
        """Records a process that ended, did not start, or hangs. Requests may be the cause, except during a sync."""
        requests_suspected = self.serves and not self.syncing
        self.mark_dead(reason)
        self.requests_suspected = requests_suspected

    def mark_dead(self, reason: str) -> None:
        """Schedules a restart for a fault that no request has caused."""
        if self.state is not ServerState.RETIRED:
            self.requests_suspected = self.silent = False
            self._enter(ServerState.DEAD, reason)

    def refund_restart(self) -> None:
        """A request caused this death or an earlier one, so that death takes no restart from the budget.

        One call refunds one death, so a server that died three times for the same prompt gets three refunds.
        """
        if self.state is ServerState.DEAD and not self._free_restart and not self._charged:
            self._free_restart = True
        else:
            self._restarts.refund()

    def next_restart(self) -> float | None:
        """Seconds until a dead server may restart. None, and the server retires, when its restart budget is spent."""
        if self.state is not ServerState.DEAD:
            return None
        if self._free_restart:
            return 0.0
        wait = self._restarts.take()
        if wait is None:
            limit, window = self._policy.restarts, self._policy.restart_window
            self._enter(
                ServerState.RETIRED, f"{limit} restarts in {window:g} s were not enough; last failure: {self.reason}"
            )
        self._charged = wait is not None
        return wait

    def begin_restart(self) -> None:
        if self.state is ServerState.DEAD:
            self.syncing = self._free_restart = self._charged = False
            self._enter(ServerState.RESTARTING, self.reason)

    def retire(self, reason: str) -> None:
        if self.state is not ServerState.RETIRED:
            self._enter(ServerState.RETIRED, reason)

    def _count(self, kind: str, streak: int, limit: int, reason: str) -> None:
        if not self.up:
            return
        if streak >= limit:
            self.died(f"{streak} {kind} in a row failed: {reason}")
            self.silent = True
        elif self.state is ServerState.HEALTHY:
            self._enter(ServerState.SUSPECT, reason)

    def _recover(self) -> None:
        if self.state is ServerState.SUSPECT and not self._probe_streak and not self._request_streak:
            self._enter(ServerState.HEALTHY)

    def _enter(self, state: ServerState, reason: str = "") -> None:
        self.behind = False
        self.state, self.reason = state, reason
