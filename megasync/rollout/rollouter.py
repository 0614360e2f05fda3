"""The rollout loops: prompts in, scored groups out, bounded at every point.

      source.next ──▶ buffer.admit ──┐
                                     ├──▶ samples_per_group workflows ──▶ reward ──▶ buffer.commit | buffer.drop
      buffer.reclaim ──▶ source.get ─┘

    loop      consumes            produces          waits for                        who unblocks it
    --------  ------------------  ----------------  -------------------------------  ------------------------------
    draw      prompts             groups under way  a free place, a slot             finished groups; training, drops
    redo      uids to regenerate  groups under way  a stale group, a free place     training; finished groups
    save      growing responses   saved partials    its own tick                     the clock
    cap       the servers' loads  the gate's limit  its own tick                     the clock

Invariant: every admitted prompt ends in exactly one `commit` or `drop`, or is still live in the buffer when the run
stops; `_work` guarantees it. A prompt that was drawn but not admitted stays with the source. What is done about a failure
depends on whose it is (`failures`): servers' failures cost a prompt only where it is the prompt that kills the servers.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

from megasync.buffer import BufferClosed
from megasync.concurrency.tasks import Backoff
from megasync.config.schema import GroupConfig, ScheduleConfig
from megasync.errors import DataError, MegasyncError, ServerError
from megasync.failures import UnexpectedErrors, cancellation_requested, is_infrastructure
from megasync.importing import name_of
from megasync.rewards import RewardRunner
from megasync.rollout.drops import DropWatch
from megasync.rollout.inflight import InflightCap, ServerLoad
from megasync.rollout.intake import Intake
from megasync.rollout.partials import Partials
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.requests import RequestGate, SampleClient, request_seed
from megasync.rollout.selection import HARMLESS, Dropped, Selection
from megasync.rollout.tally import RolloutTally
from megasync.rollout.workflow import Workflow
from megasync.trajectory import Group, Prompt, Trajectory

log = logging.getLogger(__name__)

# Seconds before a sample is tried again after its servers failed, doubled up to the second number. The client has retried
# each request by then, until `timeouts.request`.
RETRY_SECONDS = (1.0, 30.0)
# Seconds between two looks at the servers' loads.
CAP_SECONDS = 2.0


class Fleet(Protocol):
    """What the rollout sees of the servers."""

    def loads(self) -> Sequence[ServerLoad]: ...
    def metrics(self) -> dict[str, float]: ...


class Rollouter:
    """Generates groups for as long as the buffer admits prompts.

    `client` is a RolloutClient, `source` a PromptSource, `buffer` anything with the AsyncBuffer's methods. `selection`
    says which responses and groups are trained; by default all that can be. With `seed` every request carries a seed drawn
    from (seed, uid, sample, turn). `max_attempts` bounds how often a workflow or reward that raises is tried;
    `save_seconds` is the time between two saves of unfinished responses, 0 for none; `cap` limits requests below what the
    buffer allows, by the loads of the `fleet`. `quarantine` is the client's: what it finds to kill servers is dropped.
    """

    def __init__(
        self,
        client: Any,
        source: Any,
        buffer: Any,
        workflow: Workflow,
        rewards: RewardRunner,
        schedule: ScheduleConfig,
        *,
        selection: Selection | None = None,
        seed: int | None = None,
        max_attempts: int = 1,
        max_drop_share: float = 0.5,
        save_seconds: float = 0.0,
        cap: InflightCap | None = None,
        fleet: Fleet | None = None,
        quarantine: Quarantine | None = None,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._source = source
        self._buffer = buffer
        self._workflow = workflow
        self._intake = Intake(workflow)
        self._rewards = rewards
        self._selection = selection or Selection(GroupConfig(), schedule.samples_per_group, sys.maxsize)
        self._seed = seed
        self._max_attempts = max_attempts
        self._save_seconds = save_seconds
        self._cap = cap
        self._fleet = fleet
        self._quarantine = quarantine
        self._retry_seconds = retry_seconds
        self._places = asyncio.Semaphore(schedule.max_inflight_groups or sys.maxsize)
        self._gate = RequestGate()
        self._tally = RolloutTally(schedule.groups_per_step, clock)
        self._drops = DropWatch(max_drop_share)
        self._unknown = UnexpectedErrors()
        self._partials = Partials()
        self._server_failures = 0
        self._groups: dict[str, asyncio.Task] = {}
        # Groups that came back while their task had not ended yet.
        self._again: dict[str, Prompt] = {}
        self._failed: asyncio.Future[None]
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Returns after `stop` or when the buffer is closed. Raises ServerError or DataError when it cannot go on."""
        if self._stopped.is_set():
            return
        loops = {
            asyncio.create_task(self._draw(), name="rollout draw"),
            asyncio.create_task(self._redo(), name="rollout redo"),
        }
        ticks = set()
        if self._save_seconds:
            ticks.add(asyncio.create_task(self._save_loop(), name="rollout save"))
        if self._cap is not None and self._fleet is not None:
            ticks.add(asyncio.create_task(self._cap_loop(self._cap, self._fleet), name="rollout cap"))
        stopped = asyncio.create_task(self._stopped.wait(), name="rollout stop")
        self._failed = asyncio.get_running_loop().create_future()
        watched = {*loops, *ticks, stopped, self._failed}
        try:
            ended, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            self._again.clear()
            await _cancel({*watched, *self._groups.values()})
            if self._save_seconds:
                await self._save_at_end()

    def stop(self) -> None:
        """Ends `run` at whatever it waits for. Admitted prompts stay live in the buffer."""
        self._stopped.set()

    async def gate(self, timeout: float) -> None:
        """Starts no further request and returns when none is running.

        Raises ServerError after `timeout` seconds in which the quarantine held no request back: while it does, the
        request's own deadline stands still.
        """
        while True:
            holds = self._quarantine.holds if self._quarantine is not None else 0
            try:
                return await self._gate.close(timeout)
            except ServerError:
                if self._quarantine is None or not (self._quarantine.busy or self._quarantine.holds > holds):
                    raise

    def open(self) -> None:
        """Lets requests start again after `gate`."""
        self._gate.open()

    @property
    def finished_groups(self) -> int:
        """Groups committed so far; drops are no progress."""
        return self._tally.committed

    def metrics(self) -> dict[str, float]:
        """The state of the rollout by metric name; reading it changes nothing."""
        return self._tally.snapshot() | {
            "rollout/inflight_groups": float(len(self._groups)),
            "rollout/inflight_requests": float(self._gate.inflight),
            "rollout/server_failures": float(self._server_failures),
            **self._client.metrics(),
            **self._fleet_metrics(),
            **(self._quarantine.metrics() if self._quarantine is not None else {}),
        }

    def _fleet_metrics(self) -> dict[str, float]:
        if self._fleet is None:
            return {}
        metrics = self._fleet.metrics()
        if self._cap is not None:
            metrics["rollout/inflight_limit"] = float(self._cap.limit)
            metrics["rollout/kv_usage"] = max((load.token_usage for load in self._fleet.loads()), default=0.0)
        return metrics

    # The two loops

    async def _draw(self) -> None:
        """A place is taken only after the slot: whoever waits for a slot must not hold what `_redo` needs to free one."""
        while True:
            prompt = self._source.next()
            try:
                await self._buffer.admit(prompt.uid)
            except BufferClosed:
                return
            self._source.admitted(prompt.uid)
            await self._places.acquire()
            self._start(prompt)

    async def _redo(self) -> None:
        while True:
            try:
                uid = await self._buffer.reclaim()
            except BufferClosed:
                return
            await self._places.acquire()
            self._tally.regenerated += 1
            self._start(self._source.get(uid))

    async def _save_loop(self) -> None:
        while True:
            await asyncio.sleep(self._save_seconds)
            await self._save()

    async def _save(self) -> None:
        """In pieces, with other work between them: one message of all would hold up whoever packs and records it."""
        for piece in self._partials.unsaved():
            await self._buffer.save_partials(piece)

    async def _save_at_end(self) -> None:
        try:
            await self._save()
        except MegasyncError as error:
            log.warning("unfinished responses were not saved, and are generated again after a restart: %s", error)

    async def _cap_loop(self, cap: InflightCap, fleet: Fleet) -> None:
        while True:
            self._gate.limit = cap.update(fleet.loads(), self._gate.inflight)
            await asyncio.sleep(CAP_SECONDS)

    def _start(self, prompt: Prompt) -> None:
        """Works on one group in a task of its own, which holds a place until it ends.

        Never two tasks on one group: they would append to the same unfinished responses. The buffer may give a group back
        while its task still waits for the answer to a commit, which was declined, lost on the way, and sent again.
        """
        if prompt.uid in self._groups:
            self._again[prompt.uid] = prompt
            self._places.release()
            return
        task = self._groups[prompt.uid] = asyncio.create_task(self._work(prompt), name=f"group {prompt.uid}")
        task.add_done_callback(partial(self._ended, prompt.uid))

    def _ended(self, uid: str, task: asyncio.Task) -> None:
        del self._groups[uid]
        again = self._again.pop(uid, None)
        if task.cancelled() or task.exception() is not None:
            self._places.release()
            if not task.cancelled() and not self._failed.done():
                self._failed.set_exception(task.exception())
        elif again is None:
            self._places.release()
        else:
            # In the place of the one that has ended.
            self._start(again)

    # One group

    async def _work(self, prompt: Prompt) -> None:
        try:
            if self._save_seconds:
                self._partials.restore(prompt.uid, await self._buffer.partials(prompt.uid))
            outcome = await self._outcome(prompt)
            self._partials.forget(prompt.uid)
            if isinstance(outcome, Group):
                outcome = await self._commit(outcome)
            if outcome is not None:
                await self._buffer.drop(prompt.uid, outcome.reason)
                self._again.pop(prompt.uid, None)
                self._note(prompt, outcome)
        except BufferClosed:
            return

    async def _commit(self, group: Group) -> Dropped | None:
        """Why the group must be dropped, when the workflow put something into it that cannot be recorded."""
        try:
            # The buffer may decline: it was closed, or the group is too old by now and will come back.
            taken = await self._buffer.commit(group)
        except DataError as error:
            return Dropped("unrecordable", str(error))
        # Not in one statement: the sum would be read before the wait, and others that commit meanwhile be lost.
        self._tally.committed += taken
        if taken:
            self._again.pop(group.uid, None)
        self._drops.passed()
        return None

    def _note(self, prompt: Prompt, drop: Dropped) -> None:
        """Counts a dropped group. Raises DataError when too many have failed; one with nothing to learn has not."""
        self._tally.drops[drop.reason] += 1
        if drop.reason in HARMLESS:
            self._drops.passed()
            return
        log.warning("group %s was dropped (%s) %s", prompt.uid, drop.reason, drop.problem)
        self._drops.failed(prompt.uid, drop.reason, drop.problem)

    async def _outcome(self, prompt: Prompt) -> Group | Dropped:
        samples, problems = await self._sample_all(prompt)
        if crime := self._quarantine and self._quarantine.crime(prompt.uid):
            self._quarantine.describe(prompt.uid, prompt.columns)
            return Dropped("kills_servers", crime)
        trajectories = [t for sample in samples for t in sample]
        if not trajectories:
            return Dropped("no_response", problems[0] if problems else "the workflow returned no trajectory")
        try:
            scored = await self._scored(trajectories, prompt)
        except DataError as error:
            return Dropped("reward_error", str(error))
        self._tally.scored(scored)
        rest = iter(scored)
        chosen = self._selection.select([list(islice(rest, len(sample))) for sample in samples], self._tally.counts)
        if isinstance(chosen, list):
            return Group(prompt.uid, chosen)
        # Where a sample failed, that is more likely the cause than what is left of the others.
        return replace(chosen, problem=problems[0]) if problems and chosen.problem else chosen

    async def _scored(self, trajectories: list[Trajectory], prompt: Prompt) -> Sequence[Trajectory]:
        """Raises DataError when the reward has failed as often as it may; servers' failures do not count."""
        attempts, backoff = 0, Backoff(self._retry_seconds)
        while True:
            try:
                return await self._rewards.score(trajectories, prompt.columns, prompt.uid)
            except MegasyncError as error:
                if is_infrastructure(error):
                    await self._after_servers(f"the reward of group {prompt.uid}", error, backoff)
                    continue
                attempts += 1
                self._unknown.note(f"the reward of group {prompt.uid}", error)
                if attempts == self._max_attempts:
                    raise

    async def _after_servers(self, what: str, error: BaseException, backoff: Backoff) -> None:
        self._server_failures += 1
        log.warning("%s goes on when servers do: %s", what, error)
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
            await _cancel(running)
        results = [task.result() for task in tasks if not task.cancelled()]
        samples = [result for result in results if isinstance(result, list)]
        # Several may end at the same moment.
        unused = len(tasks) - len(results) + max(0, len(samples) - self._selection.samples_awaited)
        if unused:
            self._tally.counts["samples_unused"] += unused
        return samples[: self._selection.samples_awaited], [result for result in results if isinstance(result, str)]

    async def _sample(self, prompt: Prompt, index: int) -> list[Trajectory] | str:
        """One sample's trajectories, or the text of its error once it has failed as often as it may."""
        attempts, backoff = 0, Backoff(self._retry_seconds)
        while True:
            try:
                trajectories = await self._attempt(prompt, index)
            except (Exception, asyncio.CancelledError) as error:  # whatever a user's workflow raises
                if cancellation_requested(error):
                    raise
                if is_infrastructure(error):
                    await self._after_servers(f"sample {index} of group {prompt.uid}", error, backoff)
                    continue
                attempts += 1
                self._partials.sample(prompt.uid, index).forget_finished()
                log.debug("sample %d of group %s failed", index, prompt.uid, exc_info=error)
                self._tally.failed_samples += 1
                self._unknown.note(f"sample {index} of group {prompt.uid}", error)
                if attempts == self._max_attempts:
                    return f"the workflow {name_of(self._workflow)} raised {type(error).__name__}: {error}"
            else:
                self._tally.generated(trajectories)
                return trajectories

    async def _attempt(self, prompt: Prompt, index: int) -> list[Trajectory]:
        """One workflow call. It sees a copy of the row: what it changes is gone with the next attempt."""
        seed = None if self._seed is None else request_seed(self._seed, prompt.uid, index)
        partials = self._partials.sample(prompt.uid, index)
        client = SampleClient(
            self._client, self._gate, routing_key=prompt.uid, seed=seed, partials=partials, trained=True
        )
        sample = copy.deepcopy(prompt.columns) | {"prompt_ids": list(prompt.prompt_ids)}
        return self._intake.take(await self._workflow(client, sample))


def _succeeded(sample: asyncio.Task) -> bool:
    return sample.done() and not sample.cancelled() and isinstance(sample.result(), list)


async def _cancel(tasks: Iterable[asyncio.Future]) -> None:
    """Cancels what still runs and waits until all have ended; their results were taken before."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
