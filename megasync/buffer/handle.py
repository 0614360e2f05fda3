"""The buffer with waits: a slot, a batch, a group to regenerate. Async methods only, so an actor can be this very class.

Invariant: state changes and wake-ups happen together, between two awaits. Every method first asks the state machine, and
only when the answer is "not now" does it await; what it took is returned without another await. So a cancelled wait has
taken nothing, and nobody sleeps through the change it waits for.

Cancelling a *remote* call can lose an answer on its way back. `lease` may then be asked again for the same step and gives
the same batch. An `admit` or `reclaim` in doubt is settled by dropping the uid, or by `live_uids` in the next checkpoint.

    waits      for                     who wakes it
    ---------  ----------------------  ----------------------------------
    admit      a free slot             publish, drop, commit (if refused)
    lease      a batch                 commit; drop (it moves the window)
    reclaim    an over-age group       publish, commit
    all        -                       close: BufferClosed with its reason
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.buffer.errors import BufferClosed, BufferStateError
from megasync.buffer.pacing import Pacing
from megasync.buffer.state import TrajectoryBuffer
from megasync.buffer.trajectory import Group

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig

__all__ = ["AsyncBuffer", "BufferClosed", "BufferStateError"]

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Waiter:
    """One call that waits. ``blocker`` tells, at any moment, what it waits for."""

    name: str
    blocker: Callable[[], str | None]
    since: float
    wake: asyncio.Future[None] | None = field(default=None)


class AsyncBuffer:
    """`TrajectoryBuffer` for tasks of one event loop; see there for what each call means and raises.

    ``total_groups``, ``version`` and ``counters`` are the state machine's; ``clock`` returns seconds.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        total_groups: int | None = None,
        version: int = 0,
        counters: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = TrajectoryBuffer(
            Pacing.of(schedule),
            over_age=schedule.over_age,
            total_groups=total_groups,
            version=version,
            counters=counters,
            clock=clock,
        )
        self._clock = clock
        # In the order of arrival, which is the order in which they try again.
        self._waiters: dict[_Waiter, None] = {}

    # Rollout side

    async def admit(self, uid: str) -> None:
        """Waits for a slot and takes it."""
        await self._until(f"admit {uid}", lambda: self._state.admit(uid) or None, self._state.admission_blocker)

    async def commit(self, group: Group) -> bool:
        accepted = self._state.commit(group)
        self._wake_all()
        return accepted

    async def drop(self, uid: str, reason: str) -> bool:
        dropped = self._state.drop(uid, reason)
        self._wake_all()
        return dropped

    async def reclaim(self) -> str:
        """Waits for an over-age group; its uid, which is the caller's to generate again."""
        return await self._until("reclaim", self._state.reclaim, lambda: "a group that is over-age")

    # Training side

    async def lease(self, step: int, version: int) -> list[Group]:
        """Waits for the step's batch."""
        return await self._until(f"lease {step}", lambda: self._state.lease(step, version), self._state.lease_blocker)

    async def ack(self, step: int) -> None:
        self._state.ack(step)

    async def publish(self, version: int) -> None:
        self._state.publish(version)
        self._wake_all()

    # Both sides

    async def close(self, reason: str) -> None:
        """Ends every wait, now and later, with BufferClosed(reason)."""
        self._state.close(reason)
        self._wake_all()

    async def counts(self) -> dict[str, Any]:
        return self._state.counts()

    async def counters(self) -> dict[str, Any]:
        return self._state.counters()

    async def live_uids(self) -> list[str]:
        return self._state.live_uids()

    async def waiting(self) -> dict[str, str]:
        """Each waiting call -> what it waits for and since when, such as "a free slot: ... (for 3.2 s)"."""
        now = self._clock()
        return {
            waiter.name: f"{waiter.blocker() or 'its turn'} (for {now - waiter.since:.1f} s)"
            for waiter in self._waiters
        }

    # Waiting

    async def _until(self, name: str, attempt: Callable[[], T | None], blocker: Callable[[], str | None]) -> T:
        """Tries until ``attempt`` gives something, sleeping between two changes of the state."""
        if (result := attempt()) is not None:
            return result
        waiter = _Waiter(name, blocker, self._clock())
        self._waiters[waiter] = None
        try:
            while True:
                waiter.wake = asyncio.get_running_loop().create_future()
                await waiter.wake
                if (result := attempt()) is not None:
                    return result
        finally:
            del self._waiters[waiter]

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            if waiter.wake is not None and not waiter.wake.done():
                waiter.wake.set_result(None)
