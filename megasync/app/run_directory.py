"""What every kind of run does with its directory and its signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megasync.app.mailbox import Mailbox
from megasync.app.resume_file import is_resumable
from megasync.app.run_lock import RunLock
from megasync.base.files import atomic_write
from megasync.cluster.fleet import Fleet
from megasync.concurrency.event_loop import handle_signals
from megasync.concurrency.foreign import explain
from megasync.concurrency.threads import DaemonThreads
from megasync.config import CONFIG_FILE, CUSTOM_FILE, Config, load_config, remember, save_config
from megasync.config.commands import is_supervised
from megasync.errors import ConfigError, TrainingError
from megasync.layout.shards import export_checkpoint
from megasync.observe import stacks, trace
from megasync.observe.curve import points
from megasync.observe.hang import HangReporter
from megasync.observe.logfile import log_to_file
from megasync.observe.metrics import STEP, read_metrics
from megasync.observe.names import SCORE, VALIDATION_LOSS
from megasync.observe.observer import RunObserver
from megasync.observe.result import RunResult, resume_command
from megasync.observe.stacks import describe_tasks
from megasync.observe.state_file import read_state
from megasync.trainer.checkpoint import latest

T = TypeVar("T")

log = logging.getLogger(__name__)

# Said of a run that is resumed after it has reached its goal.
ALREADY_FINISHED = "finished before, so nothing was started; a larger schedule.total_steps or sft.epochs trains further"
# The model at the end, below the run directory.
EXPORT_FOLDER = "export"
# Models of earlier steps.
EXPORTS_FOLDER = "exports"
# Runs exports, which may take minutes: a process that is told to end immediately does not wait for these threads. What
# they leave unfinished, the next export removes.
EXPORTS = DaemonThreads(limit=1)


def new_run_dir(config: Config, custom: Mapping[str, str] | None = None) -> Path:
    """Creates a run directory with its configuration. `custom` names and describes what the run got from Python.

    Raises ConfigError if it cannot be written.
    """
    stem = Path(config.run_root) / f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(100):
        run_dir = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt}")
        try:
            run_dir.mkdir(parents=True)
            # Before the configuration, which makes the folder a run directory: a run directory has both.
            atomic_write(run_dir / CUSTOM_FILE, json.dumps(custom or {}))
            save_config(config, run_dir / CONFIG_FILE)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run_root={config.run_root!r} cannot be written: {error}") from error
        return run_dir
    raise ConfigError(f"cannot create a run directory: {stem} and 99 names like it exist")


def finished_run(run_dir: Path, config: Config) -> RunResult | None:
    """The result of a run that has reached its goal, if `config` sets no further one; None for any other run."""
    state = read_state(run_dir)
    if state is None or state.status != "finished":
        return None
    configs = config, load_config(run_dir / CONFIG_FILE)
    if len({(of.schedule.total_steps, of.schedule.stop_at_score, of.sft.epochs) for of in configs}) > 1:
        return None
    metrics, out = read_metrics(run_dir), run_dir / EXPORT_FOLDER
    scores, losses = (
        [(int(step), value) for step, value in points(metrics, STEP, name)] if metrics else []
        for name in (SCORE, VALIDATION_LOSS)
    )
    return RunResult(
        run_dir=run_dir,
        step=state.step,
        version=None if is_supervised(config) else state.version,
        scores=scores,
        losses=losses,
        # The one that is there, or else written now if `checkpoint.export` asks for it.
        export_dir=out if out.exists() else export_newest(config, run_dir, log.info),
        stopped=ALREADY_FINISHED,
    )


def export_newest(config: Config, run_dir: Path, notify: Callable[[str], None]) -> Path | None:
    """Writes the newest checkpoint as a Hugging Face folder; None if there is none, or `checkpoint.export` is off."""
    newest = latest(run_dir)
    if not config.checkpoint.export or newest is None:
        return None
    out = run_dir / EXPORT_FOLDER
    notify(f"exporting {newest.name} as a Hugging Face checkpoint")
    # An older one may be there, from before the run was resumed.
    export_checkpoint(newest, Path(config.model.path), out, replace=True)
    return out


def export_step(config: Config, run_dir: Path, checkpoint: Path, notify: Callable[[str], None]) -> None:
    """Writes a checkpoint as a Hugging Face folder, beside the training. Raises CheckpointError."""
    out = run_dir / EXPORTS_FOLDER / checkpoint.name
    # An older one may be there, from before the run went back behind this step.
    export_checkpoint(checkpoint, Path(config.model.path), out, replace=True)
    notify(f"Hugging Face checkpoint: {out}")


def refuse_running_loop(call: str, instead: str) -> None:
    """Raises ConfigError inside a running event loop, where `call` would fail with an error of asyncio's own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(f"{call} was called inside a running event loop, such as a notebook's; write {instead} there")


