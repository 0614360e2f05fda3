"""Generates groups: takes prompts, and ends each with one commit or drop in the buffer.

    start ──▶ samples_per_group workflows ──▶ reward ──▶ selection ──▶ buffer.commit | buffer.drop ──▶ GroupEnded

Trainer ranks record the responses of groups that are trained, workers some of those that they drop and all reference
answers (`DropRecord`).

A worker owns everything that belongs to a group and to its requests: the gate that they pass, partial responses,
rewards, metrics. It runs on one event loop, in the driver or in a process of its own (`worker_link`), and knows
neither Ray nor other workers.

Invariant: every started group ends in exactly one `GroupEnded`, after its `commit` or `drop`, unless the worker is
halted or fails before; `_work` guarantees it. Whose failure it is decides how it is handled:

    kind            cause                                              reaction
    --------------  -------------------------------------------------  ----------------------------------------------
    infrastructure  a server, router or tool's own service is down     repeated elsewhere, until the run's watchdog
    (ServerError)   or slow                                            ends it
    ... of a        an environment or MCP server is down, hangs or     the sample is repeated, at most MAX_REPEATS
    service         was killed                                         times, then left out; of all samples: `breaker`
    (ServiceFailed)
    agent           what the model did: a wrong call, out of turns     none here: it sees the error, or the sample ends
                    or context, its deadline (AGENT_FAILURES)          with what it has, and is scored and trained
    grader          a reward function raised, or gave no number        scored again, then left out
    (InvalidScores)
    code            anything else that a workflow raised, or what      counted against the prompt, then the sample is
                    megasync refused of its data                       left out; unexpected errors have a traceback

No failure but the agent's own is ever trained as a reward. `rollout/failures_*` and `failures/*` count all of them.

Only the watchdog ends the retries of failures of the run's own servers, so that prompts are not lost while the fleet
recovers. A prompt that is known to crash servers is not an infrastructure failure: see `quarantine`.

A group may be started again on another worker while the first, which was declared lost, still works on it. Whichever
commits first wins: the buffer answers the second commit without a change, ignores partial responses of a group that is
not being generated, and checks the age of every commit. A drop of the slower worker may only meet a group that is
trained already, which the worker of a group that was started `again` tolerates.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megasync.algorithms.choose import group_inputs, takes_tokens
from megasync.base.importing import name_of
from megasync.buffer import BufferClosed, BufferStateError
from megasync.buffer.payload import decode_partial, encode, encode_partial
from megasync.buffer.segments import GroupSink
from megasync.concurrency.foreign import explain, run
from megasync.concurrency.tasks import Backoff, cancel_and_wait
from megasync.config.schema import Config
from megasync.data.datasets import SET
from megasync.errors import DataError, MegasyncError, ServiceDown, causes, failed_service, is_infrastructure
from megasync.observe import trace
from megasync.observe.rollouts import RolloutLog, is_sampled, nothing_sampled, recorded, rollout_bytes
from megasync.rewards import RewardRunner
from megasync.rewards.function import ground_truth_of
from megasync.rewards.runner import InvalidScores
from megasync.rollout.breaker import breaker_metrics
from megasync.rollout.client import RolloutClient
from megasync.rollout.inflight import QuarantineClient, RequestGate
from megasync.rollout.metrics import WorkerMetrics, WorkerStatus
from megasync.rollout.partials import PartialResponses
from megasync.rollout.selection import (
    KILLS_SERVERS,
    SERVICE_DOWN,
    Dropped,
    GroupEnded,
    Selection,
    Summary,
    summarize,
)
from megasync.rollout.teachers import Teachers
from megasync.rollout.workflow import (
    AGENT_FAILURES,
    SampleClient,
    TrajectoryCheck,
    Workflow,
    call_workflow,
    label_of,
    request_seed,
)
from megasync.trajectory import BASELINE, TOKEN_REWARDS, Group, Prompt, Trajectory, by_sample, sample_rewards

log = logging.getLogger(__name__)

# Seconds of backoff after a sample's servers failed, doubled up to the second number. The client has retried each
# request by then, until `timeouts.request`.
BACKOFF_SECONDS = (1.0, 30.0)
# Repetitions of a sample whose environment or tool server fails while others' work: its actions may be what kills it.
MAX_REPEATS = 8
# Errors of one type that are logged with a traceback. Later ones would only repeat them.
MAX_TRACEBACKS = 3


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """How a prompt becomes a group.

    `selection` decides which responses and groups are trained. With `seed` every request carries a seed derived from
    (seed, uid, sample, turn). `teachers` read what selection has left. With `routed`, trajectories must have routes.
    With `baseline`, each prompt gets a greedy response too, which is scored but not trained. Without `token_rewards`,
    those are forgotten once they are summed up.
    """

    workflow: Workflow
    rewards: RewardRunner
    selection: Selection
    seed: int | None = None
    teachers: Teachers | None = None
    routed: bool = False
    truncated: bool = False
    baseline: bool = False
    token_rewards: bool = False

    @classmethod
    def of(
        cls, config: Config, workflow: Workflow, rewards: RewardRunner, teachers: Teachers | None, seed: int | None
    ) -> GroupSpec:
        """The specification that a configuration's algorithm and groups ask for."""
        rollout, algorithm = config.rollout, config.algorithm
        samples, longest = config.schedule.samples_per_group, rollout.sampling.max_new_tokens
        inputs = group_inputs(algorithm)
        compared = tuple(rewards.weights) if "scores" in inputs else ()
        selection = Selection(rollout.groups, samples, longest, relative="relative" in inputs, compared=compared)
        return cls(
            workflow,
            rewards,
            selection,
            seed,
            teachers if teachers is not None and teachers.by_name else None,
            routed=rollout.routing_replay,
            truncated=rollout.sampling.top_k != -1,
            baseline="baseline" in inputs,
            token_rewards=takes_tokens(algorithm, config.critic.enabled),
        )


