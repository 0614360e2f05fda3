"""The run: four loops on one asyncio thread in the driver. It wires the parts together and holds no model state.

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
    evaluation  published weights  held-out scores          the next due step               training
    watch       the fleet's state  the error that ends all  its own tick                    the clock

Rollout and training wait for each other only through the buffer, so its closing ends both waits. A lost rank or server,
or a step that raises an error, ends nothing: `recovery` handles it while the others wait. Any other failure of a loop ends the run: its error is
raised from `run()` after the other loops were stopped and the work was saved.

Order within a step, which everything else relies on: train, acknowledge to the buffer, publish the weights, free the
slots, checkpoint. So the buffer's ledger knows every step that a checkpoint contains, and a resumed run takes it back to
that step. What else a checkpoint holds of the buffer (cursor, live uids, counters) is for a run whose ledger got lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from megasync.config import Config
from megasync.control.interfaces import Fleet, Observer, Publisher, RewardModels, Trainer
from megasync.control.progress import Progress
from megasync.control.recovery import Recovery
from megasync.control.watchdog import Watchdog
from megasync.errors import (
    CheckpointError,
    MegasyncError,
    RankLost,
    ServerError,
    StepFailed,
    SyncError,
    TrainingError,
)
from megasync.observe.awaits import describe_tasks

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
# After this long a clean stop gives up on the loop it waits for; the run then ends without it.
STOP_SECONDS = 30.0
# Looks, a watch tick apart, for a dead process behind a failed request: servers take a moment to die as a whole.
OBITUARY_LOOKS = 5
# A dump is asked for when something hangs, and must not hang with it.
DUMP_SECONDS = 5.0


class Controller:
    """Runs the loops until `schedule.total_steps`, the target score, a stop request, or the first error."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: Trainer,
        publisher: Publisher,
        buffer: Any,
        rollouter: Any,
        fleet: Fleet,
        reward_models: RewardModels | None = None,
        evaluate: Callable[[int, int], Awaitable[dict[str, float]]] | None,
        cursor: Callable[[], dict],
        observer: Observer,
        progress: Progress | None = None,
        failed_steps: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.progress = progress or Progress()
        self._trainer = trainer
        self._buffer = buffer
        self._rollouter = rollouter
        self._fleet = fleet
        self._reward_models = reward_models
        self._evaluate = evaluate
        self._cursor = cursor
        self._observer = observer
        self._clock = clock
        self._watchdog = Watchdog(clock)
        self._recovery = Recovery(
            config.trainer,
            trainer=trainer,
            publisher=publisher,
            buffer=buffer,
            fleet=fleet,
            observer=observer,
            progress=self.progress,
            watchdog=self._watchdog,
            pause=self._pause,
            failed_steps=failed_steps,
        )
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._target_reached = False
        self._evaluation_due = asyncio.Event()
        # A run begins, or goes on, from what is saved.
        self._saved_step = self.progress.step
        self._trained_steps = 0
        # Set once the initial weights have been evaluated; nothing is generated or trained before.
        self._begun = asyncio.Event()
        self._finishing = False
        self._evaluating = asyncio.Lock()
        # Clock reading at which the trainer began to wait for its next batch.
        self._idle_since = clock()
        # False while a step runs, and for good once one has failed: its ranks cannot be asked to save.
        self._trainer_fit = True

    def request_stop(self, reason: str) -> None:
        """Finish the step under way, save, and end. Safe to call from a signal handler and more than once."""
        if not self._stop.is_set():
            self._stop_reason = reason
            self._observer.message(f"stopping: {reason}")
            self._stop.set()

    @property
    def stop_reason(self) -> str:
        return self._stop_reason

    async def run(self) -> Progress:
        """Raises the first loop's error once everything was stopped and saved."""
        rollout = asyncio.create_task(self._rollout_loop(), name="rollout")
        training = asyncio.create_task(self._training_loop(), name="training")
        evaluation = asyncio.create_task(self._evaluation_loop(), name="evaluation")
        watch = asyncio.create_task(self._watch_loop(), name="watch")
        loops = [training, rollout, evaluation, watch]
        try:
            error = await self._root_cause(await self._first_end(training, loops))
            if error is not None:
                log.info("the run fails with %r; it stood so:\n%s", error, await self.dump())
                if not training.done():
                    # A step under way moves the weights: only when it is whole can they be saved.
                    self._stop.set()
                    await asyncio.wait([training], timeout=self.config.timeouts.shutdown)
            await self._buffer.close("the run has ended" if error is None else f"the run failed: {error}")
        finally:
            await self._end(loops)
        if error is not None:
            await self._save_after(error)
            raise error
        return self.progress

    async def dump(self) -> str:
        """What every task awaits, who waits in the buffer, and how the rollout stands."""
        try:
            waiting = await asyncio.wait_for(self._buffer.waiting(), DUMP_SECONDS)
        except (MegasyncError, TimeoutError) as error:
            waiting = f"unknown: {type(error).__name__} {error}"
        return "\n".join(
            [
                f"step {self.progress.step}, version {self.progress.version}, {self.progress.unpublished} unpublished",
                f"buffer: {waiting}",
                f"servers: {len(self._fleet.serving())} serving, {len(self._fleet.joiners())} waiting for weights",
                f"rollout: {self._rollouter.metrics()}",
                describe_tasks(),
            ]
        )

    async def _first_end(self, training: asyncio.Task, loops: list[asyncio.Task]) -> BaseException | None:
        """Waits until training is done or any loop failed. Other loops may end early without harm (no more prompts)."""
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
        """A process that died shows first as somebody else's failed request; its own last words say more."""
        if not isinstance(error, (ServerError, SyncError)):
            return error
        for _ in range(OBITUARY_LOOKS):
            try:
                await self._watch_servers()
            except MegasyncError as death:
                death.__cause__ = death.__cause__ or error
                return death
            await asyncio.sleep(WATCH_SECONDS)
        return error

    async def _end(self, loops: list[asyncio.Task]) -> None:
        self._rollouter.stop()
        for task in loops:
            task.cancel()
        done, late = await asyncio.wait(loops, timeout=STOP_SECONDS)
        for task in late:
            log.error("the %s loop did not stop within %.0f s", task.get_name(), STOP_SECONDS)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                log.debug("the %s loop ended with %r", task.get_name(), task.exception())

    async def _rollout_loop(self) -> None:
        await self._begun.wait()
        await self._rollouter.run()

    # Training

    async def _training_loop(self) -> None:
        """Evaluates, trains until the run is over, saves, evaluates; a lost rank takes it back to the newest checkpoint."""
        loss: RankLost | StepFailed | None = None
        while True:
            self._trainer_fit = loss is None
            try:
                if loss is not None:
                    await self._recovery.restart_trainer(loss)
                    loss, self._saved_step = None, self.progress.step
                elif not self._begun.is_set():
                    await self._recovery.attend(self._evaluate_now())
                    self._begun.set()
                elif self.progress.step == self.config.schedule.total_steps or self._stop.is_set():
                    return await self._finish()
                elif (groups := await self._next_batch()) is not None:
                    await self._train(groups)
            except (RankLost, StepFailed) as lost:
                self._trainer_fit, loss = False, lost

    async def _train(self, groups: list) -> None:
        """One step, in the order that the module's docstring gives."""
        schedule, progress = self.config.schedule, self.progress
        start = self._clock()
        self._observer.activity("trainer", "training")
        step = progress.step + 1
        self._trainer_fit = False
        metrics = await self._recovery.train(groups, step)
        self._trainer_fit = True
        progress.trained(step)
        self._recovery.stepped()
        self._trained_steps += 1
        trained = self._clock()
        await self._buffer.ack(step)
        last = step == schedule.total_steps or self._stop.is_set()
        if progress.unpublished >= schedule.weight_sync_steps or last:
            metrics |= await self._recovery.publish()
        end = self._clock()
        metrics |= {
            "time/wait_for_groups": start - self._idle_since,
            "time/train": trained - start,
            "time/sync": end - trained,
            "time/step": end - self._idle_since,
        }
        metrics |= self._rollouter.metrics() | self._recovery.metrics() | await self._buffer_metrics()
        if self._reward_models is not None:
            metrics |= self._reward_models.metrics()
        self._observer.step(step, progress.version, metrics)
        if self._due(self.config.eval.every_steps):
            self._evaluation_due.set()
        if self._due(self.config.checkpoint.every_steps):
            await self._save()

    async def _buffer_metrics(self) -> dict[str, float]:
        counts = await self._buffer.counts()
        totals = {key: counts[key] for key in ("admitted", "trained", "live", "regenerated", "masked_tokens")}
        totals["dropped"] = sum(counts["dropped"].values())
        slots = {f"buffer/{state}": float(number) for state, number in counts["slots"].items()}
        return slots | {f"groups/{key}": float(number) for key, number in totals.items()}

    async def _next_batch(self) -> list | None:
        """The next step's groups, or None when a stop was asked for while waiting. Servers join meanwhile."""
        self._idle_since = self._clock()
        while not self._stop.is_set():
            # Before a batch is asked for: a version that joiners are brought may be a new one.
            await self._recovery.bring_joiners()
            self._observer.activity("trainer", "waiting for groups")
            lease = asyncio.create_task(self._buffer.lease(self.progress.step + 1, self.progress.version), name="lease")
            stop = asyncio.create_task(self._stop.wait(), name="stop")
            try:
                await self._recovery.until_one(lease, stop)
            finally:
                lease.cancel()
                stop.cancel()
                await asyncio.gather(lease, stop, return_exceptions=True)
            if not lease.cancelled():
                return lease.result()
            # The lease was cancelled: asked for again, the buffer gives the same batch.
        return None

    async def _finish(self) -> None:
        await self._save_unsaved()
        # Not before: a rank that is lost while it saves takes training back to where it needs groups again.
        self._finishing = True
        self._rollouter.stop()
        if self._target_reached or not self._stop.is_set():
            await self._recovery.attend(self._evaluate_now())

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        """Around a sync: without partial rollouts no request may straddle it."""
        if self.config.schedule.partial_rollout:
            yield
            return
        gate = asyncio.create_task(self._rollouter.gate(self.config.timeouts.request), name="gate")
        try:
            # Requests that no server works on cannot end, and straddle nothing: the sync is what they wait for.
            while not gate.done() and self._fleet.serving():
                await self._recovery.until_one(gate)
            if gate.done():
                gate.result()
            yield
        finally:
            gate.cancel()
            await asyncio.gather(gate, return_exceptions=True)
            self._rollouter.open()

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    # Evaluation

    async def _evaluation_loop(self) -> None:
        """One evaluation at a time, while training goes on. Steps that fall due meanwhile are served by the next one."""
        while True:
            await self._evaluation_due.wait()
            self._evaluation_due.clear()
            await self._evaluate_now()

    async def _evaluate_now(self) -> None:
        if self._evaluate is None:
            return
        async with self._evaluating:
            step, version = self.progress.step, self.progress.version
            if self.progress.history and self.progress.history[-1][0] == step:
                return
            metrics = await self._evaluate(step, version)
        if step > self.progress.step:
            # The trainer went back behind this step meanwhile, which will be evaluated when it comes again.
            return
        score = metrics["eval/score"]
        self.progress.history.append((step, score))
        self._observer.evaluation(step, version, metrics)
        target = self.config.schedule.stop_at_score
        if target is not None and score > target:
            self._target_reached = True
            self.request_stop(f"held-out score {score:.3f} is above {target}")

    # Watch

    async def _watch_loop(self) -> None:
        """Raises when the fleet cannot go on, or when neither a group was finished nor a step trained for too long."""
        limit = self.config.timeouts.no_progress
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._watch_servers()
            # A buffer that starts again answers once it has read its ledger; it has deadlines of its own for that.
            with self._watchdog.bounded():
                await self._show_rollout()
            if self._finishing or not self._begun.is_set():
                # Evaluations have deadlines of their own.
                continue
            silent = self._watchdog.silent(self._rollouter.finished_groups, self._trained_steps)
            if silent > limit:
                raise TrainingError(
                    f"no group was finished and no step trained for {silent:.0f} s (timeouts.no_progress={limit:.0f}). "
                    f"The run stands so:\n{await self.dump()}"
                )

    async def _watch_servers(self) -> None:
        await self._fleet.watch()
        if self._reward_models is not None:
            await self._reward_models.watch()

    async def _show_rollout(self) -> None:
        self._observer.buffer((await self._buffer.counts())["slots"])
        groups = int(self._rollouter.metrics()["rollout/inflight_groups"])
        waits = [what for call, what in (await self._buffer.waiting()).items() if call.startswith("admit")]
        if groups or not waits:
            self._observer.activity("rollout", f"generating {groups} groups")
        else:
            self._observer.activity("rollout", f"waiting for {waits[0].partition(' (for')[0]}")

    # Saving

    async def _save(self) -> None:
        self._observer.activity("trainer", "saving a checkpoint")
        state = self.progress.state() | {
            "cursor": self._cursor(),
            "pending": await self._buffer.live_uids(),
            "buffer": await self._buffer.counters(),
        }
        with self._watchdog.bounded():
            saved = await self._trainer.save(self.progress.step, state)
        self._saved_step = self.progress.step
        await self._buffer.checkpointed(self.progress.step, saved.oldest_step)
        self._observer.message(f"checkpoint: {saved.path}")

    async def _save_unsaved(self) -> None:
        if self.progress.step != self._saved_step:
            await self._save()

    async def _save_after(self, error: BaseException) -> None:
        """Saves what a failed run has trained. What failed, a trainer or a save, is not asked for again."""
        if not self._trainer_fit or isinstance(error, CheckpointError):
            return
        try:
            await self._save_unsaved()
        except MegasyncError as failure:
            log.error("the work since the last checkpoint could not be saved: %s", failure)
