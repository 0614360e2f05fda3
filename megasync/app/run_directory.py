"""What every kind of run does with its directory and its signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from megasync.concurrency.event_loop import handle_signals
from megasync.concurrency.foreign import explain
from megasync.config import CONFIG_FILE, CUSTOM_FILE, Config, save_config
from megasync.errors import ConfigError, TrainingError
from megasync.files import atomic_write
from megasync.layout.shards import export_checkpoint
from megasync.trainer.checkpoint import latest

# The model at the end, below the run directory.
EXPORT_FOLDER = "export"
# Models of earlier steps.
EXPORTS_FOLDER = "exports"


def new_run_dir(config: Config, custom: Sequence[str] = ()) -> Path:
    """Creates a run directory with its configuration. `custom` names what the run got from Python.

    Raises ConfigError if it cannot be written.
    """
    stem = Path(config.run_root) / f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(100):
        run_dir = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt}")
        try:
            run_dir.mkdir(parents=True)
            # Before the configuration, which makes the folder a run directory: a run directory has both.
            atomic_write(run_dir / CUSTOM_FILE, json.dumps(list(custom)))
            save_config(config, run_dir / CONFIG_FILE)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run_root={config.run_root!r} cannot be written: {error}") from error
        return run_dir
    raise ConfigError(f"cannot create a run directory: {stem} and 99 names like it exist")


def export_newest(config: Config, run_dir: Path, notify: Callable[[str], None]) -> Path | None:
    """Writes the newest checkpoint as a Hugging Face folder; None if there is none, or `checkpoint.export` is off."""
    newest = latest(run_dir)
    if not config.checkpoint.export or newest is None:
        return None
    out = run_dir / EXPORT_FOLDER
    if out.exists():
        # Exported from an older checkpoint, before the run was resumed: nothing is lost.
        shutil.rmtree(out)
    export_checkpoint(newest, Path(config.model.path), out)
    notify(f"Hugging Face checkpoint: {out}")
    return out


def export_step(config: Config, run_dir: Path, checkpoint: Path, notify: Callable[[str], None]) -> None:
    """Writes a checkpoint as a Hugging Face folder, beside the training. Raises CheckpointError."""
    out = run_dir / EXPORTS_FOLDER / checkpoint.name
    # From before the run went back behind this step.
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(exist_ok=True)
    export_checkpoint(checkpoint, Path(config.model.path), out)
    notify(f"Hugging Face checkpoint: {out}")


# Seconds beside `timeouts.shutdown` until a process that was interrupted twice ends at the latest.
LAST_SECONDS = 60.0


class Stoppable(Protocol):
    """A run that signals can end, or ask what it waits for."""

    config: Config

    def request_stop(self, reason: str) -> bool:
        """Requests a clean end. Returns False while the run is still starting: then it can only be cancelled."""
        ...

    async def dump(self) -> None:
        """Logs what each part of the run waits for."""
        ...


@contextlib.contextmanager
def stop_signals(run: Stoppable, task: asyncio.Task) -> Iterator[None]:
    """First Ctrl-C (or SIGTERM): finish cleanly. Second: stop immediately. SIGUSR1: log what every part waits for.

    Raises TrainingError for code that tries to end the process, which is no end of a run.
    """
    received: list[str] = []
    dumps: set[asyncio.Task] = set()

    def on_stop(number: signal.Signals) -> None:
        if task.cancelling():
            return  # stopping already: another cancellation would only interrupt the cleanup
        received.append(number.name)
        if len(received) > 1 or not run.request_stop(number.name):
            task.cancel(f"{number.name}: stopping immediately")

    def on_signal(number: signal.Signals) -> None:
        if number != signal.SIGUSR1:
            on_stop(number)
            return
        dump = asyncio.create_task(run.dump(), name="dump")
        dumps.add(dump)
        dump.add_done_callback(dumps.discard)

    try:
        timeouts, numbers = run.config.timeouts, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        with handle_signals(numbers, on_signal, patience=timeouts.no_progress, last=timeouts.shutdown + LAST_SECONDS):
            yield
    except asyncio.CancelledError:
        if not received:
            raise
        raise KeyboardInterrupt(f"stopped by {received[-1]} before the run could finish cleanly") from None
    except (SystemExit, GeneratorExit) as error:
        raise TrainingError(f"the run ended before its goal: some code raised {explain(error)}") from error
