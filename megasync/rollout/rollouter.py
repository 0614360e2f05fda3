"""The rollout loops: prompts in, scored groups out, bounded at every point.

      source.next ──▶ buffer.admit ──┐
                                     ├──▶ samples_per_group workflows ──▶ reward ──▶ buffer.commit | buffer.drop
      buffer.reclaim ──▶ source.get ─┘

    loop        consumes             produces             waits for                       who unblocks it
    ----------  -------------------  -------------------  ------------------------------  ------------------------------
    draw        prompts              groups in progress   a buffer slot, a place          training, drops, ended groups
    regenerate  uids to regenerate   groups in progress   a stale group, a place          training, ended groups
    save        partial responses    saved partials       its own timer                   the clock
    limit       the servers' loads   the gate's limit     its own timer                   the clock

Invariant: every admitted prompt ends in exactly one `commit` or `drop`, or is still live in the buffer when the run
stops; `_work` guarantees it. A prompt that was drawn but not admitted stays with the source. Whose failure it is
decides how it is handled (`failures`): server failures never cost a prompt, except the prompt that kills the servers.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

from megasync.buffer import BufferClosed
from megasync.concurrency.tasks import Backoff, cancel_and_wait
from megasync.config.schema import GroupConfig, ScheduleConfig
from megasync.data import PromptSource
from megasync.errors import DataError, MegasyncError, ServerError
from megasync.failures import UnexpectedErrors, cancellation_requested, is_infrastructure
from megasync.importing import name_of
from megasync.rewards import RewardRunner
from megasync.rollout.drops import HARMLESS, DropLimit, Dropped
from megasync.rollout.inflight import InflightCap, RequestGate, ServerLoad
from megasync.rollout.metrics import RolloutMetrics
from megasync.rollout.partials import PartialResponses
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.sample_client import Client, SampleClient, request_seed
from megasync.rollout.selection import Selection
from megasync.rollout.workflow import TrajectoryCheck, Workflow
from megasync.trajectory import Group, Partial, Prompt, Trajectory

log = logging.getLogger(__name__)

# Seconds of backoff after a sample's servers failed, doubled up to the second number. The client has retried each
# request by then, until `timeouts.request`.
BACKOFF_SECONDS = (1.0, 30.0)
# Seconds between two updates of the in-flight limit.
LIMIT_SECONDS = 2.0


class GroupBuffer(Protocol):
    """The buffer's rollout side, as of `AsyncBuffer`; every call may raise BufferClosed."""

    async def admit(self, uid: str) -> None: ...
    async def commit(self, group: Group) -> bool: ...
    async def drop(self, uid: str, reason: str) -> bool: ...
    async def reclaim(self) -> str: ...
    async def partials(self, uid: str) -> Mapping[tuple[int, int], Partial]: ...
    async def save_partials(self, partials: dict[tuple[str, int, int], Partial]) -> None: ...


class FleetLoads(Protocol):
    """What the rollout reads of the fleet."""

    def loads(self) -> Sequence[ServerLoad]: ...
    def metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """How a prompt becomes a group.

    `selection` decides which responses and groups are trained, by default all that can be. With `seed` every request
    carries a seed derived from (seed, uid, sample, turn).
    """

    workflow: Workflow
    rewards: RewardRunner
    selection: Selection | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Limits on failures: attempts per workflow or reward that raises, and the share of groups dropped for errors.

    `save_seconds` is the time between two saves of partial responses, from which a resumed run continues; 0 for none.
    """

    max_attempts: int = 1
    max_drop_share: float = 0.5
    backoff_seconds: tuple[float, float] = BACKOFF_SECONDS
    save_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the servers' state imposes on the rollout.

    `cap` limits requests below what the buffer allows, by the loads of the `fleet`. `quarantine` is the client's:
    prompts that it finds to kill servers are dropped.
    """

    fleet: FleetLoads | None = None
    cap: InflightCap | None = None
    quarantine: Quarantine | None = None