@contextlib.contextmanager
def _hint_to_resume(run_dir: Path) -> Iterator[None]:
    """Adds to what ends the run early how it is resumed, unless it ended before it began."""
    try:
        yield
    except BaseException as error:
        # Some errors say it in their own text.
        if "megasync resume" not in str(error) and is_resumable(run_dir):
            error.add_note(f"to resume: {resume_command(run_dir)}")
        raise


# Seconds beside `timeouts.shutdown` until a process that was interrupted twice ends at the latest.
LAST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """The files that a run writes in its directory, and the requests to it."""

    observer: RunObserver
    reports: HangReporter
    mailbox: Mailbox


class AnyRun(ABC):
    """A run of any kind, in `run_dir`."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self._opened: OpenedRun | None = None

    @abstractmethod
    def request_stop(self, reason: str) -> bool:
        """Requests a clean end. Returns False while the run is still starting: then it can only be cancelled."""

    @abstractmethod
    async def describe(self) -> str:
        """How far the run is, and what its parts wait for."""

    async def dump(self) -> None:
        """Logs what each part of the run waits for, and writes a hang report."""
        description = f"{await self.describe()}\n{describe_tasks()}"
        log.warning("State of the run, requested by a signal:\n%s", description)
        if self._opened is not None:
            await self._opened.reports.report("requested by SIGUSR1")

    async def scale(self, fleet: Fleet, servers: int) -> str:
        """Changes the number of servers, also for a later resume of the run."""
        done = await fleet.scaling.resize(servers)
        try:
            remember(self.run_dir, "rollout.servers", servers)
        except OSError as error:
            return f"{done}; a resumed run will use the old number, because {CONFIG_FILE} cannot be written: {error}"
        return done

    @contextlib.contextmanager
    def _open(self, traced_processes: int) -> Iterator[OpenedRun]:
        """Takes the run directory and opens what every run has in it. Raises ConfigError if another process has it."""
        trace_bytes = trace.share_bytes(self.config.observe, traced_processes)
        with (
            RunLock(self.run_dir),
            contextlib.closing(log_to_file(self.run_dir / "logs" / "controller.log")),
            trace.recording(self.run_dir, "driver", trace_bytes),
        ):
            mailbox = Mailbox(self.run_dir)
            mailbox.open()
            with RunObserver(self.config, self.run_dir) as observer:
                reports = HangReporter(self.run_dir, observer.state, observer.message, self.describe)
                stacks.answer(asyncio.get_running_loop())
                self._opened = OpenedRun(observer, reports, mailbox)
                yield self._opened

    async def _export_newest(self, observer: RunObserver) -> Path | None:
        return await EXPORTS.call(partial(export_newest, self.config, self.run_dir, observer.message), "export")

    async def _export_step(self, observer: RunObserver, checkpoint: Path) -> None:
        await EXPORTS.call(partial(export_step, self.config, self.run_dir, checkpoint, observer.message), "export")


async def run_stoppable(main: Coroutine[Any, Any, T], run_dir: Path, config: Config, run: AnyRun | None = None) -> T:
    """Runs `main`. First Ctrl-C (or SIGTERM): finish cleanly. Second: stop immediately. SIGUSR1: log what it waits for.

    Without a `run`, which knows how to finish, the first one stops `main` too. `config` has the deadlines of what
    blocks the event loop and of the end. Raises KeyboardInterrupt for what was stopped, and TrainingError for code that
    tries to end the process, which is no end of a run. Whatever ends a run early says how it is resumed.
    """
    task = asyncio.create_task(main, name="run")
    received: list[str] = []
    dumps: set[asyncio.Task] = set()

    def on_signal(number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            dump = asyncio.create_task(_dump() if run is None else run.dump(), name="dump")
            dumps.add(dump)
            dump.add_done_callback(dumps.discard)
        elif not task.cancelling():  # another cancellation would only interrupt the cleanup
            received.append(number.name)
            if len(received) > 1 or run is None or not run.request_stop(number.name):
                task.cancel(f"{number.name}: stopping immediately")

    timeouts, numbers = config.timeouts, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    deadlines = {"patience": timeouts.no_progress, "last": timeouts.shutdown + LAST_SECONDS}
    with _hint_to_resume(run_dir), handle_signals(numbers, on_signal, **deadlines):
        try:
            return await task
        except asyncio.CancelledError:
            if not received:
                raise
            raise KeyboardInterrupt(f"stopped by {received[-1]} before the run could finish cleanly") from None
        except (SystemExit, GeneratorExit) as error:
            raise TrainingError(f"the run ended before its goal: some code raised {explain(error)}") from error


async def _dump() -> None:
    log.warning("State, requested by a signal:\n%s", describe_tasks())
