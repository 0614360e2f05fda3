"""The rollout loops: prompts in, scored groups out, bounded at every point.

      source.next ──▶ buffer.admit ──┐
                                     ├──▶ samples_per_group workflows ──▶ reward ──▶ buffer.commit | buffer.drop
      buffer.reclaim ──▶ source.get ─┘

    loop      consumes            produces          waits for                        who unblocks it
    --------  ------------------  ----------------  -------------------------------  ------------------------------
    draw      prompts             groups under way  a free place, a slot             finished groups; training, drops
    redo      uids to regenerate  groups under way  an over-age group, a free place  training; finished groups

Invariant: every admitted prompt ends in exactly one `commit` or `drop`, or is still live in the buffer when the run
stops; `_work` guarantees it. A prompt that was drawn but not admitted stays with the source.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megasync.buffer import BufferClosed
from megasync.buffer.trajectory import Group, Prompt, Trajectory
from megasync.config.schema import ScheduleConfig
from megasync.errors import DataError, ServerError
from megasync.rollout.drops import DropWatch
from megasync.rollout.requests import RequestGate, SampleClient, request_seed
from megasync.rollout.rewards import RewardRunner
from megasync.rollout.tally import RolloutTally
from megasync.rollout.workflow import Workflow, as_trajectories, name_of

log = logging.getLogger(__name__)

# A group is generated again this often when servers fail in the middle of it; the client has retried each request by
# then, so more would only hide a pool that is gone.
GROUP_ATTEMPTS = 3
RETRY_SECONDS = 2.0
# Reason of a drop that is no failure: all rewards are equal, so there is nothing to learn.
UNIFORM = "uniform"


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A group that will not be trained: the reason under which it is counted, and the error behind it if there is one."""

    reason: str
    problem: str = ""


class Rollouter:
    """Generates groups for as long as the buffer admits prompts.

    `client` is a RolloutClient, `source` a PromptSource, `buffer` anything with the AsyncBuffer's methods. With
    `relative_advantage` (a reward counts against its group's mean) a group with one survivor is dropped. With `seed`
    every request carries a seed drawn from (seed, uid, sample, turn).
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
        drop_uniform_groups: bool = False,
        relative_advantage: bool = True,
        seed: int | None = None,
        retry_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._source = source
        self._buffer = buffer
        self._workflow = workflow
        self._rewards = rewards
        self._samples = schedule.samples_per_group
        self._drop_uniform = drop_uniform_groups
        self._relative = relative_advantage
        self._seed = seed
        self._retry_seconds = retry_seconds
        self._places = asyncio.Semaphore(schedule.max_inflight_groups or sys.maxsize)
        self._gate = RequestGate()
        self._tally = RolloutTally(schedule.groups_per_step, clock)
        self._drops = DropWatch()
        self._groups: set[asyncio.Task] = set()
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
        stopped = asyncio.create_task(self._stopped.wait(), name="rollout stop")
        self._failed = asyncio.get_running_loop().create_future()
        watched = {*loops, stopped, self._failed}
        try:
            ended, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            await _cancel(watched | self._groups)

    def stop(self) -> None:
        """Ends `run` at whatever it waits for. Admitted prompts stay live in the buffer."""
        self._stopped.set()

    async def gate(self, timeout: float) -> None:
        """Starts no further request and returns when none is running. Raises ServerError after `timeout` seconds."""
        await self._gate.close(timeout)

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
        }

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

    def _start(self, prompt: Prompt) -> None:
        """Works on one group in a task of its own, which holds a place until it ends."""
        task = asyncio.create_task(self._work(prompt), name=f"group {prompt.uid}")
        self._groups.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._groups.discard(task)
        self._places.release()
        if not task.cancelled() and task.exception() is not None and not self._failed.done():
            self._failed.set_exception(task.exception())

    # One group

    async def _work(self, prompt: Prompt) -> None:
        outcome = await self._outcome(prompt)
        try:
            if isinstance(outcome, Group):
                # The buffer may decline: it was closed, or the group is too old by now and will come back.
                self._tally.committed += await self._buffer.commit(outcome)
                self._drops.passed()
            else:
                await self._buffer.drop(prompt.uid, outcome.reason)
                self._note(prompt, outcome)
        except BufferClosed:
            return

    def _note(self, prompt: Prompt, drop: _Dropped) -> None:
        """Counts a dropped group. Raises DataError when too many have failed; a uniform one has not."""
        self._tally.drops[drop.reason] += 1
        if drop.reason == UNIFORM:
            self._drops.passed()
            return
        log.warning("group %s was dropped (%s) %s", prompt.uid, drop.reason, drop.problem)
        self._drops.failed(drop.reason, drop.problem)

    async def _outcome(self, prompt: Prompt) -> Group | _Dropped:
        trajectories, problems = await self._responses(prompt)
        if not trajectories:
            return _Dropped("no_response", problems[0] if problems else "the workflow returned no trajectory")
        try:
            scored = await self._rewards.score(trajectories, prompt.columns, prompt.uid)
        except DataError as error:
            return _Dropped("reward_error", str(error))
        self._tally.scored(scored)
        kept = [t for t in scored if t.reward is not None and any(t.loss_mask)]
        if not kept:
            return _Dropped("unscored", "no response has both a reward and a token to train on")
        if self._relative and len(kept) == 1:
            return _Dropped("lone_survivor", problems[0] if problems else "only one response of the group was scored")
        if self._drop_uniform and len({t.reward for t in kept}) == 1:
            return _Dropped(UNIFORM)
        return Group(prompt.uid, kept)

    async def _responses(self, prompt: Prompt) -> tuple[list[Trajectory], list[str]]:
        """All samples of a group at once; again when servers failed, a few times. Raises ServerError after that."""
        for attempt in range(1, GROUP_ATTEMPTS + 1):
            try:
                return await self._sample_all(prompt)
            except ServerError as error:
                if attempt == GROUP_ATTEMPTS:
                    raise
                log.warning("group %s, attempt %d of %d: %s", prompt.uid, attempt, GROUP_ATTEMPTS, error)
                await asyncio.sleep(self._retry_seconds * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def _sample_all(self, prompt: Prompt) -> tuple[list[Trajectory], list[str]]:
        samples = [asyncio.create_task(self._sample(prompt, index)) for index in range(self._samples)]
        try:
            results = await asyncio.gather(*samples)
        finally:
            await _cancel(samples)
        trajectories = [t for result in results if isinstance(result, list) for t in result]
        return trajectories, [result for result in results if isinstance(result, str)]

    async def _sample(self, prompt: Prompt, index: int) -> list[Trajectory] | str:
        """One workflow call: its trajectories, or the text of its error. ServerError goes up, it is nobody's answer."""
        seed = None if self._seed is None else request_seed(self._seed, prompt.uid, index)
        client = SampleClient(self._client, self._gate, routing_key=prompt.uid, seed=seed)
        sample = copy.deepcopy(prompt.columns) | {"prompt_ids": list(prompt.prompt_ids)}
        try:
            trajectories = as_trajectories(await self._workflow(client, sample), self._workflow)
        except ServerError:
            raise
        except Exception as error:  # whatever a user's workflow raises
            self._tally.failed_samples += 1
            log.debug("sample %d of group %s failed", index, prompt.uid, exc_info=error)
            return f"the workflow {name_of(self._workflow)} raised {type(error).__name__}: {error}"
        self._tally.generated(trajectories)
        return trajectories


async def _cancel(tasks: Iterable[asyncio.Future]) -> None:
    """Cancels what still runs and waits until all have ended; their results were taken before."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