class Rollouter:
    """Generates groups for as long as the buffer admits prompts."""

    def __init__(
        self,
        client: Client,
        source: PromptSource,
        buffer: GroupBuffer,
        spec: GroupSpec,
        schedule: ScheduleConfig,
        *,
        failures: FailurePolicy | None = None,
        servers: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._source = source
        self._buffer = buffer
        self._workflow = spec.workflow
        self._check = TrajectoryCheck(spec.workflow)
        self._rewards = spec.rewards
        self._selection = spec.selection or Selection(GroupConfig(), schedule.samples_per_group, sys.maxsize)
        self._seed = spec.seed
        self._failures = failures or FailurePolicy()
        servers = servers or ServerLimits()
        self._fleet, self._cap, self._quarantine = servers.fleet, servers.cap, servers.quarantine
        self._places = asyncio.Semaphore(schedule.max_inflight_groups or sys.maxsize)
        self._gate = RequestGate()
        self._metrics = RolloutMetrics(schedule.groups_per_step, clock)
        self._drop_limit = DropLimit(self._failures.max_drop_share)
        self._unknown = UnexpectedErrors()
        self._partials = PartialResponses()
        self._groups: dict[str, asyncio.Task[None]] = {}
        # Groups that the buffer returned before their task had ended.
        self._again: dict[str, Prompt] = {}
        self._failed: asyncio.Future[None]
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Returns after `stop` or when the buffer is closed. Raises ServerError or DataError if it cannot continue."""
        if self._stopped.is_set():
            return
        loops: set[asyncio.Future[Any]] = {
            asyncio.create_task(self._draw(), name="rollout draw"),
            asyncio.create_task(self._regenerate(), name="rollout regenerate"),
        }
        if self._failures.save_seconds:
            loops.add(asyncio.create_task(self._save_loop(), name="rollout save"))
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
            self._again.clear()
            await cancel_and_wait(*watched, *self._groups.values())
            if self._failures.save_seconds:
                try:
                    await self._save()
                except MegasyncError as error:
                    log.warning("Partial responses are not saved; a restart generates them again: %s", error)

    def stop(self) -> None:
        """Makes `run` return, whatever it waits for. Admitted prompts stay live in the buffer."""
        self._stopped.set()

    async def gate(self, timeout: float) -> None:
        """Admits no further request and returns when none is running.

        Raises ServerError after `timeout` seconds in which the quarantine held no request back: while it holds one, the
        request's own deadline is paused.
        """
        while True:
            holds = self._quarantine.holds if self._quarantine is not None else 0
            try:
                return await self._gate.close(timeout)
            except ServerError:
                if self._quarantine is None or not (self._quarantine.busy or self._quarantine.holds > holds):
                    raise

    def open(self) -> None:
        """Admits requests again after `gate`."""
        self._gate.open()

    @property
    def finished_groups(self) -> int:
        """Groups committed so far; drops are no progress."""
        return self._metrics.committed

    def metrics(self) -> dict[str, float]:
        """The state of the rollout by metric name; reading it changes nothing."""
        metrics = self._metrics.snapshot() | self._client.metrics()
        metrics["rollout/inflight_groups"] = float(len(self._groups))
        metrics["rollout/inflight_requests"] = float(self._gate.inflight)
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
            await self._places.acquire()
            self._start(prompt)

    async def _regenerate(self) -> None:
        while True:
            try:
                uid = await self._buffer.reclaim()
            except BufferClosed:
                return
            await self._places.acquire()
            self._metrics.regenerated += 1
            self._start(self._source.get(uid))

    async def _save_loop(self) -> None:
        while True:
            await asyncio.sleep(self._failures.save_seconds)
            await self._save()

    async def _save(self) -> None:
        """Saves in batches, yielding between them: one large message would stall the event loop and the buffer."""
        for batch in self._partials.unsaved():
            await self._buffer.save_partials(batch)

    async def _limit_loop(self, cap: InflightCap, fleet: FleetLoads) -> None:
        while True:
            self._gate.set_limit(cap.update(fleet.loads(), self._gate.inflight))
            await asyncio.sleep(LIMIT_SECONDS)

    def _start(self, prompt: Prompt) -> None:
        """Works on one group in a task of its own, which holds a place until it ends.

        Never two tasks work on one group: they would append to the same partial responses. The buffer may return a
        group while its task still waits for the answer to a commit that was declined, lost on the way, and sent again.
        """
        if prompt.uid in self._groups:
            self._again[prompt.uid] = prompt
            self._places.release()
            return
        task = self._groups[prompt.uid] = asyncio.create_task(self._work(prompt), name=f"group {prompt.uid}")
        task.add_done_callback(partial(self._ended, prompt.uid))

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        del self._groups[uid]
        again = self._again.pop(uid, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
        if again is None or task.cancelled() or error is not None:
            self._places.release()
        else:
            # It takes over the place of the task that has ended.
            self._start(again)

    # One group

    async def _work(self, prompt: Prompt) -> None:
        try:
            if self._failures.save_seconds:
                self._partials.restore(prompt.uid, await self._buffer.partials(prompt.uid))
            outcome = await self._generate(prompt)
            self._partials.forget(prompt.uid)
            if isinstance(outcome, Group):
                outcome = await self._commit(outcome)
            if outcome is not None:
                await self._buffer.drop(prompt.uid, outcome.reason)
                self._again.pop(prompt.uid, None)
                self._count_drop(prompt, outcome)
        except BufferClosed:
            return

    async def _commit(self, group: Group) -> Dropped | None:
        """Returns why the group must be dropped, when the workflow put something into it that cannot be recorded."""
        try:
            # The buffer may decline: it was closed, or the group is stale by now and will be returned.
            taken = await self._buffer.commit(group)
        except DataError as error:
            return Dropped("unrecordable", str(error))
        # Not `committed += await ...`: that reads the sum before the wait, and would lose commits made meanwhile.
        self._metrics.committed += taken
        if taken:
            self._again.pop(group.uid, None)
        self._drop_limit.passed()
        return None

    def _count_drop(self, prompt: Prompt, drop: Dropped) -> None:
        """Raises DataError when too many groups have failed; one with nothing to learn has not."""
        self._metrics.drops[drop.reason] += 1
        if drop.reason in HARMLESS:
            self._drop_limit.passed()
            return
        log.warning("Dropped group %s (%s): %s", prompt.uid, drop.reason, drop.problem)
        self._drop_limit.failed(prompt.uid, drop)

    async def _generate(self, prompt: Prompt) -> Group | Dropped:
        samples, problems = await self._sample_all(prompt)
        if self._quarantine is not None and (evidence := self._quarantine.evidence(prompt.uid)):
            self._quarantine.describe(prompt.uid, prompt.columns)
            return Dropped("kills_servers", evidence)
        trajectories = [t for sample in samples for t in sample]
        if not trajectories:
            return Dropped("no_response", problems[0] if problems else "the workflow returned no trajectory")
        try:
            scored = await self._score(trajectories, prompt)
        except DataError as error:
            return Dropped("reward_error", str(error))
        self._metrics.add_scored(scored)
        rest = iter(scored)
        chosen = self._selection.select([list(islice(rest, len(sample))) for sample in samples], self._metrics.counts)
        if isinstance(chosen, list):
            return Group(prompt.uid, chosen)
        # A failed sample is a likelier cause than what is left of the others.
        return replace(chosen, problem=problems[0]) if problems and chosen.problem else chosen

    async def _score(self, trajectories: list[Trajectory], prompt: Prompt) -> Sequence[Trajectory]:
        """Raises DataError when the reward has used up its attempts; server failures do not count."""
        attempts, backoff = 0, Backoff(self._failures.backoff_seconds)
        while True:
            try:
                return await self._rewards.score(trajectories, prompt.columns, prompt.uid)
            except MegasyncError as error:
                if is_infrastructure(error):
                    await self._back_off(f"Reward of group {prompt.uid}", error, backoff)
                    continue
                attempts += 1
                self._unknown.note(f"the reward of group {prompt.uid}", error)
                if attempts == self._failures.max_attempts:
                    raise

    async def _back_off(self, what: str, error: BaseException, backoff: Backoff) -> None:
        self._metrics.server_failures += 1
        log.warning("%s: retrying once a server is available: %s", what, error)
        await asyncio.sleep(backoff.next())

    async def _sample_all(self, prompt: Prompt) -> tuple[list[list[Trajectory]], list[str]]:
        """The trajectories of each sample, in the samples' order, and the errors of those that failed.

        Once as many have succeeded as a group needs, the others are cancelled, which aborts their requests.
        """
        tasks = [asyncio.create_task(self._sample(prompt, index)) for index in range(self._selection.samples_started)]
        running = set(tasks)
        try:
            while running and sum(map(_succeeded, tasks)) < self._selection.samples_awaited:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*running)
        results = [task.result() for task in tasks if not task.cancelled()]
        samples = [result for result in results if isinstance(result, list)]
        # Several may end at the same moment.
        unused = len(tasks) - len(results) + max(0, len(samples) - self._selection.samples_awaited)
        if unused:
            self._metrics.counts["samples_unused"] += unused
        return samples[: self._selection.samples_awaited], [result for result in results if isinstance(result, str)]

    async def _sample(self, prompt: Prompt, index: int) -> list[Trajectory] | str:
        """One sample's trajectories, or the text of its error once it has used up its attempts."""
        attempts, backoff = 0, Backoff(self._failures.backoff_seconds)
        while True:
            try:
                trajectories = await self._attempt(prompt, index)
            except (Exception, asyncio.CancelledError) as error:  # whatever a user's workflow raises
                if cancellation_requested(error):
                    raise
                if is_infrastructure(error):
                    await self._back_off(f"Sample {index} of group {prompt.uid}", error, backoff)
                    continue
                attempts += 1
                self._partials.sample(prompt.uid, index).forget_finished()
                log.debug("Sample %d of group %s failed", index, prompt.uid, exc_info=error)
                self._metrics.failed_samples += 1
                self._unknown.note(f"sample {index} of group {prompt.uid}", error)
                if attempts == self._failures.max_attempts:
                    return f"the workflow {name_of(self._workflow)} raised {type(error).__name__}: {error}"
            else:
                self._metrics.add_generated(trajectories)
                return trajectories

    async def _attempt(self, prompt: Prompt, index: int) -> list[Trajectory]:
        """Calls the workflow once, with a copy of the row, so that its changes do not reach the next attempt."""
        seed = None if self._seed is None else request_seed(self._seed, prompt.uid, index)
        responses = self._partials.sample(prompt.uid, index)
        client = SampleClient(
            self._client, self._gate, routing_key=prompt.uid, seed=seed, responses=responses, trained=True
        )
        sample = copy.deepcopy(prompt.columns) | {"prompt_ids": list(prompt.prompt_ids)}
        return self._check.check(await self._workflow(client, sample))


def _succeeded(sample: asyncio.Task[list[Trajectory] | str]) -> bool:
    return sample.done() and not sample.cancelled() and isinstance(sample.result(), list)
