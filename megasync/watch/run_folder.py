"""Everything that one run directory holds, read again and again while the run goes on, and never changed.

Whatever is absent, half written, damaged or of another version is left out and named in `RunFolder.missing`; nothing is
guessed in its place. `refresh` reads only what was appended since the last one.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megasync.app.run_lock import FILE as LOCK_FILE
from megasync.app.run_lock import is_held
from megasync.base.files import open_regular
from megasync.buffer.groups import LIVE, RENAMED_REASONS, TRAINED, GroupState
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.config import CONFIG_FILE, CUSTOM_FILE, ROWS_FILE, SERVICE_FOLDER
from megasync.config.pacing import Pacing
from megasync.errors import ConfigError
from megasync.observe import names
from megasync.observe.events import EVENTS_FILE, START, Event
from megasync.observe.metrics import METRICS_FILE
from megasync.observe.rollouts import FOLDER as ROLLOUTS_FOLDER
from megasync.observe.samples import SAMPLES_FILE, SampleAnswer
from megasync.observe.state_file import ALIVE, OLD_SECONDS, STATE_FILE, RunState, read_state
from megasync.watch.configuration import read_settings
from megasync.watch.event_reader import EventReader
from megasync.watch.faults import Fault, faults
from megasync.watch.growing_file import GrowingFile
from megasync.watch.metric_table import Floats, Integers, MetricTable, Series
from megasync.watch.recorded import RolloutIndex

LOG_FILE = Path("logs", "controller.log")
# The end of the log that tells how a run of an older version ended.
LOG_TAIL_BYTES = 65536
LOG_OF_FAILURE = b"Run failed"
# A ledger above this size is not copied to count its groups, and counting them takes no more seconds; the metrics have
# the counts too.
LARGEST_LEDGER_BYTES = 1 << 30
COUNT_SECONDS = 5.0
STARTING, RUNNING, FINISHED, STOPPED, FAILED, CRASHED = (
    "starting", "running", "finished", "stopped", "failed", "crashed",
)  # fmt: skip
ACTIVE = (STARTING, RUNNING)


_answer = msgspec.json.Decoder(SampleAnswer)
_custom = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Balance:
    """Where the admitted prompts are: `admitted == trained + dropped + live`, unless something was lost."""

    admitted: int
    trained: int
    live: int
    # By reason.
    dropped: dict[str, int] = field(default_factory=dict)
    # The file that the counts are from.
    source: str = LEDGER_FILE

    @property
    def lost(self) -> int:
        """Prompts that are neither trained nor dropped nor live; anything but 0 is a bug."""
        return self.admitted - self.trained - self.live - sum(self.dropped.values())


class RunFolder:
    """A run of any kind and in any state. `clock` gives seconds since the epoch.

    Reading never raises for what lies in the directory. Call `refresh` from one thread at a time.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.name = self.path.resolve().name
        self.metrics = MetricTable()
        # Answers to the same held-out prompts, and what happened: both in the order of their files.
        self.answers: list[SampleAnswer] = []
        self.events: list[Event] = []
        # The last state that the driver wrote; None for a run without one.
        self.state: RunState | None = None
        # When it was first read, and whether it has been seen to change.
        self._state_seen = 0.0
        self._state_changes = False
        # Whether a driver holds the run's lock; None if the lock cannot be read.
        self.driven: bool | None = None
        self._clock = clock
        self._metrics_file = GrowingFile(self.path / METRICS_FILE)
        self._answers_file = GrowingFile(self.path / SAMPLES_FILE)
        self._events_file = EventReader(self.path)
        self._rollouts: RolloutIndex | None = None
        self._problems: dict[str, str] = {}
        self._damaged_answers = 0
        self._balance: tuple[Any, Balance | None] = (None, None)
        self._config_version: Any = None
        self.settings: dict[str, Any] = {}
        self.refresh()

    # Reading

    def refresh(self) -> bool:
        """Reads what is new. Returns whether anything but the recorded responses changed."""
        before = self._seen()
        self._read_lock()
        self._read_state()
        self._read_settings()
        restarted = self._read_metrics()
        self._read_answers()
        self._read_events()
        if self._rollouts is not None:
            self._rollouts.update()
        return restarted or before != self._seen()

    def _seen(self) -> tuple[object, ...]:
        return len(self.metrics), len(self.answers), len(self.events), self.driven, self.state

    @property
    def missing(self) -> list[str]:
        """Sentences that say what cannot be shown, and why."""
        problems = dict(self._problems)
        if not self.path.is_dir():
            return [f"{self.path} does not exist or is not a folder."]
        active = self.status in ACTIVE
        if METRICS_FILE not in problems and not len(self.metrics) and not active:
            problems[METRICS_FILE] = f"There is no {METRICS_FILE}."
        if damaged := self.metrics.damaged + self._metrics_file.left_out:
            problems["damaged"] = f"{_lines(damaged)} of {METRICS_FILE} left out: not JSON with step and time."
        for file in (self._metrics_file, self._answers_file):
            if file.full:
                problems[f"full {file.path.name}"] = f"{file.path.name} is too long: only its beginning is shown."
        if not active and self._metrics_file.torn():
            problems["torn"] = f"The last line of {METRICS_FILE} is torn and left out."
        if damaged := self._damaged_answers + self._answers_file.left_out:
            problems["answers"] = f"{_lines(damaged)} of {SAMPLES_FILE} left out: not a sample response."
        if self._events_file.damaged:
            problems["events"] = f"{_lines(self._events_file.damaged)} of {EVENTS_FILE} left out: not an event."
        if self._rollouts is not None and self._rollouts.damaged:
            problems["rollouts"] = f"{_lines(self._rollouts.damaged)} of {ROLLOUTS_FOLDER}/ left out: not a response."
        return list(problems.values())

    @contextmanager
    def _reading(self, name: str, then: str = "") -> Iterator[None]:
        """Names a file that cannot be read, and what follows from that, among what is missing."""
        try:
            yield
        except FileNotFoundError:
            self._problems[name] = f"There is no {name}{then}."
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
            self._problems[name] = f"{name} cannot be read: {reason}{then}."
        else:
            self._problems.pop(name, None)

    def _read_lock(self) -> None:
        self.driven = None
        with self._reading(LOCK_FILE, ", so whether the run is alive is unknown"):
            self.driven = is_held(self.path)

    def _read_settings(self) -> None:
        path = self.path / CONFIG_FILE
        with self._reading(CONFIG_FILE, ": the staleness bound and settings are unknown"):
            if (version := _version(path)) != self._config_version:
                self.settings, self._config_version = read_settings(path), version

    def _read_metrics(self) -> bool:
        restarted = False
        with self._reading(METRICS_FILE):
            restarted, pieces = self._metrics_file.read()
            if restarted:
                self.metrics = MetricTable()
            for lines in pieces:
                self.metrics.add(lines)
        return restarted

    def _read_answers(self) -> None:
        with self._reading(SAMPLES_FILE):
            restarted, pieces = self._answers_file.read()
            if restarted:
                self.answers, self._damaged_answers = [], 0
            for line in chain.from_iterable(pieces):
                try:
                    self.answers.append(_answer.decode(line))
                except (ValueError, RecursionError):
                    self._damaged_answers += 1

    def _read_state(self) -> None:
        before, self.state = self.state, read_state(self.path)
        if before is None or self.state is None or before.time != self.state.time:
            self._state_changes = before is not None
            self._state_seen = self._clock()
        with self._reading(STATE_FILE):
            if self.state is None and (self.path / STATE_FILE).exists():
                raise ValueError("it is damaged or of another version")

    def _read_events(self) -> None:
        with self._reading(EVENTS_FILE):
            self.events += self._events_file.update()

    @property
    def rollouts(self) -> RolloutIndex:
        """The recorded responses; read at the first access, then by every `refresh`."""
        if self._rollouts is None:
            self._rollouts = RolloutIndex(self.path)
            self._rollouts.update()
        return self._rollouts

    # What was run

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that its latest driver ran with; empty for a run that did not record them."""
        for event in reversed(self.events):
            versions = event.fields.get("versions")
            if event.kind == START and isinstance(versions, dict):
                return {str(package): str(version) for package, version in versions.items()}
        return {}

    @property
    def custom(self) -> dict[str, str]:
        """Descriptions of what the run got from Python instead of its configuration, by the names of the arguments."""
        try:
            with open_regular(self.path / CUSTOM_FILE) as file:
                return _custom.decode(file.read(LOG_TAIL_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}

    @property
    def supervised(self) -> bool:
        return (self.path / ROWS_FILE).is_file() or names.TRAINING_LOSS in self.metrics.names

    @property
    def served(self) -> bool:
        """Whether it is a training service (`megasync serve`)."""
        return (self.path / SERVICE_FOLDER).is_dir()

    @property
    def buffered(self) -> bool:
        """Whether it is reinforcement learning: trajectories in a buffer, with a ledger of their prompts."""
        return not (self.supervised or self.served)

    @property
    def pacing(self) -> Pacing | None:
        """Capacity of the buffer and staleness bound; None if the configuration is not known."""
        if not self.buffered or not any(key.startswith("schedule.") for key in self.settings):
            return None
        setting = self.settings.get
        try:
            return Pacing(
                int(setting("schedule.groups_per_step", 0)),
                int(setting("schedule.max_staleness", 0)),
                int(setting("schedule.weight_sync_steps", 1)),
                setting("schedule.window_fraction"),
            )
        except (TypeError, ValueError, ArithmeticError):
            return None

    @property
    def total_steps(self) -> int | None:
        if self.state is not None and self.state.total_steps:
            return self.state.total_steps
        total = None if self.served else self.settings.get("schedule.total_steps")
        return total if isinstance(total, int) else None

    # How far it came

    @property
    def status(self) -> str:
        """starting, running, finished, stopped, failed or crashed (its driver is gone and did not say why)."""
        state = self.state
        if self.driven or (self.driven is None and self._fresh):
            if state is not None and state.status in ALIVE:
                return state.status
            return RUNNING if len(self.metrics) else STARTING
        if state is None:
            return self._ending_without_state
        return CRASHED if state.status in ALIVE else state.status

    @property
    def reason(self) -> str:
        """Why the run stopped or failed; empty if it did not, or if that is not known."""
        return self.state.reason if self.state is not None and self.status not in (*ACTIVE, CRASHED) else ""

    @property
    def silent_seconds(self) -> float | None:
        """Since the driver last wrote its state, if that is too long for a run whose driver lives: it hangs."""
        if not self.driven or self.state is None:
            return None
        silent = self._clock() - (self._state_seen if self._of_another_clock else self.state.time)
        return silent if silent > OLD_SECONDS else None

    @property
    def _of_another_clock(self) -> bool:
        """Whether another machine wrote the state: its clock may be wrong, so it counts when a state is new here."""
        return self.state is not None and self.state.host not in ("", socket.gethostname())

    @property
    def _fresh(self) -> bool:
        if self.state is None:
            return False
        if self._of_another_clock and self._state_changes:
            return self._clock() - self._state_seen <= OLD_SECONDS
        return self._clock() - self.state.time <= OLD_SECONDS

    @property
    def _ending_without_state(self) -> str:
        """How a run of an earlier version ended, from what it left."""
        if LOG_OF_FAILURE in self._log_of_last_start():
            return FAILED
        target = self.settings.get("schedule.stop_at_score")
        score = self.metrics.latest(names.SCORE)
        reached = isinstance(target, (int, float)) and score is not None and score >= target
        if (self.total_steps is not None and self.step >= self.total_steps) or reached:
            return FINISHED
        saved = self.path / "checkpoints" / f"step-{self.step:08d}" / "COMPLETE"
        return STOPPED if self.step and saved.is_file() else CRASHED

    @property
    def faults(self) -> list[Fault]:
        """Everything that died, hung or failed, by time."""
        return faults(self.events, sorted(self.series("version").times.tolist()))

    @property
    def step(self) -> int:
        """The latest trained step; of a service, the number of all optimizer steps."""
        if self.served:
            return self.state.step if self.state is not None else 0
        for name in ("time/step", names.TRAINING_LOSS, "version"):
            if len(steps := self.metrics.series(name).steps):
                return int(steps[-1])
        return 0

    @property
    def version(self) -> int:
        """The latest published version."""
        return int(self.metrics.latest("version") or 0)

    @property
    def start(self) -> float | None:
        """Seconds since the epoch of the first measurement, or of its first step's beginning if that is earlier."""
        times = self.metrics.times
        if not len(times):
            return None
        first = self.metrics.series("time/step")
        begun = first.times[0] - first.values[0] if len(first) and np.isfinite(first.values[0]) else times[0]
        return float(min(times.min(), begun))

    @property
    def end(self) -> float | None:
        """Seconds since the epoch of the last sign of life; now, while the run is active."""
        if self.status in ACTIVE:
            return self._clock()
        times = [*self.metrics.times[-1:], *(event.time for event in self.events)]
        if self.state is not None:
            times.append(self.state.time)
        return float(max(times)) if times else None

    @property
    def seconds(self) -> float | None:
        """From the start of the first driver to `end`, without the times in which no driver lived."""
        if self.end is None:
            return None
        if self.start is None:
            # Nothing is measured yet.
            begun = [event.time for event in self.events if event.kind == START]
            return max(0.0, self.end - min(begun)) if begun else None
        starting = self.start - min([self.start, *(event.time for event in self.events if event.kind == START)])
        return max(0.0, starting + float(self.elapsed(np.array([self.end]))[0]))

    # Measurements

    def series(self, name: str) -> Series:
        """A metric by step; empty if it was never logged."""
        return self.metrics.series(name)

    def values(self, name: str) -> Floats:
        """The finite values of a metric, by step: [values]."""
        return self.series(name).finite.values

    def statistic(self, name: str, of: Callable[[Floats], Any]) -> float | None:
        """Such as the median of the finite values of a metric; None if there are none."""
        values = self.values(name)
        return float(of(values)) if len(values) else None

    def under(self, prefix: str) -> list[str]:
        """Names of metrics that begin with `prefix`, in the order of their numbers and letters."""
        return sorted((name for name in self.metrics.names if name.startswith(prefix)), key=_natural)

    @property
    def scores(self) -> dict[str, Series]:
        """Held-out scores by metric, such as eval/score@0 and eval/<set>/score@0."""
        scores = {}
        for name in self.under("eval/"):
            if name.startswith(names.HELD_OUT_PREFIX) or names.SET_SCORE_AT.fullmatch(name):
                scores[name] = self.series(name)
        return scores

    def trained_tokens(self, steps: Integers) -> Floats:
        """Tokens trained up to and with each of these steps: [steps]."""
        tokens = self.series(names.TRAINED_TOKENS).finite
        sums = np.concatenate([[0.0], np.cumsum(tokens.values)])
        return sums[np.searchsorted(tokens.steps, steps, side="right")]

    def elapsed(self, times: Floats) -> Floats:
        """Seconds from the start of the run to each of these times, without those in which no driver lived: [times]."""
        begin = self.start or 0.0
        passed = times - begin
        for stopped, resumed in self._pauses():
            if resumed > begin:
                passed = passed - np.clip(times - max(stopped, begin), 0.0, resumed - max(stopped, begin))
        return passed

    def _pauses(self) -> list[tuple[float, float]]:
        """From the last sign of life of each driver to the start of the next one."""
        starts = sorted(event.time for event in self.events if event.kind == START)[1:]
        signs = np.sort(np.concatenate([self.metrics.times, [event.time for event in self.events]]))
        before = np.searchsorted(signs, starts) - 1
        return [(float(signs[at]), start) for at, start in zip(before, starts, strict=True) if at >= 0]

    @property
    def balance(self) -> Balance | None:
        """Where the admitted prompts are; None for a run without a buffer, or if nothing tells."""
        if not self.buffered:
            return None
        return self.counted() or self._reported_balance()

    def counted(self) -> Balance | None:
        """The balance by the ledger, if no driver holds it; blocks while it is copied, after it has changed."""
        path = self.path / LEDGER_FILE
        version = (_version_or_none(path), _version_or_none(path.with_name(f"{LEDGER_FILE}-wal")))
        if self.driven or version[0] is None:
            return None
        if self._balance[0] != version:
            self._balance = (version, self._count_ledger(path))
        return self._balance[1]

    def _reported_balance(self) -> Balance | None:
        if self.state is not None and self.state.buffer is not None:
            held = self.state.buffer
            return Balance(held.admitted, held.trained, held.live, dict(held.dropped), STATE_FILE)
        counts = {name: self.metrics.latest(f"groups/{name}") for name in ("admitted", "trained", "live", "dropped")}
        if any(count is None for count in counts.values()):
            return None
        totals = {name: int(count or 0) for name, count in counts.items()}
        prefix = "rollout/dropped_"
        dropped = Counter(
            {name.removeprefix(prefix): int(self.metrics.latest(name) or 0) for name in self.under(prefix)}
        )
        # The counts by reason begin again when a run is resumed.
        if (rest := totals["dropped"] - sum(dropped.values())) > 0:
            dropped["reason not recorded"] = rest
        elif rest < 0:
            dropped = Counter({"any reason": totals["dropped"]})
        return Balance(totals["admitted"], totals["trained"], totals["live"], +dropped, METRICS_FILE)

    def _count_ledger(self, path: Path) -> Balance | None:
        """Counts in a copy: even reading SQLite's log would write beside it."""
        with (
            self._reading(LEDGER_FILE, ": prompts are counted from the reports of the driver"),
            tempfile.TemporaryDirectory(prefix="megasync-") as folder,
        ):
            for name in (LEDGER_FILE, f"{LEDGER_FILE}-wal"):
                source = path.with_name(name)
                if source.is_file():
                    if source.stat().st_size > LARGEST_LEDGER_BYTES:
                        raise ValueError(f"{name} is larger than 1 GiB")
                    shutil.copyfile(source, Path(folder, name))
            try:
                with closing(sqlite3.connect(Path(folder, LEDGER_FILE))) as database:
                    # What stands in the place of the table may be a view that never ends.
                    deadline = time.monotonic() + COUNT_SECONDS
                    database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
                    rows = database.execute("SELECT state, reason, count(*) FROM groups GROUP BY state, reason")
                    return _balance(rows.fetchall())
            except (TypeError, sqlite3.Error) as error:
                raise ValueError(str(error) or type(error).__name__) from None
        return None

    def _log_of_last_start(self) -> bytes:
        try:
            with open_regular(self.path / LOG_FILE) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - LOG_TAIL_BYTES))
                tail = file.read()
        except OSError:
            return b""
        return tail[max(0, tail.rfind(b"starting Ray")) :]


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory, complete or not."""
    return any((path / name).is_file() for name in (METRICS_FILE, LOCK_FILE)) or (
        (path / CONFIG_FILE).is_file() and ((path / "logs").is_dir() or (path / "custom.json").is_file())
    )


def find_runs(path: str | Path) -> list[Path]:
    """The run directory itself, or those in a folder of runs, by name.

    Raises ConfigError for a path that is no folder or cannot be listed.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            what = "is a file; name its run directory" if path.exists() else "does not exist; check the path"
            raise ConfigError(f"{path} {what}")
        if is_run(path):
            return [path]
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and is_run(entry))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from None


def _balance(rows: list[tuple[str, str, int]]) -> Balance:
    trained, live = {state.value for state in TRAINED}, {state.value for state in LIVE}
    dropped: Counter[str] = Counter()
    for state, reason, count in rows:
        if state == GroupState.DROPPED.value:
            dropped[RENAMED_REASONS.get(reason, reason)] += count
    return Balance(
        admitted=sum(count for *_, count in rows),
        trained=sum(count for state, _, count in rows if state in trained),
        live=sum(count for state, _, count in rows if state in live),
        dropped=dict(dropped),
    )


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts server_kl@10 after server_kl@9."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _version(path: Path) -> tuple[int, int, int]:
    """Differs after any change of the file. Raises OSError."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _version_or_none(path: Path) -> tuple[int, int, int] | None:
    try:
        return _version(path)
    except OSError:
        return None


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"
