"""Processes of their own for users' code that needs a main thread, or that must be killed when it hangs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from megasync.concurrency.foreign import ForeignExit, explain, invoke
from megasync.concurrency.orphans import end_with_parent
from megasync.errors import MegasyncError

# Maximum wait, in seconds, until a killed process is reaped.
REAP_SECONDS = 5.0


def one_process() -> ProcessPoolExecutor:
    """A pool of one process, which ends with this one and starts with the first call."""
    # spawn, because a fork would copy the locks of this process's threads and its sockets.
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)


def kill_pool(pool: ProcessPoolExecutor) -> None:
    """Kills the workers. Running calls end with BrokenProcessPool; `pool.shutdown` alone would wait for them."""
    workers = list((pool._processes or {}).values())
    for worker in workers:
        worker.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.join(timeout=REAP_SECONDS)


def answer_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls users' code in a worker process. Its own errors become ForeignExit: they need not survive a pickle."""
    try:
        return invoke(function, *arguments)
    except MegasyncError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's code raises
        raise ForeignExit(explain(error)) from None