class DropRecord:
    """Records this share of the dropped groups of one process, with what the reward function said of them.

    Also the reference answer of each group, which trainer ranks never see.
    """

    def __init__(self, log: RolloutLog, share: float) -> None:
        self._log = log
        self._share = share

    @classmethod
    def of(cls, config: Config, run_dir: Path, process: str) -> DropRecord | None:
        """The record that `observe.rollouts` asks for: as large a share as of the trained groups; None for none."""
        observe, schedule = config.observe, config.schedule
        if not observe.rollouts:
            return None
        log = RolloutLog(run_dir, process, rollout_bytes(observe.rollouts_mb, config.rollout.workers))
        return cls(log, observe.rollouts / (schedule.groups_per_step * schedule.samples_per_group))

    async def add_answer(self, prompt: Prompt) -> None:
        if (answer := ground_truth_of(prompt.columns)) is not None:
            await asyncio.to_thread(self._log.append_answer, prompt.uid, answer)

    async def add(self, prompt: Prompt, responses: Sequence[Trajectory], drop: Dropped) -> None:
        if is_sampled(prompt.uid, self._share):
            # The run directory may lie on a slow file system.
            await asyncio.to_thread(self._write, prompt, responses, drop)

    def _write(self, prompt: Prompt, responses: Sequence[Trajectory], drop: Dropped) -> None:
        about: dict[str, Any] = {"time": time.time(), "dropped": drop.reason, "problem": drop.problem}
        newest = max((int(t.versions.values.max()) for t in responses if len(t.versions)), default=0)
        rows = [recorded(prompt.uid, at, t, step=0, version=newest, **about) for at, t in enumerate(responses)]
        self._log.append(rows or [nothing_sampled(prompt.uid, prompt_tokens=len(prompt.prompt_ids), **about)])


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """`max_attempts` at a workflow or reward that raises; the backoff after failures of servers.

    `save_seconds` is the time between two saves of partial responses, from which a resumed run, or another worker,
    continues; 0 for none.
    """

    max_attempts: int = 1
    backoff_seconds: tuple[float, float] = BACKOFF_SECONDS
    save_seconds: float = 0.0


