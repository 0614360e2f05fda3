"""Ends processes of actors that no longer listen to Ray: a stopped process answers nobody, and keeps its device.

The kill goes out from a task on the process's own node, because a process id means nothing elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import psutil
import ray

from megasync.cluster.pools import Pools
from megasync.cluster.roles import ROLES

log = logging.getLogger(__name__)

# A killed process leaves a moment later, on a busy machine.
GONE_SECONDS = 10.0


async def end_leftovers(pools: Pools, role: str, pids: Sequence[int], timeout: float) -> None:
    """Returns once none of the actors of `role` with these ids, in slot order, is left; logs what it could not end."""
    end = ray.remote(max_retries=0)(end_process)
    title = ROLES[role].actor.__name__
    tasks = [end.options(**pools.neighbour_options(role, slot)).remote(pid, title) for slot, pid in enumerate(pids)]
    waits = [asyncio.wrap_future(task.future()) for task in tasks]
    if not waits:
        return
    done, late = await asyncio.wait(waits, timeout=timeout)
    for wait in late:
        wait.cancel()
    failures = [wait.exception() for wait in done if wait.exception()]
    if late or failures:
        log.warning("%d leftover %s processes may be alive: %s", len(late) + len(failures), role, failures[:1])


def end_process(pid: int, title: str) -> None:
    """On this node. Raises psutil.TimeoutExpired when it does not end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # Ids are used again: Ray names an actor's process after its class.
        if title in " ".join(process.cmdline()):
            process.kill()
            process.wait(GONE_SECONDS)
