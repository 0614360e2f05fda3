"""The run: four loops on one asyncio thread in the driver. The controller wires the parts and holds no model state.

      prompts          finished groups            trained step              published version
    ─────────▶ rollout ───────────────▶ buffer ───────────────▶ training ───────────────────────▶ servers
                  ▲                        │  slots freed after publish │                            │
                  └────────────────────────┘                           └──▶ evaluation, metrics,    │ joiners: up, but
                                                                             checkpoints ◀───────────┘ without weights

    loop        consumes           produces                 waits for                       who unblocks it
    ----------  -----------------  -----------------------  ------------------------------  --------------------------
    rollout     prompts            committed groups         a free slot of the buffer       training (publish), drops
    training    leased groups,     steps, versions          a batch of finished groups, or  rollout (commit); the fleet
                joiners                                     a server that joins
    evaluation  published weights  held-out scores          the next due step; a server to  training; the fleet
                                                            spare (`pinning`)
    watch       the fleet's state  the error that ends all  its own tick                    the clock

Rollout and training wait for each other only through the buffer, so closing the buffer ends both waits. A lost rank, a
lost server or a step that raises an error does not end the run: `recovery` restarts the ranks and `publishing` handles
servers, while the other loops wait. Any other error of a loop ends the run: the other loops are stopped, the work is
saved, and `run()` raises the error.

Everything else relies on the order within a step: train, acknowledge to the buffer, publish the weights, free the
slots, checkpoint; with shared devices (`colocation`), checkpoint before publishing. So the buffer's ledger knows
every step that a checkpoint contains, and a resumed run takes it back to that step. The cursor, live uids and counters
in a checkpoint serve a run whose ledger was lost.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from megasync.buffer.payload import LeasedGroup
from megasync.concurrency.tasks import cancel_and_wait, wait_for_first, within
from megasync.config import Config
from megasync.control.colocation import Colocation
from megasync.control.interfaces import ControlledParts
from megasync.control.pinning import Pinning
from megasync.control.progress import Progress
from megasync.control.publishing import FleetSync
from megasync.control.recovery import TrainerRecovery
from megasync.control.saving import Checkpoints
from megasync.control.watchdog import Watchdog
from megasync.errors import (
    CheckpointError,
    EvaluationAbandoned,
    MegasyncError,
    NonFiniteError,
    RankLost,
    ServerError,
    StepFailed,
    SyncError,
    TrainingError,
)
from megasync.observe import trace
from megasync.observe.context import RunContext
from megasync.observe.stacks import describe_tasks
from megasync.rollout.breaker import paused_services
from megasync.rollout.client import PinnedVersion

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
# How long a clean stop waits for the loops. The run then ends without the late ones.
STOP_SECONDS = 30.0
# How many watch ticks to look for a dead process behind a failed request: a server takes a moment to die.
ROOT_CAUSE_TICKS = 5
# A joiner may bring a new version into an evaluation for which training waits, once: it publishes all that is trained.
EXACT_ATTEMPTS = 2
# Timeout of a dump, which is requested when something hangs and must not hang too.
DUMP_SECONDS = 5.0


class Controller:
    """Runs the loops until `schedule.total_steps`, the target score, a stop request, or the first error.

    Batches of failed steps are written to the folder `failed_steps`; None writes none.
    """

    def __init__(
        self,
        config: Config,
        context: RunContext,
        parts: ControlledParts,
        progress: Progress,
        failed_steps: Path | None = None,
    ) -> None:
        self.config = config
        self.progress = progress
        self._trainer = parts.trainer
        self._buffer = parts.buffer
        self._rollouter = parts.rollouter
        self._fleet = parts.fleet
        self._frozen_models = parts.frozen_models
        self._rollout_workers = parts.rollout_workers
        self._evaluate = parts.evaluate
        self._cursor = parts.cursor
        self._observer = parts.observer
        self._reports = context.reports
        self._clock = clock = context.clock
        self._watchdog = Watchdog(clock)
        self._colocation = Colocation(
            config.cluster.colocate, parts.trainer, parts.fleet, parts.observer, self._watchdog, clock
        )
        self._fleet_sync = FleetSync(config, parts, progress, self._watchdog, self._colocation)
        self._recovery = TrainerRecovery(
            config.trainer, parts, self._fleet_sync, progress, self._watchdog, self._colocation, failed_steps
        )
        self._stop = asyncio.Event()
        # Set when a stop was requested from outside, which waits for no evaluation.
        self._stop_requested = asyncio.Event()
        # Why `request_stop` was called.
        self.stop_reason = ""
        self._target_reached = False
        self._evaluation_due = asyncio.Event()
        self._checkpoints = Checkpoints(
            *(config.checkpoint, parts.trainer, parts.observer, progress.step, parts.export),
            *(parts.buffer.checkpointed, self._watchdog.bounded),
        )
        self._trained_steps = 0
        # Set once the initial weights have been evaluated; nothing is generated or trained before.
        self._begun = asyncio.Event()
        self._finishing = False
        self._evaluating = asyncio.Lock()
        # None if evaluations may span versions.
        self._pinning = Pinning(config, parts, progress) if config.eval.exact else None
        self._abandoned_evaluations = 0
        # Clock reading at which the trainer began to wait for its next batch.
        self._idle_since = clock()
        # The step that is being trained, or that was interrupted.
        self._incomplete: tuple[int, list[LeasedGroup]] | None = None
        # False while a step runs, and for good once a step has failed: its ranks cannot save.
        self._trainer_fit = True

    def request_stop(self, reason: str) -> None:
        """Finishes the current step, saves, and ends the run, without evaluations. Safe when called again."""
        self._stop_requested.set()
        self._finish(reason)

    def _finish(self, reason: str) -> None:
        """Makes the current step the last one."""
        if not self._stop.is_set():
            self.stop_reason = reason
            self._observer.message(f"stopping: {reason}")
            self._stop.set()

    async def run(self) -> Progress:
        """Returns at the end of the run. Raises the first loop's error once everything is stopped and saved."""
        rollout = asyncio.create_task(self._rollout_loop(), name="rollout")
        training = asyncio.create_task(self._training_loop(), name="training")
        evaluation = asyncio.create_task(self._evaluation_loop(), name="evaluation")
        watch = asyncio.create_task(self._watch_loop(), name="watch")
        loops = [training, rollout, evaluation, watch]
        try:
            error = await self._root_cause(await self._first_end(training, loops))
            if error is not None:
                log.info("Run failed: %r. State at failure:\n%s", error, await self.dump())
                if not training.done():
                    # A running step changes the weights: they can be saved only once it is complete.
                    self._stop.set()
                    await asyncio.wait([training], timeout=self.config.timeouts.shutdown)
            await self._buffer.close("the run has ended" if error is None else f"the run failed: {error}")
        finally:
            await self._end(loops)
        if error is not None:
            await self._save_after(error)
            raise error
        return self.progress

    @property
    def finished(self) -> bool:
        """Whether an ended run reached its goal, all of its steps or the target score, and was not asked to stop."""
        return self._target_reached or not self._stop.is_set()

    async def dump(self) -> str:
        """`describe`, and what every task awaits."""
        return f"{await self.describe()}\n{describe_tasks()}"

    async def describe(self) -> str:
        """The progress, who waits in the buffer, and the states of servers and rollout."""
        try:
            waiting = await within(self._buffer.waiting(), DUMP_SECONDS)
        except (MegasyncError, TimeoutError) as error:
            waiting = f"unknown: {type(error).__name__} {error}"
        return "\n".join(
            [
                f"step {self.progress.step}, version {self.progress.version}, {self.progress.unpublished} unpublished",
                f"buffer: {waiting}",
                f"servers: {len(self._fleet.serving())} serving, {len(self._fleet.joiners())} waiting for weights",
                f"rollout: {self._rollouter.metrics()}",
            ]
        )

    # Training

    async def _training_loop(self) -> None:
        """Trains until the run is over. A lost rank or a failed step takes it back to the newest checkpoint."""
        loss: RankLost | StepFailed | None = None
        while True:
            self._trainer_fit = loss is None
            try:
                if loss is not None:
                    incomplete, self._incomplete = self._incomplete, None
                    await self._recovery.restart_trainer(loss, incomplete)
                    self._checkpoints.returned(self.progress.step)
                    self._trainer_fit, loss = True, None
                return await self._train_until_over()
            except (RankLost, StepFailed) as error:
                loss = error

    async def _train_until_over(self) -> None:
        if not self._begun.is_set():
            await self._fleet_sync.sync_joiners_during(self._evaluate_until_stopped())
            self._begun.set()
        while self.progress.step != self.config.schedule.total_steps and not self._stop.is_set():
            if await self._trainer.can_grow():
                await self._grow()
            if (groups := await self._next_batch()) is not None:
                await self._train_step(groups)
        await self._save_unsaved()
        # Not earlier: a rank lost in the save takes training back to where it needs groups again.
        self._finishing = True
        self._rollouter.stop()
        if self._target_reached or not self._stop.is_set():
            await self._colocation.to_servers()
            await self._fleet_sync.sync_joiners_during(self._evaluate_until_stopped())

    async def _grow(self) -> None:
        """Restarts the ranks where there is room for more of them, from a checkpoint of this step."""
        await self._save_unsaved()
        await self._recovery.grow_trainer()
        self._checkpoints.returned(self.progress.step)

    async def _next_batch(self) -> list[LeasedGroup] | None:
        """Waits for the next step's groups and syncs joiners meanwhile. None when a stop was requested."""
        self._idle_since = self._clock()
        while not self._stop.is_set():
            # Before the lease, which names the version: joiners may need a new one.
            await self._fleet_sync.sync_joiners()
            self._observer.activity("trainer", "waiting for groups")
            lease = asyncio.create_task(self._buffer.lease(self.progress.step + 1, self.progress.version), name="lease")
            stop = asyncio.create_task(self._stop.wait(), name="stop")
            try:
                with trace.span("trainer", "wait for groups", step=self.progress.step + 1):
                    await self._fleet_sync.wait_for_fleet_or(lease, stop)
            finally:
                await cancel_and_wait(lease, stop)
            if not lease.cancelled():
                return lease.result()
            # The next lease of the same step gets the batch that the cancelled one may have taken.
        return None

    async def _train_step(self, groups: list[LeasedGroup]) -> None:
        """Trains, acknowledges, publishes, reports and saves one step, in the order that the module docstring gives."""
        schedule, progress = self.config.schedule, self.progress
        start = self._clock()
        step = progress.step + 1
        metrics = await self._train_on(groups, step)
        progress.trained(step)
        self._recovery.step_completed()
        self._trained_steps += 1
        trained = self._clock()
        await self._buffer.ack(step)
        last = step == schedule.total_steps or self._stop.is_set()
        if self._colocation.enabled:
            # As long as the ranks hold the devices.
            await self._save_if_due(last)
        saved = self._clock()
        if progress.unpublished >= schedule.weight_sync_steps or last:
            metrics |= await self._fleet_sync.publish()
        end = self._clock()
        metrics |= {
            "time/wait_for_groups": start - self._idle_since,
            "time/train": trained - start,
            "time/sync": end - saved,
            "time/step": end - self._idle_since,
        }
        metrics |= self._colocation.metrics() | await self._part_metrics()
        self._observer.step(step, progress.version, metrics)
        if step in self.config.observe.profile_steps:
            self._observer.message(f"torch profiles of step {step} are in profile/ of the run directory")
        if self._due(self.config.eval.every_steps):
            if self._colocation.enabled or (self._pinning is not None and self._pinning.needs_a_wait):
                # The requests of an evaluation have deadlines.
                with self._watchdog.bounded():
                    await self._fleet_sync.sync_joiners_during(self._evaluate_until_stopped())
            else:
                self._evaluation_due.set()
        if not self._colocation.enabled:
            await self._save_if_due()

    async def _train_on(self, groups: list[LeasedGroup], step: int) -> dict[str, float]:
        """Raises RankLost, NonFiniteError, and StepFailed for any other error of the ranks."""
        self._incomplete = step, groups
        for group in groups:
            trace.end("buffer", "finished", group.uid, step=step)
        await self._colocation.to_ranks()
        self._observer.activity("trainer", "training")
        self._trainer_fit = False
        try:
            with self._watchdog.bounded():
                metrics = await self._trainer.step(groups, step, self.progress.version)
        except (RankLost, NonFiniteError):
            raise
        except MegasyncError as error:
            raise StepFailed(f"step {step} failed: {error}") from error
        self._trainer_fit, self._incomplete = True, None
        return metrics

    async def _part_metrics(self) -> dict[str, float]:
        metrics = self._rollouter.metrics() | self._recovery.metrics() | self._fleet_sync.metrics()
        counts = await self._buffer.counts()
        metrics |= {f"buffer/{state}": float(number) for state, number in counts["slots"].items()}
        totals = {
            key: counts[key] for key in ("admitted", "trained", "live", "regenerated", "damaged", "masked_tokens")
        }
        totals["dropped"] = sum(counts["dropped"].values())
        metrics["trainer/data_parallel"] = float(self._trainer.data_parallel)
        metrics["faults/abandoned_evaluations"] = float(self._abandoned_evaluations)
        metrics |= {f"groups/{key}": float(number) for key, number in totals.items()}
        if self._frozen_models is not None:
            metrics |= self._frozen_models.metrics()
        return metrics

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    # Saving

    async def _save_if_due(self, last: bool = False) -> None:
        await self._checkpoints.finish(wait=False)
        if last or self._due(self.config.checkpoint.every_steps):
            await self._save()

    async def _save(self) -> None:
        await self._checkpoints.finish(wait=True)
        await self._colocation.to_ranks()
        self._observer.activity("trainer", "saving a checkpoint")
        step, state = self.progress.step, self.progress.state() | {"cursor": self._cursor()}
        await self._checkpoints.begin(step, state | await self._buffer.before_checkpoint(step))

    async def _save_unsaved(self) -> None:
        if self.progress.step not in (self._checkpoints.saved, self._checkpoints.begun):
            await self._save()
        await self._checkpoints.finish(wait=True)
        await self._checkpoints.exported()

    async def _save_after(self, error: BaseException) -> None:
        """Saves what a failed run has trained, unless the trainer or a save is what failed."""
        if not self._trainer_fit or isinstance(error, CheckpointError):
            return
        try:
            await self._save_unsaved()
        except MegasyncError as failure:
            log.error("Could not save the work since the last checkpoint: %s", failure)

    # Rollout and evaluation

    async def _rollout_loop(self) -> None:
        await self._begun.wait()
        await self._rollouter.run()

    async def _evaluation_loop(self) -> None:
        """Runs one evaluation at a time, beside the training. The next one serves all steps that were due meanwhile."""
        while True:
            await self._evaluation_due.wait()
            self._evaluation_due.clear()
            await self._evaluate_beside_training()

    async def _evaluate_beside_training(self) -> None:
        """Evaluates the published version while newer ones may be published."""
        if self._pinning is None:
            await self._evaluate_now()
            return
        async with self._evaluating:
            if self._is_evaluated(self.progress.step):
                return
            try:
                async with self._pinning.beside_training(lambda: self._finishing) as pinned:
                    if pinned is not None:
                        await self._score(*pinned)
            except EvaluationAbandoned as error:
                self._abandon(error)

    async def _evaluate_until_stopped(self) -> None:
        """Evaluates while training waits. A requested stop ends the evaluation, which may be long, without a score."""
        evaluation = asyncio.create_task(self._evaluate_now(), name="evaluation now")
        stopped = asyncio.create_task(self._stop_requested.wait(), name="stop")
        await wait_for_first(evaluation, stopped)
        if evaluation.cancelled():
            self._observer.message(f"evaluation of step {self.progress.step} ended without a score: {self.stop_reason}")

    async def _evaluate_now(self) -> None:
        """Evaluates the published version. With `eval.exact`, training waits meanwhile."""
        async with self._evaluating:
            if self._is_evaluated(self.progress.step):
                return
            if self._pinning is None:
                await self._score(self.progress.step, None)
                return
            for _ in range(EXACT_ATTEMPTS):
                try:
                    await self._score(*self._pinning.published())
                    return
                except EvaluationAbandoned as error:
                    self._abandon(error)

    def _is_evaluated(self, step: int) -> bool:
        return self._evaluate is None or bool(self.progress.history and self.progress.history[-1][0] == step)

    def _abandon(self, error: EvaluationAbandoned) -> None:
        self._abandoned_evaluations += 1
        self._observer.message(f"evaluation abandoned, it has no score: {error}")

    async def _score(self, step: int, pinned: PinnedVersion | None) -> None:
        """Evaluates the pinned version, or else what servers hold, and records the score as that of the step."""
        assert self._evaluate is not None
        version = self.progress.version if pinned is None else pinned.version
        incarnation = self.progress.incarnation(step)
        with trace.span("evaluation", "evaluation", step=step, version=version):
            metrics = await self._evaluate(step, version, pinned)
        if self.progress.incarnation(step) != incarnation:
            # Training went back behind this step meanwhile; the step is evaluated when it comes again.
            self._abandon(EvaluationAbandoned(f"the weights after step {step} are lost with the ranks that had them"))
            return
        score = metrics["eval/score"]
        self.progress.history.append((step, score))
        self._observer.evaluation(step, version, metrics)
        target = self.config.schedule.stop_at_score
        if target is not None and score > target:
            self._target_reached = True
            self._finish(f"held-out score {score:.3f} is above {target}")

    # Watch

    async def _watch_loop(self) -> None:
        """Raises when too few servers are left, or when no group was finished and no step trained for too long."""
        limit = self.config.timeouts.no_progress
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._watch_servers()
            await self._show_rollout()
            if self._finishing or not self._begun.is_set():
                # Evaluations have deadlines of their own.
                continue
            stalled = self._watchdog.stalled_seconds(self._rollouter.finished_groups, self._trained_steps)
            if stalled > limit:
                problem = (
                    f"no group was finished and no step trained for {stalled:.0f} s (timeouts.no_progress={limit:.0f})"
                )
                if paused := paused_services(self._rollouter.metrics()):
                    problem += f"; paused, because they failed for everybody: {', '.join(paused)}"
                report = await self._reports.report(problem)
                stacks = "" if report is None else f" Stacks of all processes: {report}."
                raise TrainingError(f"{problem}.{stacks} State of the run:\n{await self.dump()}")

    async def _watch_servers(self) -> None:
        await self._fleet.watch()
        if self._frozen_models is not None:
            await self._frozen_models.watch()
        await self._rollout_workers.watch()

    async def _show_rollout(self) -> None:
        waiting = await self._buffer.waiting()
        self._observer.buffer(await self._buffer.counts(), waiting)
        groups = int(self._rollouter.metrics()["rollout/inflight_groups"])
        waits = [reason for call, reason in waiting.items() if call.startswith("admit")]
        if groups or not waits:
            self._observer.activity("rollout", f"generating {groups} groups")
        else:
            self._observer.activity("rollout", f"waiting for {waits[0].partition(' (for')[0]}")

    # The end

    async def _first_end(self, training: asyncio.Task[None], loops: list[asyncio.Task[None]]) -> BaseException | None:
        """Waits until training is done or a loop failed. Other loops may end early, such as without further prompts."""
        pending = set(loops)
        while training in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    return TrainingError(f"the {task.get_name()} loop was cancelled from outside")
                if task.exception() is not None:
                    return task.exception()
        return None

    async def _root_cause(self, error: BaseException | None) -> BaseException | None:
        """Replaces a failed request by the error of the process that died under it, which says more."""
        if not isinstance(error, (ServerError, SyncError)):
            return error
        for _ in range(ROOT_CAUSE_TICKS):
            try:
                await self._watch_servers()
            except MegasyncError as death:
                death.__cause__ = death.__cause__ or error
                return death
            await asyncio.sleep(WATCH_SECONDS)
        return error

    async def _end(self, loops: list[asyncio.Task[None]]) -> None:
        self._rollouter.stop()
        for task in loops:
            task.cancel()
        done, late = await asyncio.wait(loops, timeout=STOP_SECONDS)
        for task in late:
            log.error("The %s loop did not stop within %.0f s", task.get_name(), STOP_SECONDS)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                log.debug("The %s loop ended with %r", task.get_name(), task.exception())
