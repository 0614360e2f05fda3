"""The buffer with waits and with its ledger: a plain object of the driver. All methods that wait are async.

    call ──▶ state machine, wake-ups ──▶ its place in the next transaction ──await──▶ the transaction ──▶ answer
             └────────────── on the loop, between two awaits ────────────┘            └ on a thread ┘

Invariants:

- A change, its place in the ledger's next transaction and its wake-ups happen together, between two awaits. So no
  waiter misses the change that it waits for. A transaction has everything that was changed before it begins.
- A call that brings something (commit, drop, partial responses, a failed step, a rollback) answers once its record,
  and so every earlier one, survives the death of the process. A crash leaves a beginning of the history, after which a
  repeated call makes its change, or changes nothing.
- Admissions, reclaims, leases, acknowledgements and publications answer at once, and are in the next transaction. One
  that a crash loses is made again: the data source draws an unrecorded prompt again, a resumed run takes back groups in
  generation or leased anyway, and so it does with trained ones that no checkpoint contains. No token has a version
  whose publication is lost, because its own record comes later.
- A lease answers once its groups, with their bodies, are recorded, and a checkpoint begins once all changes are on
  disk. So no weights that are kept, and no checkpoint, know a group or a step that the ledger does not have.
- A call that is cancelled while it waits has taken nothing. One that is cancelled later, while its change is recorded,
  has made it; as every call may be repeated, the same call then gets the same answer.

No spurious wake-ups: a change wakes the first waiter of each kind that can proceed. That waiter, whether it took what
it waited for or was cancelled, wakes the next (`_wake_next`). So a change costs the same however many calls wait. Only
changes that happen once a step, and those that end waits with an error, wake all waiters.

    call       waits for               who wakes it
    ---------  ----------------------  ----------------------------------
    admit      a free slot             publish, drop, commit (if refused)
    lease      a batch                 commit; drop (it moves the window); rollback (with an error)
    reclaim    a returned group        publish, commit, rollback
    all three  -                       close: BufferClosed with its reason
    others     its record              the ledger's thread; LedgerError if it fails
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.buffer.ledger import Job, Ledger, find_damaged
from megasync.buffer.payload import EncodedGroup, LeasedGroup
from megasync.buffer.segments import CALLS, GroupSink
from megasync.buffer.state import (
    BufferCounts,
    BufferStateError,
    CheckpointedBuffer,
    FailedStep,
    TrajectoryBuffer,
)
from megasync.concurrency.batches import Batches, Run
from megasync.config.pacing import Pacing
from megasync.errors import LedgerError

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig

T = TypeVar("T")

log = logging.getLogger(__name__)


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


class AsyncBuffer(GroupSink):
    """`TrajectoryBuffer` for the tasks of one event loop; see there for what each call means and raises.

    ``ledger`` is the file that records every change; without one nothing outlives the process. An empty or missing file
    starts with ``version`` and ``counters``; any other takes precedence, and is read by the constructor, which needs no
    event loop. ``total_groups``, ``version`` and ``counters`` are the state machine's; ``clock`` returns seconds. With
    ``shared`` other machines read the bodies of groups, over a file system that they share. ``run`` replaces the
    threads. Every call also raises LedgerError; once a change could not be recorded the buffer is closed.
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
        run: Run | None = None,
    ) -> None:
        self._clock = clock
        self._run = run or asyncio.to_thread
        self._broken: LedgerError | None = None
        self._ledger = Ledger(ledger, shared) if ledger is not None else None
        snapshot = None
        if self._ledger is not None:
            snapshot = self._ledger.read_or_close()
            self._records = Batches(partial(self._transaction, self._ledger), "ledger", run, self._break)
        super().__init__(self.of_worker)
        # Uids of groups whose bodies an earlier process wrote, or may be to blame for a failed step.
        self._unchecked = {entry.uid for entry in snapshot.entries if entry.group} if snapshot else set[str]()
        self._state = TrajectoryBuffer(
            Pacing.of(schedule),
            stale=schedule.stale,
            total_groups=total_groups,
            version=version,
            counters=counters,
            snapshot=snapshot,
            clock=clock,
            changed=self._ledger.mark if self._ledger is not None else lambda entry: None,
        )
        # A lease that waits must not take a batch after a rollback.
        self._rollbacks = 0
        # Waiters by kind, in the order of arrival, in which they retry; and by key.
        self._waiters: dict[str, dict[_Waiter, None]] = {"admit": {}, "lease": {}, "reclaim": {}}
        self._alike: dict[tuple[str, object], set[_Waiter]] = {}

    async def release(self) -> None:
        """Waits for the ledger to be written, and lets go of it. No call may follow."""
        if self._ledger is not None:
            if self._broken is None:
                await self._record()
            await self._records.close()
            self._ledger.close()

    # Rollout side

    async def admit(self, uid: str) -> None:
        """Waits for a slot and takes it."""
        blocker = self._state.admission_blocker
        await self._until(f"admit {uid}", ("admit", uid), lambda: self._state.admit(uid) or None, blocker)

    async def reclaim(self, claimant: str = "") -> str:
        """Waits for a returned group and takes it; its uid. A claimant that asks again gets the same group."""
        return await self._until(
            "reclaim",
            ("reclaim", claimant or object()),
            lambda: self._state.reclaim(claimant),
            lambda: "a group to be generated again",
        )

    async def unfinished(self, uids: Sequence[str]) -> list[str]:
        """The uids of the groups that are still to be generated."""
        return await self._change(lambda state: state.unfinished(uids))

    async def of_worker(self, call: str, *arguments: Any) -> Any:
        """Makes one of the calls of a `GroupSink`, here or in another process."""
        if call not in CALLS:
            raise BufferStateError(f"a rollout worker must not call {call!r} of the buffer")
        if call == "commit" and self._ledger is not None:
            return await self._change(partial(self._commit, self._ledger, *arguments))
        if call != "partials":
            return await self._change(lambda state: getattr(state, call)(*arguments))
        partials = self._state.partials(*arguments)

        def load() -> dict[tuple[int, int], bytes]:
            return {key: data() if callable(data) else data for key, data in partials.items()}

        return await self._transact(Job(read=load)) if self._ledger is not None and partials else load()

    def _commit(self, ledger: Ledger, group: EncodedGroup, state: TrajectoryBuffer) -> bool:
        try:
            placed = ledger.place(group)
        except LedgerError as error:
            self._break(error)
            raise
        return state.commit(placed)

    # Training side

    async def lease(self, step: int, version: int) -> list[LeasedGroup]:
        """Waits for the step's batch. A rollback ends the wait with BufferStateError: the step changes its meaning.

        Groups whose recorded bodies are damaged are returned, to be generated again.
        """
        rollbacks = self._rollbacks

        def attempt() -> tuple[bool, list[LeasedGroup]] | None:
            if rollbacks != self._rollbacks:
                raise BufferStateError(f"the wait for step {step} ended: training went back to a checkpoint")
            batch = self._state.next_batch() if self._unchecked and not self._state.leased_uids() else []
            if unchecked := [group for group in batch if group.uid in self._unchecked]:
                return False, unchecked
            groups = self._state.lease(step, version)
            return None if groups is None else (True, groups)

        while True:
            leased, groups = await self._until(f"lease {step}", ("lease", step), attempt, self._state.lease_blocker)
            if self._ledger is not None and self._records.busy:
                # What it leases, or checks, may be on its way to the disk.
                await self._record()
            if leased:
                return groups
            for uid, problem in (await self._run(partial(find_damaged, groups))).items():
                log.warning("Group %s is generated again: %s", uid, problem)
                await self._change(lambda state, uid=uid: state.damaged(uid))
            self._unchecked.difference_update(group.uid for group in groups)

    async def ack(self, step: int) -> None:
        await self._change(lambda state: state.ack(step), wait=False)

    async def step_failed(self, step: int, attempts: int, most_in_a_row: int) -> FailedStep:
        """Records a failed step. The bodies of the groups are checked before they are leased again."""
        self._unchecked.update(self._state.leased_uids())
        return await self._change(lambda state: state.step_failed(step, attempts, most_in_a_row), to_disk=True)

    async def publish(self, version: int) -> None:
        await self._change(lambda state: state.publish(version), wake_all=True, wait=False)

    async def rollback(self, step: int, version: int) -> None:
        """`TrajectoryBuffer.rollback` with every group that the ledger still has."""
        self._rollbacks += 1
        groups: dict[str, LeasedGroup] = {}
        if self._ledger is not None:
            # What a publication makes unneeded is gone before it is read.
            await self._record()
            groups = await self._transact(Job(read=partial(self._ledger.payloads, self._state.trained_after(step))))
            self._unchecked.update(groups)
        await self._change(lambda state: state.rollback(step, version, groups), to_disk=True, wake_all=True)

    async def checkpointed(self, step: int, oldest_kept: int) -> None:
        """Records a checkpoint, and frees space. Does nothing with a broken ledger."""
        if self._broken is None:
            await self._change(lambda state: state.checkpointed(step, oldest_kept))

    # Both sides

    async def close(self, reason: str) -> None:
        """Ends every wait, now and later, with BufferClosed(reason)."""
        if self._state.closed is None:
            await self._change(lambda state: state.close(reason), wake_all=True)

    async def counts(self) -> BufferCounts:
        return self._state.counts()

    async def before_checkpoint(self, step: int) -> CheckpointedBuffer:
        """The buffer's part of a checkpoint of ``step``. All that it tells is then on disk: no checkpoint knows more.

        Does not wait for a broken ledger, and raises LedgerError if that does not have the step.
        """
        kept: CheckpointedBuffer = {"pending": self._state.live_uids(), "buffer": self._state.counters()}
        if self._broken is None:
            await self._record(to_disk=True)
        elif self._ledger is not None and self._ledger.last_step < step:
            raise self._broken
        return kept

    async def waiting(self) -> dict[str, str]:
        """The reason of each waiting call and how long, such as "a free slot: ... (for 3.2 s)", by call."""
        now = self._clock()
        return {
            waiter.name: f"{waiter.blocker() or 'its turn'} (for {now - waiter.since:.1f} s)"
            for waiters in self._waiters.values()
            for waiter in waiters
        }

    # Changing

    async def _change(
        self,
        call: Callable[[TrajectoryBuffer], T],
        *,
        to_disk: bool = False,
        wake_all: bool = False,
        wait: bool = True,
    ) -> T:
        result = self._make(lambda: call(self._state), wake_all)
        if wait:
            await self._record(to_disk)
        return result

    async def _record(self, to_disk: bool = False) -> None:
        """Returns once all changes so far are recorded; with ``to_disk`` they survive a power loss too."""
        if self._ledger is not None:
            await self._transact(Job(to_disk))

    def _transaction(self, ledger: Ledger, jobs: list[Job]) -> Callable[[], list[Any]]:
        return partial(ledger.transact, ledger.take(self._state.status, self._state.least_version), jobs)

    async def _transact(self, job: Job) -> Any:
        return await self._records.put(job)

    def _break(self, error: BaseException) -> None:
        """An error of the ledger closes the buffer, and every later change raises it."""
        if self._broken is None:
            self._broken = error if isinstance(error, LedgerError) else LedgerError(f"the ledger failed: {error!r}")
            self._state.close(str(error))
            self._wake_all()

    def _make(self, change: Callable[[], T], wake_all: bool = False) -> T:
        """Makes a change, and wakes those that can proceed."""
        if self._broken is not None:
            raise self._broken
        try:
            return change()
        finally:
            if wake_all:
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

        def attempt() -> T | None:
            if (result := call()) is not None:
                for waiter in self._alike.get(key, ()):
                    waiter.notify()
            return result

        return self._make(attempt)
