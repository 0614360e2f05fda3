"""The rollout loops: prompts in, groups out, over any number of workers, bounded at every point.

      source.next ──▶ buffer.admit ──┐                      ┌─────────────┐
                                     ├──▶ a worker's groups │ GroupWorker │──▶ buffer.commit | buffer.drop
      buffer.reclaim ──▶ source.get ─┘          ▲           └──────┬──────┘
                                                └── GroupEnded ◀───┘

    loop        consumes             produces             waits for                       who unblocks it
    ----------  -------------------  -------------------  ------------------------------  ------------------------------
    draw        prompts              groups in progress   a buffer slot, a place          training, drops, ended groups
    regenerate  uids to regenerate   groups in progress   a stale group, a place          training, ended groups
    limit       the servers' loads   the gates' limits    its own timer                   the clock

The rollouter gives each group to a worker that `placement` decides on, and does no work per request: that is done by
`group_worker`. It reaches workers through their links (`worker_link`). By default there is one worker, in the driver;
with `rollout.workers` they are processes that come and go.

Invariant: every admitted prompt is assigned to exactly one worker, waits for one, or has ended; `_groups` holds those
that have not ended. A worker that is lost hands its groups to the others, which continue from the saved partial
responses. A prompt that was drawn but not admitted stays with the source.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from megasync.buffer import AsyncBuffer, BufferClosed, BufferStateError
from megasync.buffer.groups import SCORES
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config.schema import ScheduleConfig
from megasync.data.curriculum import Curriculum
from megasync.data.prompts import PromptSource
from megasync.errors import DataError, PoisonPrompt, ProcessLost, ServerError
from megasync.observe import trace
from megasync.rollout.inflight import InflightCap, ServerLoad
from megasync.rollout.metrics import RolloutMetrics
from megasync.rollout.placement import Placement
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.selection import HARMLESS, KILLS_SERVERS, KILLS_WORKERS, LEFT_OUT, Dropped, GroupEnded
from megasync.rollout.worker_link import WorkerLink
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)

# Seconds between two updates of the in-flight limit.
LIMIT_SECONDS = 2.0
# A broken reward function or workflow fails from the first group on; this many failures are enough to tell.
FIRST_GROUPS = 8
# Later, more failures than the allowed share of this many groups mean that too many generated tokens are wasted.
WINDOW = 64
# Causes in the summary, the most frequent first.
SHOWN = 5


class FleetLoads(Protocol):
    """The loads of the fleet that the rollout reads."""

    def loads(self) -> Sequence[ServerLoad]: ...
    def metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits that the servers' state imposes on the rollout.

    `cap` limits requests below what the buffer allows, by the loads of the `fleet`. The `quarantine` holds requests
    back whose prompts may kill servers.
    """

    fleet: FleetLoads | None = None
    cap: InflightCap | None = None
    quarantine: Quarantine | None = None


@dataclass(eq=False, slots=True)
class _Assigned:
    """An admitted group that has not ended. `worker` is None while it waits for one.

    `batch` numbers the batches in the order in which the trainer needs them, as far as the rollouter knows.
    """

    prompt: Prompt
    batch: int
    worker: WorkerLink | None = None


