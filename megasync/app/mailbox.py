"""Requests to a live run, through files in its directory: `control/<id>.ask`, answered in `control/<id>.answer`.

A live run holds the lock of its directory, so a request to a run that has ended or was killed fails immediately. Files
are written atomically, so a reader never sees a part of one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from megasync.app.run_lock import holder, is_held
from megasync.base.files import PART, atomic_write
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config import CONFIG_FILE
from megasync.errors import ConfigError, MegasyncError
from megasync.observe.hang import TOTAL_SECONDS, HangReporter
from megasync.observe.stacks import stacks_of

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
# Seconds for the stacks of a driver that does not answer.
DRIVER_SECONDS = 10.0
_FOLDER = "control"
_ASK = re.compile(r"[0-9]+-[0-9a-f]{8}\.ask")
# A request, its answer, or an unfinished one of either.
_MESSAGE = re.compile(rf"\.?[0-9]+-[0-9a-f]{{8}}\.(ask|answer)(\.[0-9a-f]{{8}}{re.escape(PART)})?")

# Called with the request's values. Its result, or the MegasyncError that it raises, is the answer.
Handler = Callable[..., Awaitable[str]]


class Mailbox:
    """The run's side, for the process that holds the run's lock."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / _FOLDER

    def open(self) -> None:
        """Removes unanswered requests to an earlier process of this run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("*"):
            if _MESSAGE.fullmatch(old.name):
                old.unlink(missing_ok=True)

    @asynccontextmanager
    async def answering(self, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
        """Answers requests one at a time, each with the handler of its name."""
        task = asyncio.create_task(self._serve(handlers), name="mailbox")
        try:
            yield
        finally:
            await cancel_and_wait(task)

    async def _serve(self, handlers: Mapping[str, Handler]) -> None:
        while True:
            for ask in sorted(path for path in self._folder.glob("*.ask") if _ASK.fullmatch(path.name)):
                await self._answer(ask, handlers)
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, ask: Path, handlers: Mapping[str, Handler]) -> None:
        try:
            request = json.loads(await asyncio.to_thread(ask.read_text))
            answer = {"done": await handlers[request["name"]](*request["values"])}
        except MegasyncError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # a failed request must not end the run
            log.warning("Request %s failed", ask, exc_info=error)
            answer = {"refused": f"{type(error).__name__}: {error}"}
        try:
            await asyncio.to_thread(ask.unlink, missing_ok=True)
            await asyncio.to_thread(_write, ask.with_suffix(".answer"), answer)
        except OSError as error:
            log.warning("Cannot answer request %s: %s", ask, error)


def ask(run_dir: Path, name: str, *values: object, timeout: float) -> str:
    """Sends a request to the run and waits for its answer, at most `timeout` seconds.

    Raises ConfigError for a directory without a live run, MegasyncError with the run's reason when it refuses, and when
    no answer comes.
    """
    folder = run_dir / _FOLDER
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
    if not is_held(run_dir):
        raise ConfigError(f"the run in {run_dir} is not live; start it again with `megasync resume {run_dir}`")
    stem = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    question, answer = folder / f"{stem}.ask", folder / f"{stem}.answer"
    _write(question, {"name": name, "values": values})
    deadline = time.monotonic() + timeout
    while not answer.exists():
        if time.monotonic() >= deadline:
            raise MegasyncError(
                f"the run in {run_dir} did not answer within {timeout:g} s; it may still carry out the request, see "
                f"{run_dir / 'logs' / 'controller.log'}"
            )
        if not is_held(run_dir):
            question.unlink(missing_ok=True)
            raise MegasyncError(f"the run in {run_dir} ended before it answered")
        time.sleep(POLL_SECONDS)
    content = json.loads(answer.read_text())
    answer.unlink(missing_ok=True)
    if "refused" in content:
        raise MegasyncError(content["refused"])
    return content["done"]


# `megasync stacks`


async def answer_with_report(reports: HangReporter) -> str:
    """The path of a new report, for the mailbox. Raises MegasyncError when it could not be written."""
    path = await reports.report("requested by `megasync stacks`")
    if path is None:
        raise MegasyncError("the report could not be written; the run's log says why")
    return str(path)


def report_of(run_dir: Path) -> str:
    """The path of a new report, or the stacks of a driver that does not answer. Raises ConfigError as `ask`."""
    try:
        return ask(run_dir, "stacks", timeout=2 * TOTAL_SECONDS)
    except ConfigError:
        raise
    except MegasyncError as error:
        driver = holder(run_dir)
        if driver is None or driver["host"] != socket.gethostname() or not is_held(run_dir):
            raise
        process = stacks_of("driver", driver["pid"], time.monotonic() + DRIVER_SECONDS)
        return f"{error}\n\ndriver (process {process.pid}), {process.state}: {process.place}\n{process.text}"


def _write(path: Path, content: dict) -> None:
    atomic_write(path, json.dumps(content))
