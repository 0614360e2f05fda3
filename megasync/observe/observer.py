"""The observer of a run: turns the controller's reports into metrics files, display snapshots and the learning curve.

It never makes a run fail: a failed write is reported once as a warning, and training continues.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console

from megasync.config import Config
from megasync.config.pacing import Pacing
from megasync.observe import names
from megasync.observe.curve import plot_curve
from megasync.observe.display import Activity, LiveDisplay, RunSnapshot
from megasync.observe.metrics import MetricsLog
from megasync.observe.samples import append_answers

log = logging.getLogger(__name__)

# Steps over which speeds are averaged.
SPEED_STEPS = 10
SHOWN_MESSAGES = 4
# Minimum interval between plots of the curve, which is redrawn after evaluations: plotting takes about half a second.
DRAW_SECONDS = 60.0
# Rewards that are kept for the display.
SHOWN_REWARDS = 64


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
        self._metrics = MetricsLog(self._run_dir, config.observe.tensorboard)
        self._start = clock()
        self._step = 0
        self._version = 0
        self._rewards: deque[float | None] = deque(maxlen=SHOWN_REWARDS)
        self._scores: list[tuple[int, float]] = []
        self._losses: deque[float] = deque(maxlen=SHOWN_REWARDS)
        self._validation_losses: list[tuple[int, float]] = []
        self._set_scores: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._buffer: dict[str, int] = {}
        self._activities: dict[str, tuple[str, float]] = {}
        self._messages: deque[str] = deque(maxlen=SHOWN_MESSAGES)
        # (time, tokens trained since the first step) after each of the latest steps; excludes the start-up time.
        self._progress: deque[tuple[float, float]] = deque(maxlen=SPEED_STEPS + 1)
        self._drawn = self._start
        self._failed: set[str] = set()
        # Last, because a live view requests a snapshot as soon as it exists.
        self._display = LiveDisplay(self.snapshot, live=config.observe.live, console=console)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.__exit__()
        with self._guarded("close the metrics"):
            self._metrics.close()
        self._draw()

    # Reports from the controller

    def step(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Records a trained step; `metrics` has the keys of `observe.names`."""
        self._step, self._version = step, version
        self._rewards.append(metrics.get(names.REWARD))
        if (loss := metrics.get(names.TRAINING_LOSS)) is not None:
            self._losses.append(loss)
        self._latest.update(metrics)
        prefix = names.BUFFER_PREFIX
        if states := {key.removeprefix(prefix): count for key, count in metrics.items() if key.startswith(prefix)}:
            self.buffer(states)
        trained = self._progress[-1][1] + metrics.get(names.TRAINED_TOKENS, 0.0) if self._progress else 0.0
        self._progress.append((self._clock(), trained))
        rate = self._trained_rate()
        measured = {} if rate is None else {names.TRAINED_RATE: rate}
        self._log(step, {"version": version, **metrics, **measured})
        self._display.step()

    def evaluation(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the weights of `version` on held-out prompts; `step` may lie in the past."""
        self._step, self._version = max(self._step, step), max(self._version, version)
        self._scores.append((step, metrics[names.SCORE]))
        self._log(step, dict(metrics))
        self._set_scores = {
            match[1]: value for key, value in metrics.items() if (match := names.SET_SCORE.fullmatch(key))
        }
        sets = "".join(f", {name} {score:.3f}" for name, score in self._set_scores.items())
        self.message(f"held-out score {metrics[names.SCORE]:.3f}{sets} after step {step} (version {version})")
        if self._clock() - self._drawn >= DRAW_SECONDS:
            self._draw()

    def validation(self, step: int, loss: float) -> None:
        """Records the loss of the held-out rows of a supervised run."""
        self._validation_losses.append((step, loss))
        self._log(step, {names.VALIDATION_LOSS: loss})
        self.message(f"validation loss {loss:.4f} after step {step}")

    def rewind(self, step: int) -> None:
        """Training resumes from an earlier step: discards what was measured after it."""
        repeated = self._step - step
        self._step = step
        for _ in range(min(repeated, len(self._rewards))):
            self._rewards.pop()
        for _ in range(min(repeated, len(self._losses))):
            self._losses.pop()
        self._validation_losses = [(at, loss) for at, loss in self._validation_losses if at <= step]
        self._scores = [(at, score) for at, score in self._scores if at <= step]
        self._progress.clear()
        with self._guarded("rewrite metrics"):
            self._metrics.close()

    def answers(self, step: int, version: int, answers: Iterable[tuple[str, str, float | None]]) -> None:
        """Records the first `observe.samples` of these held-out (prompt, text, reward) triples."""
        kept = list(answers)[: self._config.observe.samples]
        if kept:
            with self._guarded("write sample answers"):
                append_answers(self._run_dir, step, version, kept)

    def buffer(self, counts: Mapping[str, float]) -> None:
        """Records the number of active groups by state."""
        self._buffer = {state: int(count) for state, count in counts.items()}

    def activity(self, part: str, doing: str) -> None:
        """Records what a component is doing from now on; the display shows for how long."""
        if self._activities.get(part, ("", 0.0))[0] != doing:
            self._activities[part] = (doing, self._clock())

    def message(self, text: str) -> None:
        """Logs and displays a message."""
        log.info("%s", text)
        self._messages.append(text)
        self._display.message(text)

    def snapshot(self) -> RunSnapshot:
        """The current state of the run, for the display."""
        now, config = self._clock(), self._config
        steps = len(self._progress) - 1
        return RunSnapshot(
            name=config.name,
            run_dir=self._run_dir,
            step=self._step,
            total_steps=config.schedule.total_steps,
            version=self._version,
            seconds=now - self._start,
            step_seconds=(self._progress[-1][0] - self._progress[0][0]) / steps if steps > 0 else None,
            rewards=tuple(self._rewards),
            scores=tuple(self._scores),
            losses=tuple(self._losses),
            validation_losses=tuple(self._validation_losses),
            set_scores=dict(self._set_scores),
            target=config.schedule.stop_at_score,
            trained_rate=self._trained_rate(),
            sampled_rate=self._latest.get(names.SAMPLED_RATE),
            staleness_mean=self._latest.get(names.STALENESS_MEAN),
            staleness_max=self._latest.get(names.STALENESS_MAX),
            staleness_limit=self._pacing.staleness_bound,
            buffer=dict(self._buffer),
            capacity=self._pacing.capacity,
            activities=tuple(Activity(part, doing, now - since) for part, (doing, since) in self._activities.items()),
            messages=tuple(self._messages),
        )

    def _trained_rate(self) -> float | None:
        """Trained tokens per second over the latest steps; None until there are two."""
        if not self._progress:
            return None
        (start, before), (end, after) = self._progress[0], self._progress[-1]
        return (after - before) / (end - start) if end > start else None

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guarded("write metrics"):
            self._metrics.log(step, metrics)

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
