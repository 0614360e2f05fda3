"""The observer of a run: turns reports of its parts into metrics, events, `state.json`, the display and the curve.

It never makes a run fail: a failed write is reported once as a warning, and training continues.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec import structs
from rich.console import Console

from megasync.concurrency.tasks import set_within
from megasync.config import Config
from megasync.config.pacing import Pacing
from megasync.observe import names
from megasync.observe.curve import plot_curve
from megasync.observe.display import Activity, LiveDisplay, RunSnapshot
from megasync.observe.events import (
    CHECKPOINT,
    END,
    EVALUATION,
    FAULT,
    MESSAGE,
    RECOVERY,
    START,
    SYNC,
    TRAINING,
    EventLog,
    read_events,
)
from megasync.observe.metrics import MetricsLog
from megasync.observe.samples import append_answers
from megasync.observe.sinks import Answers, Sinks, StepMetrics
from megasync.observe.state_file import (
    BufferState,
    ProcessState,
    RankState,
    RunState,
    Status,
    TenantState,
    read_state,
    write_state,
)
from megasync.observe.trackers import configured_sinks

log = logging.getLogger(__name__)

# Steps over which speeds are averaged.
SPEED_STEPS = 10
SHOWN_MESSAGES = 4
# Minimum interval between plots of the curve, which is redrawn after evaluations: plotting takes about half a second.
DRAW_SECONDS = 60.0
# Rewards that are kept for the display.
SHOWN_REWARDS = 64


# Seconds between two states of the run in `state.json`.
STATE_SECONDS = 2.0
# What an event of a published version has of its metrics.
SYNC_FIELDS = {"bytes": "sync/bytes", "pause_seconds": "sync/pause_seconds"}
# States of a server in which it answers requests.
SERVING = ("healthy", "suspect")
# The packages that decide what a run computes.
PACKAGES = (
    *("megasync", "torch", "megatron-core", "transformer-engine", "sglang", "sglang-router", "ray"),
    *("transformers", "numpy"),
)


@dataclass
class RunParts:
    """The states of a run's processes as last reported, read without asking any: it is called every two seconds."""

    servers: Callable[[], list[ProcessState]] = list
    router: Callable[[], ProcessState | None] = lambda: None
    ranks: Callable[[], list[RankState]] = list
    workers: Callable[[], list[ProcessState]] = list
    frozen_models: Callable[[], list[ProcessState]] = list
    tenants: Callable[[], list[TenantState]] = list
    # Addresses of the servers' own metrics by the server's name; asked from another thread.
    metrics_urls: Callable[[], Mapping[str, str]] = dict

    def as_now(self) -> RunParts:
        """Reports of the present, for ever."""
        servers, router, ranks = self.servers(), self.router(), self.ranks()
        workers, frozen_models, tenants = self.workers(), self.frozen_models(), self.tenants()
        states = lambda: servers, lambda: router, lambda: ranks, lambda: workers, lambda: frozen_models, lambda: tenants
        return RunParts(*states, self.metrics_urls)