class Rollouter:
    """Generates groups for as long as the buffer admits prompts, on the workers that `add` and `remove` name.

    At most `max_drop_share` of the recent groups may be dropped for errors.
    """

    def __init__(
        self,
        source: PromptSource,
        buffer: AsyncBuffer,
        schedule: ScheduleConfig,
        *,
        max_drop_share: float = 0.5,
        servers: ServerLimits | None = None,
        placement: Placement[WorkerLink] | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        """`placement` is shared with whatever else runs on the workers."""
        self._source = source
        self._buffer = buffer
        self._curriculum = curriculum
        servers = servers or ServerLimits()
        self._fleet, self._cap, self._quarantine = servers.fleet, servers.cap, servers.quarantine
        self._groups_per_step = schedule.groups_per_step
        self._places = asyncio.Semaphore(schedule.max_inflight_groups or sys.maxsize)
        self._metrics = RolloutMetrics(schedule.groups_per_step)
        # New groups admitted so far.
        self._admitted = 0
        self._drop_limit = DropLimit(max_drop_share)
        # The workers, and how many groups each has.
        self._workers: dict[WorkerLink, int] = {}
        self._groups: dict[str, _Assigned] = {}
        self._placement = placement or Placement[WorkerLink]()
        self._placement.follow(self._place_waiting)
        # Groups without a worker, and whether a lost worker has worked on them.
        self._waiting: deque[tuple[_Assigned, bool]] = deque()
        # Groups that the buffer returned before their worker reported that they ended.
        self._again: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = self._gated = False
        self._limit: int | None = None
        self._failed: asyncio.Future[None] | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Returns after `stop` or when the buffer is closed. Raises ServerError or DataError if it cannot continue."""
        if self._stopped.is_set():
            return
        loops: set[asyncio.Future[Any]] = {
            asyncio.create_task(self._draw(), name="rollout draw"),
            asyncio.create_task(self._regenerate(), name="rollout regenerate"),
        }
        self._running = True
        for worker in self._workers:
            worker.begin(self._gated, self._limit)
        if self._cap is not None and self._fleet is not None:
            loops.add(asyncio.create_task(self._limit_loop(self._cap, self._fleet), name="rollout limit"))
        stopped = asyncio.create_task(self._stopped.wait(), name="rollout stop")
        self._failed = asyncio.get_running_loop().create_future()
        watched = {*loops, stopped, self._failed}
        try:
            ended, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            self._running = False
            tasks = [*watched, *self._tasks]
            for task in tasks:
                task.cancel()
            # Begun before the first wait: a cancellation there must not keep workers from saving partial responses.
            halting = asyncio.gather(*[worker.halt() for worker in self._workers])
            await asyncio.gather(*tasks, return_exceptions=True)
            await halting
            self._groups.clear()

    def stop(self) -> None:
        """Makes `run` return, whatever it waits for. Admitted prompts stay live in the buffer."""
        self._stopped.set()

    # Workers

    def add(self, worker: WorkerLink) -> None:
        """Gives groups to this worker from now on."""
        self._workers[worker] = 0
        worker.follow(partial(self.ended, worker), partial(self.failed, worker))
        self._placement.add(worker)
        if self._running:
            worker.begin(self._gated, self._limit)
            self._share_limit()
            self._place_waiting()

    def remove(self, worker: WorkerLink) -> None:
        """The worker is lost: its groups continue on the others. What it reports from now on is ignored."""
        if self._workers.pop(worker, None) is None:
            return
        self._placement.remove(worker)
        self._metrics.lost(worker.status)
        uids = [uid for uid, assigned in self._groups.items() if assigned.worker is worker]
        for uid in uids:
            self._groups[uid].worker = None
        if uids and self._running:
            self._spawn(self._continue_or_end(uids), f"groups of a lost worker: {len(uids)}")

    async def gate(self, timeout: float) -> None:
        """Admits no further request and returns when none is running.

        Raises ServerError after `timeout` seconds in which the quarantine held no request back: while it holds one, the
        request's own deadline is paused.
        """
        self._gated = True
        while True:
            holds = self._quarantine.holds if self._quarantine is not None else 0
            try:
                return await self._close_gates(timeout)
            except ServerError:
                if self._quarantine is None or not (self._quarantine.busy or self._quarantine.holds > holds):
                    raise

    def open(self) -> None:
        """Admits requests again after `gate`."""
        self._gated = False
        for worker in self._workers:
            worker.open_gate()

    @property
    def finished_groups(self) -> int:
        """Groups committed so far; drops are no progress."""
        return self._metrics.committed

    def metrics(self) -> dict[str, float]:
        """The state of the rollout by metric name; reading it changes nothing."""
        metrics = self._metrics.snapshot(worker.status for worker in self._workers)
        metrics["rollout/inflight_groups"] = float(len(self._groups))
        metrics["rollout/workers"] = float(len(self._workers))
        metrics |= self._placement.metrics()
        if self._fleet is not None:
            metrics |= self._fleet.metrics()
        if self._fleet is not None and self._cap is not None:
            metrics["rollout/inflight_limit"] = float(self._cap.limit)
            metrics["rollout/kv_usage"] = max((load.token_usage for load in self._fleet.loads()), default=0.0)
        if self._quarantine is not None:
            metrics |= self._quarantine.metrics()
        return metrics

    # The loops

    async def _draw(self) -> None:
        """Takes a place only after the slot: a wait for a slot must not hold what `_regenerate` needs to free one."""
        while True:
            prompt = self._source.next()
            try:
                await self._buffer.admit(prompt.uid)
            except BufferClosed:
                return
            self._source.admitted(prompt.uid)
            if self._curriculum is not None and not await self._curriculum.wants(prompt.uid):
                try:
                    await self._buffer.drop(prompt.uid, LEFT_OUT)
                except BufferClosed:
                    return
                self._metrics.drops[LEFT_OUT] += 1
                continue
            await self._places.acquire()
            self._start(prompt, 1 + self._admitted // self._groups_per_step)
            self._admitted += 1

    async def _regenerate(self) -> None:
        while True:
            try:
                uid = await self._buffer.reclaim()
            except BufferClosed:
                return
            await self._places.acquire()
            self._metrics.regenerated += 1
            # It was admitted before all that are still to come, and the trainer may be waiting for it.
            self._start(self._source.get(uid), batch=0)

    async def _limit_loop(self, cap: InflightCap, fleet: FleetLoads) -> None:
        while True:
            inflight = sum(worker.status.inflight_requests for worker in self._workers)
            self._limit = cap.update(fleet.loads(), inflight)
            self._share_limit()
            await asyncio.sleep(LIMIT_SECONDS)

    # Groups

    def _start(self, prompt: Prompt, batch: int) -> None:
        """Begins a group, which holds a place until it ends.

        Never two tasks work on one group: they would append to the same partial responses. The buffer may return a
        group while its worker still waits for the answer to a commit that was declined, lost on the way, and sent
        again; or whose end is still to be reported here.
        """
        if prompt.uid in self._groups:
            self._again.add(prompt.uid)
            self._places.release()
            return
        assigned = self._groups[prompt.uid] = _Assigned(prompt, batch)
        self._assign(assigned)

    def _assign(self, assigned: _Assigned, again: bool = False) -> None:
        """Gives the group to a worker, or drops it if it kills workers."""
        uid = assigned.prompt.uid
        try:
            worker = self._placement.place(uid, assigned.prompt)
        except PoisonPrompt as error:
            self._spawn(self._drop(assigned, Dropped(KILLS_WORKERS, str(error))), f"drop of group {uid}")
            return
        if worker is None:
            self._waiting.append((assigned, again))
            return
        self._workers[worker] += 1
        assigned.worker = worker
        worker.start(assigned.prompt, assigned.batch, again)

    def _place_waiting(self) -> None:
        if self._running:
            waiting, self._waiting = self._waiting, deque()
            for assigned, again in waiting:
                self._assign(assigned, again)

    async def _drop(self, assigned: _Assigned, drop: Dropped) -> None:
        uid = assigned.prompt.uid
        try:
            await self._buffer.drop(uid, drop.reason)
        except BufferClosed:
            return
        except BufferStateError as error:
            # It was lost, but has committed the group since.
            log.info("Group %s was finished by the worker that had it before: %s", uid, error)
        else:
            self._count(assigned.prompt, GroupEnded(uid, dropped=drop))
        self._again.discard(uid)
        self._end(uid)

    def _end(self, uid: str) -> None:
        """The group has ended: its place is free."""
        del self._groups[uid]
        self._placement.ended(uid)
        self._places.release()

    def ended(self, worker: WorkerLink, group: GroupEnded) -> None:
        """A group of a worker has ended."""
        assigned = self._groups.get(group.uid)
        if assigned is None or assigned.worker is not worker:
            return
        self._workers[worker] -= 1
        assigned.worker = None
        if group.taken:
            trace.begin("buffer", "finished", group.uid)
        self._placement.ended(group.uid)
        try:
            self._count(assigned.prompt, group)
        except DataError as error:
            self.failed(worker, error)
        if group.uid not in self._again:
            self._end(group.uid)
        elif group.taken or group.dropped is not None:
            # The buffer returned it before this end, or after it.
            self._spawn(self._continue_or_end([group.uid]), f"group {group.uid} returned")
        else:
            self._again.discard(group.uid)
            self._assign(assigned)

    def failed(self, worker: WorkerLink, error: BaseException) -> None:
        """Ends the run with this error, unless the worker is lost."""
        if worker in self._workers:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _count(self, prompt: Prompt, group: GroupEnded) -> None:
        """Raises DataError when too many groups have failed; one with nothing to learn has not."""
        if group.scored is not None:
            self._metrics.add_scored(group.scored, group.lengths)
        drop = group.dropped
        # Also of one that is too stale to be trained: the ledger, from which a resumed run takes scores, has it too.
        score = SCORES.get(drop.reason) if drop is not None else group.score
        if self._curriculum is not None and score is not None:
            self._curriculum.record(prompt.uid, score)
        if drop is None:
            self._metrics.committed += group.taken
            self._drop_limit.passed()
            return
        self._metrics.drops[drop.reason] += 1
        if drop.reason in HARMLESS:
            self._drop_limit.passed()
            return
        if drop.reason == KILLS_SERVERS and self._quarantine is not None:
            self._quarantine.describe(prompt.uid, prompt.columns)
        log.warning("Dropped group %s (%s): %s", prompt.uid, drop.reason, drop.problem)
        self._drop_limit.failed(prompt.uid, drop)

    async def _continue_or_end(self, uids: Sequence[str]) -> None:
        """Starts those of the groups again that are still to be generated; the others have ended in the buffer."""
        try:
            unfinished = set(await self._buffer.unfinished(uids))
        except BufferClosed:
            return
        for uid in uids:
            self._again.discard(uid)
            if uid in unfinished:
                self._assign(self._groups[uid], again=True)
            else:
                self._end(uid)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    # Gates and limits of the workers

    async def _close_gates(self, timeout: float) -> None:
        async def close(worker: WorkerLink) -> None:
            try:
                await worker.close_gate(timeout)
            except ProcessLost:
                log.debug("A worker was lost while its gate closed: none of its requests is left")

        await gather_or_cancel(*map(close, list(self._workers)))

    def _share_limit(self) -> None:
        """Splits the limit over the workers by their groups; each gets at least one request."""
        if self._limit is None:
            return
        # One more for each, so that a worker without groups has room for its first.
        total = sum(self._workers.values()) + len(self._workers)
        for worker, groups in self._workers.items():
            worker.set_limit(max(1, self._limit * (groups + 1) // total))


class DropLimit:
    """Counts finished groups, and raises DataError once too many have failed.

    So a run whose groups keep failing ends with a summary of the causes. It neither loops through the dataset silently
    nor ends because of one bad row.
    """

    def __init__(self, largest_share: float) -> None:
        """`largest_share` of the last groups may be dropped for errors (`rollout.max_drop_share`)."""
        self._largest_share = largest_share
        self._seen = 0
        self._succeeded = False
        self._last: deque[tuple[str, Dropped] | None] = deque(maxlen=WINDOW)

    def passed(self) -> None:
        """Counts a group that was scored, whether it is trained or not."""
        self._seen += 1
        self._succeeded = True
        self._last.append(None)

    def failed(self, uid: str, drop: Dropped) -> None:
        """Counts a group that was dropped for an error. Raises DataError when that is one too many."""
        self._seen += 1
        self._last.append((uid, drop))
        drops = [drop for drop in self._last if drop is not None]
        if not self._succeeded and self._seen >= FIRST_GROUPS:
            raise DataError(f"all of the first {self._seen} groups were dropped.\n{_summary(drops)}")
        if len(self._last) == WINDOW and len(drops) > self._largest_share * WINDOW:
            raise DataError(
                f"{len(drops)} of the last {WINDOW} groups were dropped, more than rollout.max_drop_share="
                f"{self._largest_share:g} allows.\n{_summary(drops)}"
            )


def _summary(drops: list[tuple[str, Dropped]]) -> str:
    """One line per reason: its count and the latest example."""
    latest = {drop.reason: (uid, drop.problem) for uid, drop in drops}
    counts = Counter(drop.reason for _, drop in drops).most_common(SHOWN)
    return "\n".join(
        f"  {count} x {reason}, such as group {latest[reason][0]}"
        + (f": {latest[reason][1]}" if latest[reason][1] else "")
        for reason, count in counts
    )