class GroupWorker:
    """Works on groups until it is halted."""

    def __init__(
        self,
        client: RolloutClient,
        buffer: GroupSink,
        spec: GroupSpec,
        failures: FailurePolicy | None = None,
        *,
        on_ended: Callable[[GroupEnded], None],
        on_failed: Callable[[BaseException], None],
        quarantine: QuarantineClient | None = None,
        more_metrics: Callable[[], Mapping[str, float]] = dict,
        record: DropRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_ended` gets each group that has ended, `on_failed` an error that is the fault of no group.

        `quarantine` is the client's. `more_metrics` are reported with those of the client.
        """
        self._on_ended, self._on_failed = on_ended, on_failed
        self._record = record
        self._client = client
        self._more_metrics = more_metrics
        self._buffer = buffer
        self._spec = spec
        self._name = f"the workflow {name_of(spec.workflow)}"
        # What its samples' failures are counted under.
        self._label = label_of(spec.workflow)
        self._check = TrajectoryCheck(spec.workflow, spec.routed, spec.truncated)
        self._check_baseline = TrajectoryCheck(spec.workflow)
        self._failures = failures or FailurePolicy()
        self._quarantine = quarantine or QuarantineClient()
        # Every request of its groups passes it.
        self.gate = RequestGate()
        self._metrics = WorkerMetrics(clock)
        # Errors of workflows and rewards that are not megasync's own, by type.
        self._unexpected: Counter[str] = Counter()
        self._partials = PartialResponses()
        self._groups: dict[str, asyncio.Task[GroupEnded]] = {}
        self._saving: asyncio.Task[None] | None = None

    @property
    def status(self) -> WorkerStatus:
        metrics = {**self._client.metrics(), **self._more_metrics(), **breaker_metrics()}
        return self._metrics.status(self.gate.inflight, metrics)

    def begin(self, gated: bool, limit: int | None) -> None:
        """Starts the timers of a worker that the rollouter uses from now on. `gated` is whether its gate is closed."""
        if gated:
            self.gate.shut()
        if limit is not None:
            self.gate.set_limit(limit)
        if self._failures.save_seconds:
            self._saving = asyncio.create_task(self._save_loop(), name="rollout save")

    def start(self, prompt: Prompt, batch: int, again: bool = False) -> None:
        """Begins a group, whose requests go before those of groups with a higher `batch`.

        `again` if another worker, which is lost, has worked on it.
        """
        task = asyncio.create_task(self._work(prompt, batch, again), name=f"group {prompt.uid}")
        self._groups[prompt.uid] = task
        task.add_done_callback(partial(self._ended, prompt.uid))

    def abandon(self) -> list[asyncio.Task[Any]]:
        """Cancels all groups and timers without waiting for them; returns their tasks."""
        tasks: list[asyncio.Task[Any]] = [*self._groups.values()]
        if self._saving is not None:
            tasks.append(self._saving)
        for task in tasks:
            task.cancel()
        return tasks

    async def halt(self) -> None:
        """Cancels all groups, and returns when they have ended and their partial responses are saved."""
        await asyncio.gather(*self.abandon(), return_exceptions=True)
        if self._failures.save_seconds:
            try:
                await self._save()
            except MegasyncError as error:
                log.warning("Partial responses are not saved; a restart generates them again: %s", error)

    def _ended(self, uid: str, task: asyncio.Task[GroupEnded]) -> None:
        del self._groups[uid]
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._on_ended(task.result())
        else:
            self._on_failed(error)

    async def _save_loop(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._failures.save_seconds)
                await self._save()
        except Exception as error:  # noqa: BLE001 - reported, which ends the run
            self._on_failed(error)

    async def _save(self) -> None:
        """Saves in batches, yielding between them: one large message would stall the event loop and the buffer."""
        for batch in self._partials.unsaved():
            await self._buffer.save_partials({key: encode_partial(response) for key, response in batch.items()})

    # One group

    async def _work(self, prompt: Prompt, batch: int, again: bool) -> GroupEnded:
        with trace.about(uid=prompt.uid), trace.span("group", "group") as args:
            ended = await self._finish(prompt, batch, again)
            args["outcome"] = ended.dropped.reason if ended.dropped else "committed" if ended.taken else "declined"
            return ended

    async def _finish(self, prompt: Prompt, batch: int, again: bool) -> GroupEnded:
        uid = prompt.uid
        try:
            if self._failures.save_seconds:
                saved = await self._buffer.partials(uid)
                self._partials.restore(uid, {key: decode_partial(data) for key, data in saved.items()})
            outcome, responses, scored = await self._generate(prompt, batch)
            if self._record is not None:
                await self._record.add_answer(prompt)
            self._partials.forget(uid)
            ended = GroupEnded(uid, scored=scored, lengths=tuple(len(t.response_ids) for t in responses))
            if isinstance(outcome, Group):
                # The buffer may decline: it was closed, or the group is stale by now and will be returned.
                group = encode(outcome)
                taken = await self._buffer.commit(group)
                return replace(ended, taken=taken, score=group.header.mean_reward)
            try:
                await self._buffer.drop(uid, outcome.reason)
            except BufferStateError as error:
                if not again:
                    raise
                log.info("Group %s was finished by the worker that had it before: %s", uid, error)
                return replace(ended, taken=True)
            if self._record is not None:
                await self._record.add(prompt, responses, outcome)
            return replace(ended, dropped=outcome)
        except BufferClosed:
            return GroupEnded(uid)

    async def _generate(self, prompt: Prompt, batch: int) -> tuple[Group | Dropped, list[Trajectory], Summary | None]:
        """The group, or why there is none; its responses, scored if they could be; and the summary of their scores."""
        (samples, problems), (greedy, greedy_problem) = await asyncio.gather(
            self._sample_all(prompt, batch), self._greedy(prompt, batch)
        )
        trajectories = [t for sample in samples for t in sample]
        if evidence := self._quarantine.evidence(prompt.uid):
            return Dropped(KILLS_SERVERS, evidence), trajectories, None
        # Of several reasons, that a service is down is the one to act on.
        problems.sort(key=lambda problem: problem.reason != SERVICE_DOWN)
        if not trajectories:
            return problems[0] if problems else Dropped("no_response", "the workflow returned no trajectory"), [], None
        try:
            scored = [*await self._score([*trajectories, *greedy], prompt)]
        except DataError as error:
            return Dropped("reward_error", str(error)), trajectories, None
        if self._spec.baseline:
            scored, baseline = scored[: len(trajectories)], sample_rewards(scored[len(trajectories) :])
            if not baseline:
                problem = greedy_problem.problem if greedy_problem else "the greedy response has no reward"
                return Dropped("no_baseline", problem), scored, summarize(scored)
            scored = [replace(t, metrics={**t.metrics, BASELINE: baseline[0]}) for t in scored]
        if not self._spec.token_rewards:
            scored = [_without(t, TOKEN_REWARDS) for t in scored]
        if SET in prompt.columns:
            scored = [_labelled(trajectory, str(prompt.columns[SET])) for trajectory in scored]
        if problem := self._without_scores(scored):
            return Dropped("reward_error", problem), scored, summarize(scored)
        chosen = self._spec.selection.select(by_sample(scored), self._metrics.counts)
        if isinstance(chosen, list):
            # Of all samples, and without penalties: how well the prompt was answered.
            score = statistics.fmean(sample_rewards(scored))
            try:
                with_teachers = await self._teach(chosen, prompt)
                group = Group(prompt.uid, with_teachers, self._spec.selection.least, score, self._spec.rewards.weights)
                return group, scored, summarize(scored)
            except DataError as error:
                return Dropped("teacher_error", str(error)), scored, summarize(scored)
        # A failed sample is a likelier cause than what is left of the others.
        drop = replace(chosen, problem=problems[0].problem) if problems and chosen.problem else chosen
        return drop, scored, summarize(scored)

    def _without_scores(self, scored: Sequence[Trajectory]) -> str:
        """What is wrong if the estimator compares the scores of reward functions, and a reward is not made of them."""
        names = self._spec.selection.compared
        made = (t.reward is None or any(f"reward/{name}" in t.metrics for name in names) for t in scored)
        if not names or all(made):
            return ""
        return (
            f"the workflow {name_of(self._spec.workflow)} has set the reward of a response, so the reward functions "
            f"({', '.join(names)}) gave none, but algorithm.advantage compares their scores; leave the reward to them, "
            f"or choose another advantage"
        )

    async def _score(self, trajectories: list[Trajectory], prompt: Prompt) -> Sequence[Trajectory]:
        """Leaves responses unscored at which alone the reward still fails in its last attempt.

        Raises DataError where it then fails at all of them; server failures do not count.
        """
        attempts, backoff = 0, Backoff(self._failures.backoff_seconds)
        while True:
            failed = Counter[str]() if attempts + 1 == self._failures.max_attempts else None
            try:
                scored = await self._spec.rewards.score(trajectories, prompt.columns, prompt.uid, failed)
            except MegasyncError as error:
                if is_infrastructure(error):
                    await self._back_off(f"Reward of group {prompt.uid}", error, backoff)
                    continue
                attempts += 1
                self._note_unexpected(f"the reward of group {prompt.uid}", error)
                if failed is not None:
                    grader = next((cause.grader for cause in causes(error) if isinstance(cause, InvalidScores)), "")
                    self._count("grader", grader or self._label, len(by_sample(trajectories)))
                    raise
            else:
                for grader, responses in (failed or {}).items():
                    log.warning("The reward %s failed at %d responses of group %s", grader, responses, prompt.uid)
                    self._count("grader", grader, responses)
                return scored

    async def _teach(self, trajectories: list[Trajectory], prompt: Prompt) -> list[Trajectory]:
        """Raises DataError when a teacher refuses a response; server failures do not count."""
        backoff = Backoff(self._failures.backoff_seconds)
        while self._spec.teachers is not None:
            try:
                return await self._spec.teachers.teach(trajectories, prompt.columns)
            except MegasyncError as error:
                if not is_infrastructure(error):
                    raise
                await self._back_off(f"Teacher of group {prompt.uid}", error, backoff)
        return trajectories

    def _note_unexpected(self, what: str, error: BaseException) -> None:
        """Logs the first few errors of each type that is not megasync's own with their tracebacks."""
        unexpected = next((cause for cause in causes(error) if not isinstance(cause, MegasyncError)), None)
        if unexpected is not None:
            kind = type(unexpected).__name__
            self._unexpected[kind] += 1
            if self._unexpected[kind] <= MAX_TRACEBACKS:
                log.error("%s failed with an unexpected %s:", what, kind, exc_info=error)

    def _count(self, kind: str, name: str, samples: int = 1) -> None:
        """Counts failures by their kind and what failed."""
        self._metrics.counts[f"failures_{kind}"] += samples
        self._metrics.failures[f"failures/{name}/{kind}"] += samples

    async def _back_off(self, what: str, error: BaseException, backoff: Backoff) -> None:
        self._count("infrastructure", failed_service(error) or "servers")
        self._metrics.server_failures += 1
        log.warning("%s: retrying once a server is available: %s", what, error)
        await asyncio.sleep(backoff.next())

    async def _sample_all(self, prompt: Prompt, batch: int) -> tuple[list[list[Trajectory]], list[Dropped]]:
        """The trajectories of each sample, in the samples' order, and why others are left out.

        Once as many have succeeded as a group needs, the others are cancelled, which aborts their requests.
        """
        started = range(self._spec.selection.samples_started)
        tasks = [asyncio.create_task(self._sample(prompt, batch, index)) for index in started]
        running = set(tasks)
        try:
            while running and sum(map(_succeeded, tasks)) < self._spec.selection.samples_awaited:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*running)
        results = [task.result() for task in tasks if not task.cancelled()]
        samples = [result for result in results if isinstance(result, list)]
        # Several may end at the same moment.
        unused = len(tasks) - len(results) + max(0, len(samples) - self._spec.selection.samples_awaited)
        if unused:
            self._metrics.counts["samples_unused"] += unused
        return samples[: self._spec.selection.samples_awaited], [
            result for result in results if isinstance(result, Dropped)
        ]

    async def _greedy(self, prompt: Prompt, batch: int) -> tuple[Sequence[Trajectory], Dropped | None]:
        """The trajectories of the greedy response, if the estimator needs one, or why there are none."""
        if not self._spec.baseline:
            return (), None
        sample = await self._sample(prompt, batch, self._spec.selection.samples_started)
        return ((), sample) if isinstance(sample, Dropped) else (sample, None)

    async def _sample(self, prompt: Prompt, batch: int, index: int) -> list[Trajectory] | Dropped:
        """One sample's trajectories, or why it is left out once its attempts are used up."""
        attempts, repeats, backoff = 0, 0, Backoff(self._failures.backoff_seconds)
        while True:
            try:
                trajectories = await self._attempt(prompt, batch, index)
            except Exception as error:  # whatever a user's workflow raises
                if any(isinstance(cause, ServiceDown) for cause in causes(error)):
                    return Dropped(SERVICE_DOWN, explain(error))
                if is_infrastructure(error):
                    repeats += failed_service(error) is not None
                    if repeats > MAX_REPEATS:
                        self._count("infrastructure", failed_service(error) or "servers")
                        return Dropped("no_response", f"{self._name} failed {repeats} times: {explain(error)}")
                    await self._back_off(f"Sample {index} of group {prompt.uid}", error, backoff)
                    continue
                attempts += 1
                self._count("code", self._label)
                self._partials.sample(prompt.uid, index).forget_finished()
                log.debug("Sample %d of group %s failed", index, prompt.uid, exc_info=error)
                self._metrics.failed_samples += 1
                self._note_unexpected(f"sample {index} of group {prompt.uid}", error)
                if attempts == self._failures.max_attempts:
                    return Dropped("no_response", f"{self._name} raised {explain(error)}")
            else:
                self._metrics.add_generated(trajectories)
                if any(t.metrics.get(name) for t in trajectories for name in AGENT_FAILURES):
                    self._count("agent", self._label)
                return trajectories

    async def _attempt(self, prompt: Prompt, batch: int, index: int) -> list[Trajectory]:
        """Calls the workflow once, with a copy of the row, so that its changes do not reach the next attempt.

        The sample after those of the group is the greedy one.
        """
        greedy = index == self._spec.selection.samples_started
        sampling: dict[str, Any] = {"temperature": 0.0} if greedy else {"batch": batch}
        seed = None if self._spec.seed is None else request_seed(self._spec.seed, prompt.uid, index)
        responses = self._partials.sample(prompt.uid, index)
        client = SampleClient(
            self._client, self.gate, routing_key=prompt.uid, seed=seed, responses=responses, **sampling
        )
        check = self._check_baseline if greedy else self._check
        with trace.about(sample=index):
            trajectories = await run(call_workflow, self._name, None, self._spec.workflow, client, prompt, check)
        return [replace(trajectory, sample=index) for trajectory in trajectories]


def _without(trajectory: Trajectory, name: str) -> Trajectory:
    """Without one of its arrays."""
    if name not in trajectory.arrays:
        return trajectory
    return replace(trajectory, arrays={key: array for key, array in trajectory.arrays.items() if key != name})


def _labelled(trajectory: Trajectory, name: str) -> Trajectory:
    """With its reward as a metric of its training set."""
    if trajectory.reward is None:
        return trajectory
    return replace(trajectory, metrics={**trajectory.metrics, f"reward@{name}": trajectory.reward})


def _succeeded(sample: asyncio.Task[list[Trajectory] | Dropped]) -> bool:
    return sample.done() and not sample.cancelled() and isinstance(sample.result(), list)
