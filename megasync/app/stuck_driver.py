"""`megasync stacks`: asks a run for a hang report, and looks at its driver from outside if it does not answer."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from megasync.app.mailbox import ask
from megasync.app.run_lock import holder, is_held
from megasync.errors import ConfigError, MegasyncError
from megasync.observe.hang import TOTAL_SECONDS
from megasync.observe.stacks import stacks_of

# Seconds for the stacks of a driver that does not answer.
DRIVER_SECONDS = 10.0


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
        found = stacks_of("driver", driver["pid"], time.monotonic() + DRIVER_SECONDS)
        return f"{error}\n\ndriver (process {found.pid}), {found.state}: {found.place}\n{found.text}"
