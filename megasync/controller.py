"""The run: four loops on one asyncio thread in the driver. It wires the parts together and holds no model state.

      prompts          finished groups            trained step              published version
    ─────────▶ rollout ───────────────▶ buffer ───────────────▶ training ───────────────────────▶ servers
                  ▲                        │  slots freed after publish │
                  └────────────────────────┘                           └──▶ evaluation, metrics, checkpoints

    loop        consumes           produces                 waits for                       who unblocks it
    ----------  -----------------  -----------------------  ------------------------------  --------------------------
    rollout     prompts            committed groups         a free slot of the buffer       training (publish), drops
    training    leased groups      steps, versions          a batch of finished groups      rollout (commit)
    evaluation  published weights  held-out scores          the next due step               training
    watch       heartbeats         the error that ends all  its own tick                    the clock

Rollout and training wait for each other only through the buffer, so its closing ends both waits. Whatever loop fails
first ends the run: its error is raised from `run()` after the other loops were stopped and the work was saved.

Order within a step, which everything else relies on: train, acknowledge to the buffer, publish the weights, free the
slots, checkpoint. A checkpoint therefore holds the step, the version whose weights it contains, and the uids that were
admitted but not yet trained; a resumed run generates exactly those again before it draws new prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megasync.config import Config
from megasync.errors import CheckpointError, MegasyncError, ServerError, SyncError, TrainingError

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
# After this long a clean stop gives up on the loop it waits for; the run then ends without it.
STOP_SECONDS = 30.0
# Looks, a watch tick apart, for a dead process behind a failed request: servers take a moment to die as a whole.
OBITUARY_LOOKS = 5


class Trainer(Protocol):
    """The trainer ranks as one: every call reaches all of them."""

    async def step(self, groups: list, step: int, version: int) -> dict[str, float]: ...
    async def save(self, step: int, state: dict) -> Path: ...


class Publisher(Protocol):
    """Moves the trainer's weights into every server, verified, as one version."""

    async def publish(self, version: int) -> dict[str, float]: ...


