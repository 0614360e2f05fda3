"""Asks a run that is going on to do something, through files in its directory: `control/<id>.ask`, then `<id>.answer`.

A run holds the lock of its directory while it goes on, so that asking a run that has ended, or was killed, fails at once
and not after a wait. Files are written atomically: whoever reads one reads all of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from megasync.app.run_lock import is_held
from megasync.config import CONFIG_FILE
from megasync.errors import ConfigError, MegasyncError
from megasync.files import PART, atomic_write

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
_FOLDER = "control"

# Does what is asked, given the request's values; what it returns, or the MegasyncError it raises, is the answer.
Handler = Callable[..., Awaitable[str]]


class Mailbox:
    """The run's side, for the process that holds the run's lock."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / _FOLDER

    def open(self) -> None:
        """Throws away what an earlier process of this run was asked and did not answer."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (*self._folder.glob("*.ask"), *self._folder.glob("*.answer"), *self._folder.glob(f".*{PART}")):
            old.unlink(missing_ok=True)

    @asynccontextmanager
    async def answering(self, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
        """Answers requests, one after the other, by the handler of their name."""
        task = asyncio.create_task(self._serve(handlers), name="mailbox")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _serve(self, handlers: Mapping[str, Handler]) -> None:
        while True:
            for ask in sorted(self._folder.glob("*.ask")):
                await self._answer(ask, handlers)
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, ask: Path, handlers: Mapping[str, Handler]) -> None:
        try:
            request = json.loads(ask.read_text())
            answer = {"done": await handlers[request["name"]](*request["values"])}
        except MegasyncError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # whatever was asked for, the run goes on
            log.warning("the request in %s failed", ask, exc_info=error)
            answer = {"refused": f"{type(error).__name__}: {error}"}
        try:
            ask.unlink(missing_ok=True)
            _write(ask.with_suffix(".answer"), answer)
        except OSError as error:
            log.warning("%s could not be answered: %s", ask, error)


def ask(run_dir: Path, name: str, *values: object, timeout: float) -> str:
    """Hands a request to the run and waits for its answer, `timeout` seconds at most.

    Raises ConfigError for a directory of no run or of one that is not going on, MegasyncError with the run's reason when
    it refuses, and when no answer comes.
    """
    folder = run_dir / _FOLDER
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
    if not is_held(run_dir):
        raise ConfigError(f"the run in {run_dir} is not going on; start it again with `megasync resume {run_dir}`")
    stem = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    question, answer = folder / f"{stem}.ask", folder / f"{stem}.answer"
    _write(question, {"name": name, "values": values})
    deadline = time.monotonic() + timeout
    while not answer.exists():
        if time.monotonic() >= deadline:
            raise MegasyncError(
                f"the run in {run_dir} did not answer within {timeout:g} s; it may still do what was asked, see "
                f"{run_dir / 'logs' / 'controller.log'}"
            )
        if not is_held(run_dir):
            question.unlink(missing_ok=True)
            raise MegasyncError(f"the run in {run_dir} has ended before it answered")
        time.sleep(POLL_SECONDS)
    said = json.loads(answer.read_text())
    answer.unlink(missing_ok=True)
    if "refused" in said:
        raise MegasyncError(said["refused"])
    return said["done"]


def _write(path: Path, content: dict) -> None:
    atomic_write(path, json.dumps(content))
