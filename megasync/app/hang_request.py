"""`megasync stacks`: the run's answer, and its caller, who looks at a driver from outside that does not answer."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from megasync.app.mailbox import ask
from megasync.app.run_lock import holder, is_held
from megasync.errors import ConfigError, MegasyncError
from megasync.observe.hang import TOTAL_SECONDS, HangReporter
from megasync.observe.stacks import stacks_of

# Seconds for the stacks of a driver that does not answer.
DRIVER_SECONDS = 10.0


async def answer_with_report(reports: HangReporter) -> str:
    """The path of a new report, for the mailbox. Raises MegasyncError when it could not be written."""
    path = await reports.report("requested by `megasync stacks`")
    if path is None:
        raise MegasyncError("the report could not be written; the run's log says why")
    return str(path)


def report_of(run_dir: Path) -> str:
    """The path of a new report, or the stacks of a driver that does not answer. Raises ConfigError as `mailbox.ask`."""
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
