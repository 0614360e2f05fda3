"""A circuit breaker: pauses an environment or a tool server (a service) that fails for everybody.

    works ──LIMIT failures in a row──▶ paused ──delay──▶ one episode tries it ──succeeds──▶ works
                                         ▲                        │
                                         └──fails: twice the delay┘

A crash fails all episodes in progress at once. Failures within `SAME_SECONDS` of a counted one are therefore the same
failure. Any success ends the pause: the service answers.

Invariants: while a service is paused, at most one episode that began in the pause is in progress; `_admit` guarantees
it. An episode waits for `patience` seconds of a pause and then for one more trial, and ends with ServiceDown: so a run
whose prompts need several services goes on with the others, and one that has no other ends by its share of dropped
groups, whose reason names the service.

    wait                 ends
    -------------------  ----------------------------------------------------------
    an episode's start   with a trial that succeeds, or by ServiceDown, or its own turn to try
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from weakref import WeakSet

from megasync.concurrency.tasks import Backoff, set_within
from megasync.errors import ServiceDown, failed_service

log = logging.getLogger(__name__)

# Failures in a row that pause a service: one may be bad luck, and a second the restart that follows it.
LIMIT = 3
# Seconds in which further failures count as the same one.
SAME_SECONDS = 1.0
# Seconds until a paused service is tried again, doubled up to the second number.
DELAY_SECONDS = (5.0, 60.0)
# Seconds of a pause after which episodes no longer wait for its end: a restart of a machine takes less.
PATIENCE_SECONDS = 600.0

# Around a service's name in its metric.
PREFIX, SUFFIX = "failures/", "/paused"

# All breakers of this process that are in use.
_breakers: WeakSet[Breaker] = WeakSet()


class Breaker:
    """The state of the service `name`, of one process. All of it is used on one event loop."""

    def __init__(
        self,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        delay_seconds: tuple[float, float] = DELAY_SECONDS,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.name = name
        self._clock = clock
        self._delay_seconds = delay_seconds
        self._patience = patience
        self._in_a_row = 0
        self._counted = float("-inf")
        # Of a pause: since when, until when nobody tries, and how many trials have failed.
        self._since: float | None = None
        self._until = 0.0
        self._failed_trials = 0
        self._backoff = Backoff(delay_seconds)
        self._trying = False
        self._problem = ""
        self._changed = asyncio.Event()
        _breakers.add(self)

    @property
    def paused(self) -> bool:
        return self._since is not None

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """One use of the service. Waits while it is paused.

        A ServiceFailed of this service that leaves the block counts as its failure, the end of the block as a success,
        and any other error as neither. Raises ServiceDown after a pause that was too long.
        """
        trial = await self._admit()
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and failed_service(error) == self.name:
                self._fail(str(error), trial)
                if trial and self._too_long():
                    raise self._down() from error
            raise
        else:
            self._succeed()
        finally:
            if trial:
                self._trying = False
            self._wake()

    async def _admit(self) -> bool:
        """Waits until an episode may begin; returns whether it tries a paused service."""
        failed_before = self._failed_trials
        while self._since is not None:
            wait = self._until - self._clock()
            if not self._trying and wait <= 0:
                self._trying = True
                return True
            if self._too_long() and self._failed_trials != failed_before:
                raise self._down()
            # Woken by a change, or when the service may be tried; while another episode tries it, by that one's end.
            await set_within(self._changed, self._delay_seconds[1] if self._trying else wait)
        return False

    def _too_long(self) -> bool:
        return self._since is not None and self._clock() - self._since >= self._patience

    def _down(self) -> ServiceDown:
        seconds = self._clock() - (self._since or 0.0)
        return ServiceDown(
            f"{self.name} has failed for everybody for {seconds:.0f} s; its last failure: {self._problem}"
        )

    def _fail(self, problem: str, trial: bool) -> None:
        now, self._problem = self._clock(), problem
        if now - self._counted >= SAME_SECONDS or trial:
            self._counted = now
            self._in_a_row += 1
        if self._since is not None and not trial:
            return
        if self._since is None and self._in_a_row < LIMIT:
            return
        delay = self._backoff.next()
        self._until = now + delay
        if self._since is None:
            self._since = now
            log.error(
                "Paused %s after %d failures in a row. New episodes wait; one at a time tries it, the first in %.0f s. "
                "Last failure: %s",
                *(self.name, self._in_a_row, delay, problem),
            )
        else:
            self._failed_trials += 1
            log.warning("%s is still paused, the next trial is in %.0f s: %s", self.name, delay, problem)

    def _succeed(self) -> None:
        self._in_a_row = 0
        if self._since is not None:
            log.info("%s works again after a pause of %.0f s", self.name, self._clock() - self._since)
            self._since = None
            self._backoff.reset()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def breaker_metrics() -> dict[str, float]:
    """Which services this process has paused, by metric name; 1.0 for a paused one."""
    return {f"{PREFIX}{breaker.name}{SUFFIX}": float(breaker.paused) for breaker in _breakers}


def paused_services(metrics: Mapping[str, float]) -> list[str]:
    """The names of the services that any worker has paused, by the rollout's metrics."""
    return sorted(
        name.removeprefix(PREFIX).removesuffix(SUFFIX)
        for name, value in metrics.items()
        if name.startswith(PREFIX) and name.endswith(SUFFIX) and value
    )
