"""The buffer with waits: for a slot, a batch, a group to regenerate. All methods are async, as an actor's must be.

Invariant: a state change, its record and its wake-ups happen together, between two awaits. Every method first asks the
state machine and awaits only when the answer is "not now"; what it takes is recorded and returned without another
await. So a cancelled wait has taken nothing, no waiter misses the change that it waits for, and no change is visible
before it is in the ledger.

No spurious wake-ups: a change wakes the first waiter of each kind that can proceed. That waiter, whether it took what
it waited for or was cancelled, wakes the next (`_wake_next`). So a change costs the same however many calls wait. Only
changes that happen once a step, and those that end waits with an error, wake all waiters.

An answer can get lost on its way to another process, so every call is idempotent; `reclaim` needs the same claimant.

    call       waits for               who wakes it
    ---------  ----------------------  ----------------------------------
    admit      a free slot             publish, drop, commit (if refused)
    lease      a batch                 commit; drop (it moves the window); rollback (with an error)
    reclaim    a returned group        publish, commit, rollback
    all        -                       close: BufferClosed with its reason
    open       the ledger to be read   the reading thread; other calls must come after it
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megasync.buffer.durable import DurableBuffer
from megasync.buffer.link import listen
from megasync.buffer.payload import EncodedGroup, EncodedPartial, LeasedGroup
from megasync.buffer.state import (
    BufferCounts,
    BufferStateError,
    CheckpointedBuffer,
    FailedStep,
    TrajectoryBuffer,
)
from megasync.errors import MegasyncError

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Waiter:
    """One waiting call. ``blocker`` says what it waits for now."""

    name: str
    # (kind, what): calls with the same key ask for the same thing and get the same answer.
    key: tuple[str, object]
    blocker: Callable[[], str | None]
    since: float
    wake: asyncio.Future[None] | None = None

    def notify(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


# The name and the arguments of a method.
Call = tuple[str, tuple[Any, ...]]


class Answer(NamedTuple):
    """Of one call of a batch: ``outcome`` is "done" with the result, "failed" with the error, or "waits"."""

    outcome: str
    value: Any = None


class AsyncBuffer:
    """`TrajectoryBuffer` for the tasks of one event loop; see there for what each call means and raises.

    ``ledger`` is the file that records every change; without one nothing outlives the process. An empty or missing file
    starts with ``version`` and ``counters``; any other is read by `open`, or else by the first call. ``total_groups``,
    ``version`` and ``counters`` are the state machine's, ``shared`` is `DurableBuffer`'s; ``clock`` returns seconds.
    Every call also raises LedgerError; once a change could not be recorded the buffer is closed.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        total_groups: int | None = None,
        version: int = 0,
        counters: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: str | Path | None = None,
        shared: bool = False,
    ) -> None:
        self._load = lambda: DurableBuffer(
            schedule,
            total_groups,
            clock,
            ledger=ledger,
            version=version,
            counters=counters,
            shared=shared,
            report=self._report,
        )
        self._clock = clock
        self._reading: asyncio.Future[DurableBuffer] | None = None
        self._progress = "nothing yet"
        self._address: str | None = None
        # A lease whose remote caller was cancelled may still wait here: it must not take a batch after a rollback.
        self._rollbacks = 0
        # Waiters by kind, in the order of arrival, in which they retry; and by key.
        self._waiters: dict[str, dict[_Waiter, None]] = {"admit": {}, "lease": {}, "reclaim": {}}
        self._alike: dict[tuple[str, object], set[_Waiter]] = {}

    @cached_property
    def _durable(self) -> DurableBuffer:
        if self._reading is None:
            return self._load()
        if not self._reading.done():
            raise BufferStateError("the buffer is still reading its ledger; await open() before any other call")
        return self._reading.result()

    # Opening

    async def open(self) -> None:
        """Reads the ledger on another thread; `opening` reports the progress. A second call waits for the same read."""
        if self._reading is None and "_durable" not in self.__dict__:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._load))
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def opening(self) -> str:
        """The progress of `open`. A read whose progress does not change is stuck."""
        return self._progress

    async def pid(self) -> int:
        """The id of this process, which answers while its ledger is read."""
        return os.getpid()

    async def listen(self) -> str:
        """The address at which processes of this machine may call every method (`link`)."""
        if self._address is None:
            self._address = await listen(self)
        return self._address

    def _report(self, text: str) -> None:
        self._progress = text

    @property
    def _state(self) -> TrajectoryBuffer:
        return self._durable.state

    async def batch(self, calls: Sequence[Call]) -> list[Answer]:
        """Makes calls of the rollout side in their order, in one transaction. One that has to wait is not made."""
        answers: list[Answer] = []
        with self._waking(), self._durable.together():
            for method, arguments in calls:
                call = getattr(self, method)(*arguments)
                try:
                    # Runs up to the first wait.
                    call.send(None)
                except StopIteration as end:
                    answers.append(Answer("done", end.value))
                except MegasyncError as error:
                    answers.append(Answer("failed", error))
                else:
                    call.close()
                    answers.append(Answer("waits"))
        return answers

    # Rollout side

    async def admit(self, uid: str) -> None:
        """Waits for a slot and takes it."""
        blocker = self._state.admission_blocker

        def attempt() -> bool | None:
            return self._durable.change(lambda state: state.admit(uid)) or None

        await self._until(f"admit {uid}", ("admit", uid), attempt, blocker)

    async def commit(self, group: EncodedGroup) -> bool:
        with self._waking():
            return self._durable.commit(group)

    async def drop(self, uid: str, reason: str) -> bool:
        return self._change(lambda state: state.drop(uid, reason))

    async def reclaim(self, claimant: str = "") -> str:
        """Waits for a returned group and takes it; its uid."""
        return await self._until(
            "reclaim",
            ("reclaim", claimant or object()),
            lambda: self._durable.change(lambda state: state.reclaim(claimant)),
            lambda: "a group to be generated again",
        )

    async def save_partials(self, partials: dict[tuple[str, int, int], EncodedPartial]) -> None:
        self._change(lambda state: state.save_partials(partials))

    async def partials(self, uid: str) -> dict[tuple[int, int], bytes]:
        return self._state.partials(uid)

    async def unfinished(self, uids: Sequence[str]) -> list[str]:
        return self._state.unfinished(uids)

    # Training side

    async def lease(self, step: int, version: int) -> list[LeasedGroup]:
        """Waits for the step's batch. A rollback ends the wait with BufferStateError: the step changes its meaning."""
        rollbacks = self._rollbacks

        def attempt() -> list[LeasedGroup] | None:
            if rollbacks != self._rollbacks:
                raise BufferStateError(f"the wait for step {step} ended: training went back to a checkpoint")
            return self._durable.lease(step, version)

        return await self._until(f"lease {step}", ("lease", step), attempt, self._state.lease_blocker)

    async def ack(self, step: int) -> None:
        self._change(lambda state: state.ack(step))

    async def step_failed(self, step: int, attempts: int, most_in_a_row: int) -> FailedStep:
        with self._waking():
            return self._durable.step_failed(step, attempts, most_in_a_row)

    async def publish(self, version: int) -> None:
        with self._waking(wake_all=True):
            self._durable.publish(version)

    async def rollback(self, step: int, version: int) -> None:
        with self._waking(wake_all=True):
            self._rollbacks += 1
            self._durable.rollback(step, version)

    async def checkpointed(self, step: int, oldest_kept: int) -> None:
        with self._waking():
            self._durable.checkpointed(step, oldest_kept)

    # Both sides

    async def close(self, reason: str) -> None:
        """Ends every wait, now and later, with BufferClosed(reason)."""
        if self._state.closed is None:
            with self._waking(wake_all=True):
                self._durable.change(lambda state: state.close(reason))

    async def counts(self) -> BufferCounts:
        return self._state.counts()

    async def before_checkpoint(self) -> CheckpointedBuffer:
        """What a checkpoint keeps of the buffer. All that happened so far is then on disk: no checkpoint knows more."""
        self._durable.sync()
        return {"pending": self._state.live_uids(), "buffer": self._state.counters()}

    async def waiting(self) -> dict[str, str]:
        """What each waiting call waits for and how long, such as "a free slot: ... (for 3.2 s)", by call."""
        now = self._clock()
        return {
            waiter.name: f"{waiter.blocker() or 'its turn'} (for {now - waiter.since:.1f} s)"
            for waiters in self._waiters.values()
            for waiter in waiters
        }

    # Changing

    def _change(self, call: Callable[[TrajectoryBuffer], T]) -> T:
        with self._waking():
            return self._durable.change(call)

    @contextmanager
    def _waking(self, wake_all: bool = False) -> Generator[None]:
        state = self._state
        try:
            yield
        finally:
            # A ledger that could not be written has closed the buffer.
            if wake_all or state.closed is not None:
                self._wake_all()
            else:
                self._wake_next()

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.notify()

    def _wake_next(self) -> None:
        """Wakes the first waiter of each kind that can proceed."""
        state = self._state
        for kind, can_proceed in (
            ("admit", state.has_room),
            ("lease", state.has_batch),
            ("reclaim", state.has_returned),
        ):
            if self._waiters[kind] and can_proceed():
                next(iter(self._waiters[kind])).notify()

    # Waiting

    async def _until(
        self,
        name: str,
        key: tuple[str, object],
        attempt: Callable[[], T | None],
        blocker: Callable[[], str | None],
    ) -> T:
        """Retries ``attempt`` after each wake-up until it returns something."""
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
            # This waiter may have been woken and then cancelled: pass the wake-up on.
            self._wake_next()

    def _attempt(self, key: tuple[str, object], call: Callable[[], T | None]) -> T | None:
        """Calls with the same key are woken to get the same answer, although no other call can proceed."""
        with self._waking():
            result = call()
            if result is not None:
                for waiter in self._alike.get(key, ()):
                    waiter.notify()
            return result
