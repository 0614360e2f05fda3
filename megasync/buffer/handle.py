"""The buffer with waits: a slot, a batch, a group to regenerate. Async methods only, so an actor can be this very class.

Invariant: state changes, their records and wake-ups happen together, between two awaits. Every method first asks the state
machine, and only when the answer is "not now" does it await; what it took is recorded and returned without another await.
So a cancelled wait has taken nothing, nobody sleeps through the change it waits for, and nobody learns of a change that is
not in the ledger.

Nobody is woken in vain: a change wakes the first call of each kind that can go on now, and that one, having taken what it
waited for or left without it, wakes the next (`_wake_next`). So a change costs the same however many wait. Only changes
that happen once a step, and those that end waits with an error, wake everybody.

An answer can get lost on its way to another process. Every call may then be made again and answers the same; `reclaim`
needs the same claimant for that.

    waits      for                     who wakes it
    ---------  ----------------------  ----------------------------------
    admit      a free slot             publish, drop, commit (if refused)
    lease      a batch                 commit; drop (it moves the window); rollback (with an error)
    reclaim    a returned group        publish, commit, rollback
    all        -                       close: BufferClosed with its reason
    open       the ledger to be read   a thread; calls come after it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.buffer.durable import DurableBuffer
from megasync.buffer.errors import BufferClosed, BufferStateError
from megasync.buffer.state import TrajectoryBuffer
from megasync.trajectory import Group, Partial

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig

__all__ = ["AsyncBuffer", "BufferClosed", "BufferStateError"]

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Waiter:
    """One call that waits. ``blocker`` tells, at any moment, what it waits for."""

    name: str
    # Who asks for the same thing, and so gets the same answer: (kind, what).
    key: tuple[str, Any]
    blocker: Callable[[], str | None]
    since: float
    wake: asyncio.Future[None] | None = field(default=None)

    def rouse(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class AsyncBuffer:
    """`TrajectoryBuffer` for tasks of one event loop; see there for what each call means and raises.

    ``ledger`` is the file that keeps it all; without one nothing outlives the process. An empty or missing file begins
    with ``version`` and ``counters``; any other is where the buffer goes on, with `open` or else the first call.
    ``total_groups``, ``version`` and ``counters`` are the state machine's; ``clock`` returns seconds. Every call also raises LedgerError;
    once a change could not be recorded the buffer is closed.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        total_groups: int | None = None,
        version: int = 0,
        counters: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: str | Path | None = None,
    ) -> None:
        self._opened = lambda: DurableBuffer(
            schedule, total_groups, clock, ledger=ledger, version=version, counters=counters, report=self._report
        )
        self._clock = clock
        self._reading: asyncio.Future[DurableBuffer] | None = None
        self._progress = "nothing yet"
        # A remote caller may have given up a lease that still waits here: it must not take a batch after a rollback.
        self._rollbacks = 0
        # By kind in the order of arrival, which is the order in which they try again; and by what they ask for.
        self._waiters: dict[str, dict[_Waiter, None]] = {"admit": {}, "lease": {}, "reclaim": {}}
        self._alike: dict[tuple[str, Any], set[_Waiter]] = {}

    @cached_property
    def _durable(self) -> DurableBuffer:
        if self._reading is None:
            return self._opened()
        if not self._reading.done():
            raise BufferStateError("the buffer is still reading its ledger; wait for open() before any other call")
        return self._reading.result()

    # Opening

    async def open(self) -> None:
        """Reads the ledger, on another thread: `opening` tells meanwhile how far it is. Asked again, it waits too."""
        if self._reading is None and "_durable" not in self.__dict__:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._opened))
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def opening(self) -> str:
        """How much `open` has read. What does not change for long has stopped."""
        return self._progress

    def _report(self, text: str) -> None:
        self._progress = text

    @property
    def _state(self) -> TrajectoryBuffer:
        return self._durable.state

    # Rollout side

    async def admit(self, uid: str) -> None:
        """Waits for a slot and takes it."""
        blocker = self._state.admission_blocker
        await self._until(f"admit {uid}", ("admit", uid), lambda state: state.admit(uid) or None, blocker)

    async def commit(self, group: Group) -> bool:
        """Also raises DataError for a group that the ledger cannot record."""
        with self._waking():
            return self._durable.commit(group)

    async def drop(self, uid: str, reason: str) -> bool:
        return self._change(lambda state: state.drop(uid, reason))

    async def reclaim(self, claimant: str = "") -> str:
        """Waits for a returned group; its uid, which is the caller's to generate again."""
        return await self._until(
            "reclaim",
            ("reclaim", claimant or object()),
            lambda state: state.reclaim(claimant),
            lambda: "a group to be generated again",
        )

    async def save_partials(self, partials: dict[tuple[str, int, int], Partial]) -> None:
        self._change(lambda state: state.save_partials(partials))

    async def partials(self, uid: str) -> dict[tuple[int, int], Partial]:
        return self._state.partials(uid)

    # Training side

    async def lease(self, step: int, version: int) -> list[Group]:
        """Waits for the step's batch. A rollback ends the wait with BufferStateError: the step is another one then."""
        rollbacks = self._rollbacks

        def attempt(state: TrajectoryBuffer) -> list[Group] | None:
            if rollbacks != self._rollbacks:
                raise BufferStateError(f"the wait for step {step} ended: training went back to a checkpoint meanwhile")
            return state.lease(step, version)

        return await self._until(f"lease {step}", ("lease", step), attempt, self._state.lease_blocker)

    async def ack(self, step: int) -> None:
        self._change(lambda state: state.ack(step), to_disk=True)

    async def step_failed(self, step: int, attempts: int, most_in_a_row: int) -> dict[str, Any]:
        return self._change(lambda state: state.step_failed(step, attempts, most_in_a_row), to_disk=True)

    async def publish(self, version: int) -> None:
        with self._waking(everybody=True):
            self._durable.publish(version)

    async def rollback(self, step: int, version: int) -> None:
        """Training goes on from the checkpoint of ``step``; the next version is greater than ``version``."""
        with self._waking(everybody=True):
            self._rollbacks += 1
            self._durable.rollback(step, version)

    async def checkpointed(self, step: int, oldest_kept: int) -> None:
        with self._waking():
            self._durable.checkpointed(step, oldest_kept)

    # Both sides

    async def close(self, reason: str) -> None:
        """Ends every wait, now and later, with BufferClosed(reason)."""
        if self._state.closed is None:
            with self._waking(everybody=True):
                self._durable.change(lambda state: state.close(reason))

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
            for waiters in self._waiters.values()
            for waiter in waiters
        }

    # Changing

    def _change(self, call: Callable[[TrajectoryBuffer], T], to_disk: bool = False) -> T:
        with self._waking():
            return self._durable.change(call, to_disk)

    @contextmanager
    def _waking(self, everybody: bool = False) -> Iterator[None]:
        state = self._state
        try:
            yield
        finally:
            # A ledger that could not be written has closed the buffer.
            if everybody or state.closed is not None:
                self._wake_all()
            else:
                self._wake_next()

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.rouse()

    def _wake_next(self) -> None:
        """The first of each kind that can go on now."""
        state = self._state
        for kind, can_go_on in (
            ("admit", state.has_room),
            ("lease", state.has_batch),
            ("reclaim", state.has_returned),
        ):
            if self._waiters[kind] and can_go_on():
                next(iter(self._waiters[kind])).rouse()

    # Waiting

    async def _until(
        self,
        name: str,
        key: tuple[str, Any],
        attempt: Callable[[TrajectoryBuffer], T | None],
        blocker: Callable[[], str | None],
    ) -> T:
        """Tries until ``attempt`` gives something, sleeping between two changes of the state."""
        if (result := self._attempt(key, attempt)) is not None:
            return result
        waiter = _Waiter(name, key, blocker, self._clock())
        self._waiters[key[0]][waiter] = None
        self._alike.setdefault(key, set()).add(waiter)
        try:
            while True:
                waiter.wake = asyncio.get_running_loop().create_future()
                await waiter.wake
                if (result := self._attempt(key, attempt)) is not None:
                    return result
        finally:
            del self._waiters[key[0]][waiter]
            self._alike[key].discard(waiter)
            if not self._alike[key]:
                del self._alike[key]
            # It was first, and may have been woken and then cancelled: the next one must not sleep on in its place.
            self._wake_next()

    def _attempt(self, key: tuple[str, Any], call: Callable[[TrajectoryBuffer], T]) -> T:
        """Others who ask for the same get the same answer, though nothing more can go on."""
        with self._waking():
            result = self._durable.change(call)
            if result is not None:
                for waiter in self._alike.get(key, ()):
                    waiter.rouse()
            return result