class RunObserver:
    """Context manager around a run. All methods are cheap and must be called from the controller's thread."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._run_dir = Path(run_dir)
        self._clock = clock
        self._pacing = Pacing.of(config.schedule)
        # A service has no last step.
        self._total_steps = 0 if config.serve is not None else config.schedule.total_steps
        self._metrics = MetricsLog(self._run_dir, config.observe.tensorboard)
        self._sinks = Sinks(configured_sinks(config, self._run_dir, self.snapshot, lambda: self.parts.metrics_urls()))
        self._start = clock()
        self._step = 0
        self._version = 0
        # Each with its step, which ascend.
        self._rewards: deque[tuple[int, float | None]] = deque(maxlen=SHOWN_REWARDS)
        self._losses: deque[tuple[int, float]] = deque(maxlen=SHOWN_REWARDS)
        self._scores: list[tuple[int, float]] = []
        self._validation_losses: list[tuple[int, float]] = []
        # Of an evaluation that is not recorded yet.
        self._answers: Answers | None = None
        self._set_scores: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._buffer: dict[str, int] = {}
        self._activities: dict[str, tuple[str, float]] = {}
        self._events = EventLog(self._run_dir)
        # What the processes of the run report of themselves.
        self.parts = RunParts()
        self._started = time.time()
        self._status: Status = "starting"
        # Why the run ended before its last step, if it did; and whether it reached its goal all the same.
        self.stopped = ""
        self.finished = True
        self._buffer_state: BufferState | None = None
        # Whether a driver before this one died without recording its end.
        self._resumes_killed = False
        # Whether no step was trained since the last fault.
        self._step_due = False
        self._messages: deque[str] = deque(maxlen=SHOWN_MESSAGES)
        # (time, tokens trained since the first step) after each of the latest steps; excludes the start-up time.
        self._progress: deque[tuple[float, float]] = deque(maxlen=SPEED_STEPS + 1)
        self._drawn = self._start
        self._failed: set[str] = set()
        # Last, because a live view requests a snapshot as soon as it exists.
        self._display = LiveDisplay(self.snapshot, live=config.observe.live, console=console)

    def __enter__(self) -> Self:
        self._display.__enter__()
        with self._guarded("record the start"):
            self._record_start()
        with self._guarded("write the state"):
            write_state(self._run_dir, self.state())
        self._sinks.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pass_on()
        reason = self.stopped
        if isinstance(error, Exception):
            self._status, reason = "failed", f"{type(error).__name__}: {error}"
        elif error is not None:
            # Cancelled, by a second Ctrl-C or from outside.
            self._status, reason = "stopped", str(error) or type(error).__name__
        else:
            self._status = "finished" if self.finished else "stopped"
        self.stopped = reason
        self._record(END, reason, status=self._status)
        with self._guarded("write the state"):
            write_state(self._run_dir, self.state())
        with self._guarded("close the events"):
            self._events.close()
        self._display.__exit__()
        with self._guarded("close the metrics"):
            self._metrics.close()
        self._sinks.close(failed=self._status == "failed")
        self._draw()

    @asynccontextmanager
    async def writing_state(self) -> AsyncIterator[None]:
        """Keeps `state.json` up to date, in the background."""
        over = asyncio.Event()
        task = asyncio.create_task(self._write_states(over), name="state of the run")
        try:
            yield
        finally:
            # Not cancelled: a write that goes on in its thread would replace the last state.
            over.set()
            await asyncio.wait([task], timeout=STATE_SECONDS)

    async def _write_states(self, over: asyncio.Event) -> None:
        while not await set_within(over, STATE_SECONDS):
            with self._guarded("write the state"):
                # In a thread: the folder may be on a slow file system.
                await asyncio.to_thread(write_state, self._run_dir, self.state())

    def show(self, parts: RunParts) -> None:
        """Reports the states of these parts from now on."""
        self.parts = parts

    # Reports from the controller

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wraps the loops of the run, between the start and the shutdown of its parts.

        Afterwards the state shows the parts as they were at the end of the loops.
        """
        self._status = "running"
        if self._resumes_killed:
            self._resumes_killed = False
            self.recovery("driver", "another driver resumed the run")
        try:
            yield
        finally:
            with self._guarded("keep the state"):
                self.parts = self.parts.as_now()

    def fault(self, what: str, text: str, **fields: Any) -> None:
        """Records that a part of the run died, hung or failed; see `observe.events`."""
        self._step_due = True
        self._record(FAULT, text, what, **{"step": self._step} | fields)

    def recovery(self, what: str, text: str, **fields: Any) -> None:
        """Records that it works again."""
        self._record(RECOVERY, text, what, **{"step": self._step} | fields)

    def checkpoint(self, step: int, path: Path) -> None:
        """Records a complete checkpoint."""
        self._show(f"checkpoint: {path}")
        self._record(CHECKPOINT, str(path), step=step)

    def published(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Records that the weights of a step are on the servers."""
        self._version = max(self._version, version)
        sizes: dict[str, Any] = {name: metrics[key] for name, key in SYNC_FIELDS.items() if key in metrics}
        self._record(SYNC, f"version {version} is published", step=step, version=version, **sizes)

    def step(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Records a trained step; `metrics` has the keys of `observe.names`."""
        self._step, self._version = step, version
        if self._step_due:
            self._step_due = False
            self.recovery(TRAINING, f"step {step} is trained")
        self._rewards.append((step, metrics.get(names.REWARD)))
        if (loss := metrics.get(names.TRAINING_LOSS)) is not None:
            self._losses.append((step, loss))
        self._latest.update(metrics)
        prefix = names.BUFFER_PREFIX
        if states := {key.removeprefix(prefix): count for key, count in metrics.items() if key.startswith(prefix)}:
            self._buffer = {state: int(count) for state, count in states.items()}
        trained = self._progress[-1][1] + metrics.get(names.TRAINED_TOKENS, 0.0) if self._progress else 0.0
        self._progress.append((self._clock(), trained))
        rate = _rate(self._progress)
        measured = {} if rate is None else {names.TRAINED_RATE: rate}
        self._log(step, {"version": version, **metrics, **measured})
        self._display.step()

    def evaluation(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the weights of `version` on held-out prompts; `step` may lie in the past."""
        if (kept := self._answers) is not None and (kept.step, kept.version) == (step, version):
            self._answers = None
            with self._guarded("write sample answers"):
                append_answers(self._run_dir, step, version, kept.answers)
            self._sinks.answers(kept)
        self._step, self._version = max(self._step, step), max(self._version, version)
        self._scores.append((step, metrics[names.SCORE]))
        self._log(step, dict(metrics), evaluation=True)
        self._set_scores = {
            match[1]: value for key, value in metrics.items() if (match := names.SET_SCORE.fullmatch(key))
        }
        sets = "".join(f", {name} {score:.3f}" for name, score in self._set_scores.items())
        text = f"held-out score {metrics[names.SCORE]:.3f}{sets} after step {step} (version {version})"
        self._show(text)
        self._record(EVALUATION, text, step=step, version=version, score=metrics[names.SCORE])
        if self._clock() - self._drawn >= DRAW_SECONDS:
            self._draw()

    def validation(self, step: int, loss: float) -> None:
        """Records the loss of the held-out rows of a supervised run."""
        self._validation_losses.append((step, loss))
        self._log(step, {names.VALIDATION_LOSS: loss}, evaluation=True)
        text = f"validation loss {loss:.4f} after step {step}"
        self._show(text)
        self._record(EVALUATION, text, step=step, loss=loss)

    def tenants(self) -> None:
        """Records what the tenants of a service have done: a line of metrics at the number of all their steps."""
        tenants = self.parts.tenants()
        self._step = max(self._step, sum(tenant.steps for tenant in tenants))
        values: dict[str, float] = {}
        for tenant in tenants:
            prefix = f"{names.TENANT_PREFIX}{tenant.name}"
            values |= {
                f"{prefix}/models": len(tenant.models),
                f"{prefix}/steps": tenant.steps,
                f"{prefix}/tokens": tenant.tokens,
                f"{prefix}/tokens_per_second": tenant.rate,
                f"{prefix}/waiting": tenant.promises,
                f"{prefix}/waiting_tokens": tenant.tokens_in_flight,
                f"{prefix}/waited": tenant.waited,
                f"{prefix}/samplers": tenant.samplers,
                f"{prefix}/checkpoints": tenant.checkpoints,
                f"{prefix}/disk": tenant.disk_bytes,
            }
            losses = {f"{prefix}/loss": model.loss for model in tenant.models[:1] if model.loss is not None}
            values |= losses
        self._log(self._step, values)

    def rewind(self, step: int) -> None:
        """Training resumes from an earlier step: discards what was measured after it."""
        self._step = step
        for measured in (self._rewards, self._losses, self._scores, self._validation_losses):
            while measured and measured[-1][0] > step:
                measured.pop()
        self._progress.clear()
        with self._guarded("rewrite metrics"):
            self._metrics.close()

    def answers(self, step: int, version: int, answers: Iterable[tuple[str, str, float | None]]) -> None:
        """Keeps the first `observe.samples` of these held-out (prompt, text, reward) triples.

        They are recorded once the `evaluation` that they belong to is: it may turn out to have no score.
        """
        kept = list(answers)[: self._config.observe.samples]
        self._answers = Answers(step, version, kept) if kept else None

    def buffer(self, counts: Mapping[str, Any], waiting: Mapping[str, str]) -> None:
        """Records the buffer's counts (`buffer.state.BufferCounts`), and which of its calls wait for what."""
        self._buffer = dict(counts["slots"])
        self._buffer_state = BufferState(
            slots=self._buffer,
            capacity=counts["capacity"],
            admitted=counts["admitted"],
            trained=counts["trained"],
            dropped=dict(counts["dropped"]),
            live=counts["live"],
            waiting=dict(waiting),
        )
        self._pass_on()

    def activity(self, part: str, doing: str) -> None:
        """Records what a component is doing from now on; the display shows for how long."""
        if self._activities.get(part, ("", 0.0))[0] != doing:
            self._activities[part] = (doing, self._clock())

    def message(self, text: str) -> None:
        """Logs, displays and records a message."""
        self._show(text)
        self._record(MESSAGE, text)

    def _show(self, text: str) -> None:
        log.info("%s", text)
        self._messages.append(text)
        self._display.message(text)

    def snapshot(self) -> RunSnapshot:
        """The current state of the run, for the display and, in threads of its own, for Prometheus."""
        now, config = self._clock(), self._config
        # Copies, each made at once: the run goes on meanwhile.
        progress, activities = [*self._progress], [*self._activities.items()]
        steps = len(progress) - 1
        return RunSnapshot(
            name=config.name,
            run_dir=self._run_dir,
            step=self._step,
            total_steps=self._total_steps,
            version=self._version,
            seconds=now - self._start,
            step_seconds=(progress[-1][0] - progress[0][0]) / steps if steps > 0 else None,
            rewards=tuple(reward for _, reward in [*self._rewards]),
            scores=tuple(self._scores),
            losses=tuple(loss for _, loss in [*self._losses]),
            validation_losses=tuple(self._validation_losses),
            set_scores=dict(self._set_scores),
            target=config.schedule.stop_at_score,
            trained_rate=_rate(progress),
            sampled_rate=self._latest.get(names.SAMPLED_RATE),
            staleness_mean=self._latest.get(names.STALENESS_MEAN),
            staleness_max=self._latest.get(names.STALENESS_MAX),
            staleness_limit=self._pacing.staleness_bound,
            buffer=dict(self._buffer),
            capacity=self._pacing.capacity,
            activities=tuple(Activity(part, doing, now - since) for part, (doing, since) in activities),
            messages=tuple(self._messages),
            tenants=tuple(self.parts.tenants()) if config.serve is not None else None,
        )

    def state(self) -> RunState:
        """The current state of the run, for `state.json`."""
        now, clock, parts = time.time(), self._clock(), self.parts
        return RunState(
            time=now,
            pid=os.getpid(),
            host=socket.gethostname(),
            started=self._started,
            status=self._status,
            reason=self.stopped,
            step=self._step,
            total_steps=self._total_steps,
            version=self._version,
            activities={part: (doing, now - (clock - since)) for part, (doing, since) in self._activities.items()},
            servers=[self._serving(server) for server in parts.servers()],
            router=parts.router(),
            ranks=parts.ranks(),
            workers=parts.workers(),
            frozen_models=parts.frozen_models(),
            buffer=self._buffer_state,
            tenants=parts.tenants(),
            eta_seconds=self.snapshot().eta_seconds,
        )

    def _serving(self, server: ProcessState) -> ProcessState:
        """A server that serves holds the published version."""
        if server.version is not None or server.state not in SERVING:
            return server
        return structs.replace(server, version=self._version)

    def _record_start(self) -> None:
        events, last = read_events(self._run_dir), read_state(self._run_dir)
        recorded = [event for event in events if event.kind in (START, END)]
        if recorded and recorded[-1].kind == START:
            # The driver before this one has recorded no end.
            self._resumes_killed = True
            alive = max([event.time for event in events] + ([last.time] if last else []))
            driver = f"process {last.pid} on {last.host}" if last else "its process"
            step = last.step if last else 0
            text = f"the driver ({driver}) was killed or lost its machine: it has recorded no end"
            self._events.write(FAULT, text, "driver", at=alive, step=step)
            self._step_due = True
        who = {"pid": os.getpid(), "host": socket.gethostname(), "versions": _package_versions()}
        self._events.write(START, self._config.name, **who)

    def _record(self, kind: str, text: str, what: str = "", **fields: Any) -> None:
        with self._guarded("write events"):
            self._events.write(kind, text, what, **fields)

    def _log(self, step: int, metrics: Mapping[str, float], evaluation: bool = False) -> None:
        with self._guarded("write metrics"):
            self._metrics.log(step, metrics)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._sinks.log(StepMetrics(step, time.time(), finite, evaluation))
        self._pass_on()

    def _pass_on(self) -> None:
        """Shows what sinks have said, each in its own thread."""
        for text in self._sinks.messages():
            self.message(text)

    def _draw(self) -> None:
        self._drawn = self._clock()
        with self._guarded("draw the learning curve"):
            plot_curve(self._run_dir, self._config.name)

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # observing must not end training; reported once, with its cause
            if what not in self._failed:
                self._failed.add(what)
                # An OSError, such as a full disk, needs no traceback; anything else is a bug.
                trace = not isinstance(error, OSError)
                log.warning(
                    "could not %s in %s: %s: %s", what, self._run_dir, type(error).__name__, error, exc_info=trace
                )


def _rate(progress: Sequence[tuple[float, float]]) -> float | None:
    """Trained tokens per second over the latest steps, (time, tokens so far) of each; None until there are two."""
    if not progress:
        return None
    (start, before), (end, after) = progress[0], progress[-1]
    return (after - before) / (end - start) if end > start else None


def _package_versions() -> dict[str, str]:
    """Python's version and those of the packages that are installed, as the driver has them."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