class Observer(Protocol):
    """Sees everything, decides nothing."""

    def step(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: dict[str, int]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass
class Progress:
    """Where the run stands; saved in each checkpoint."""

    step: int = 0
    version: int = 0
    # Steps trained since the last published version.
    unpublished: int = 0
    # Held-out scores as (step, score).
    history: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """From what `Controller` put into a checkpoint."""
        history = [(step, score) for step, score in state["history"]]
        return cls(state["step"], state["version"], state["unpublished"], history)


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
        evaluate: Callable[[int, int], Awaitable[dict[str, float]]] | None,
        watch: Callable[[], Awaitable[None]],
        cursor: Callable[[], dict],
        observer: Observer,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.progress = progress or Progress()
        self._trainer = trainer
        self._publisher = publisher
        self._buffer = buffer
        self._rollouter = rollouter
        self._evaluate = evaluate
        self._watch = watch
        self._cursor = cursor
        self._observer = observer
        self._clock = clock
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._target_reached = False
        self._evaluation_due = asyncio.Event()
        self._saved_step = -1
        # Steps of the checkpoints that are kept, as far as they are known.
        self._kept = deque([self.progress.step], maxlen=config.checkpoint.keep or None)
        self._last_progress = clock()
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
        await self._evaluate_now()
        rollout = asyncio.create_task(self._rollouter.run(), name="rollout")
        training = asyncio.create_task(self._training_loop(), name="training")
        evaluation = asyncio.create_task(self._evaluation_loop(), name="evaluation")
        watch = asyncio.create_task(self._watch_loop(), name="watch")
        loops = [training, rollout, evaluation, watch]
        try:
            error = await self._root_cause(await self._first_end(training, loops))
            if error is not None and not training.done():
                # A step under way moves the weights: only when it is whole can they be saved.
                self._stop.set()
                await asyncio.wait([training], timeout=self.config.timeouts.shutdown)
            await self._buffer.close("the run has ended" if error is None else f"the run failed: {error}")
        finally:
            await self._end(loops)
        await self._save_at_end(error)
        if error is not None:
            raise error
        if self._target_reached or not self._stop.is_set():
            await self._evaluate_now()
        return self.progress

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
                await self._watch()
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

    # Training

    async def _training_loop(self) -> None:
        schedule, progress = self.config.schedule, self.progress
        while progress.step < schedule.total_steps and not self._stop.is_set():
            start = self._clock()
            groups = await self._next_batch()
            if groups is None:
                break
            leased = self._clock()
            self._observer.activity("trainer", "training")
            step = progress.step + 1
            self._trainer_fit = False
            metrics = await self._trainer.step(groups, step, progress.version)
            self._trainer_fit = True
            progress.step, progress.unpublished = step, progress.unpublished + 1
            self._last_progress = trained = self._clock()
            await self._buffer.ack(step)
            last = step == schedule.total_steps or self._stop.is_set()
            if progress.unpublished >= schedule.weight_sync_steps or last:
                metrics |= await self._publish()
            end = self._clock()
            metrics |= {
                "time/wait_for_groups": leased - start,
                "time/train": trained - leased,
                "time/sync": end - trained,
                "time/step": end - start,
            }
            self._observer.step(
                step, progress.version, metrics | self._rollouter.metrics() | await self._buffer_metrics()
            )
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
        """The next step's groups, or None when a stop was asked for while waiting."""
        self._observer.activity("trainer", "waiting for groups")
        lease = asyncio.create_task(self._buffer.lease(self.progress.step + 1, self.progress.version))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({lease, stop}, return_when=asyncio.FIRST_COMPLETED)
            return lease.result() if lease.done() else None
        finally:
            lease.cancel()
            stop.cancel()
            await asyncio.gather(lease, stop, return_exceptions=True)

    async def _publish(self) -> dict[str, float]:
        """Moves the weights out, then frees the slots of everything they were trained on."""
        self._observer.activity("trainer", "syncing weights")
        version = self.progress.version + 1
        if not self.config.schedule.partial_rollout:
            await self._rollouter.gate(self.config.timeouts.request)
        try:
            metrics = await self._publisher.publish(version)
        finally:
            self._rollouter.open()
        self.progress.version, self.progress.unpublished = version, 0
        await self._buffer.publish(version)
        return metrics

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
        step, version = self.progress.step, self.progress.version
        if self.progress.history and self.progress.history[-1][0] == step:
            return
        metrics = await self._evaluate(step, version)
        score = metrics["eval/score"]
        self.progress.history.append((step, score))
        self._observer.evaluation(step, version, metrics)
        target = self.config.schedule.stop_at_score
        if target is not None and score > target:
            self._target_reached = True
            self.request_stop(f"held-out score {score:.3f} is above {target}")

    # Watch

    async def _watch_loop(self) -> None:
        """Raises when a process died, or when neither a group was finished nor a step trained for too long."""
        limit = self.config.timeouts.no_progress
        finished = -1
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._watch()
            await self._show_rollout()
            counts = self._rollouter.finished_groups
            if counts != finished:
                finished, self._last_progress = counts, self._clock()
            silent = self._clock() - self._last_progress
            if silent > limit:
                raise TrainingError(
                    f"no group was finished and no step trained for {silent:.0f} s (timeouts.no_progress={limit:.0f}); "
                    f"waiting: {await self._buffer.waiting()}; rollout: {self._rollouter.metrics()}"
                )

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
        progress = self.progress
        state = {
            "step": progress.step,
            "version": progress.version,
            "unpublished": progress.unpublished,
            "history": progress.history,
            "cursor": self._cursor(),
            "pending": await self._buffer.live_uids(),
            "buffer": await self._buffer.counters(),
        }
        path = await self._trainer.save(progress.step, state)
        self._saved_step = progress.step
        self._kept.append(progress.step)
        await self._buffer.checkpointed(progress.step, self._kept[0])
        self._observer.message(f"checkpoint: {path}")

    async def _save_at_end(self, error: BaseException | None) -> None:
        """Saves what was trained since the last checkpoint. What failed, a trainer or a save, is not asked for again."""
        if self._saved_step == self.progress.step or self.progress.step == 0 or not self._trainer_fit:
            return
        if isinstance(error, CheckpointError):
            return
        try:
            await self._save()
        except MegasyncError as failure:
            if error is None:
                raise
            log.error("the work since the last checkpoint could not be saved: %s", failure)
