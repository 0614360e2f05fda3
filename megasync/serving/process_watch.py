"""Reports which processes of this machine have ended (by pidfds, without polling; Linux), and where hung ones are.

A process is named by its id and its start time, because ids are reused. `_open` compares the start time after it has
opened the pidfd, so the pidfd refers to the named process, or that process has ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megasync.concurrency.tasks import set_within
from megasync.observe.stacks import ProcessStacks, stacks_of_families


class ProcessId(NamedTuple):
    """A process of one machine. `started` is in clock ticks since the machine's boot."""

    pid: int
    started: int


def process_id(pid: int) -> ProcessId:
    """The identity of a process that exists, if only as a zombie. Raises OSError otherwise."""
    fields = Path(f"/proc/{pid}/stat").read_bytes()
    # The second field, the command's name in parentheses, may contain anything; the start time is the 22nd.
    return ProcessId(pid, int(fields.rpartition(b")")[2].split()[19]))


class ProcessWatch:
    """Waits for processes to end; they need not be children of this one."""

    def __init__(self) -> None:
        self._superseded: asyncio.Event | None = None

    async def ended(self, processes: Sequence[tuple[int, int]], seconds: float) -> list[ProcessId]:
        """The processes that have ended, as soon as there is one.

        Returns an empty list after `seconds`, or when another call begins: the latest call names all processes that
        matter.
        """
        if self._superseded is not None:
            self._superseded.set()
        woken = self._superseded = asyncio.Event()
        loop = asyncio.get_running_loop()
        gone: set[ProcessId] = set()
        descriptors: list[int] = []

        def report(process: ProcessId) -> None:
            gone.add(process)
            woken.set()

        try:
            for process in (ProcessId(*process) for process in processes):
                if (descriptor := _open(process)) is None:
                    report(process)
                else:
                    descriptors.append(descriptor)
                    loop.add_reader(descriptor, report, process)
            await set_within(woken, seconds)
            return sorted(gone)
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    async def stacks(self, families: Sequence[tuple[str, int]], seconds: float) -> list[ProcessStacks]:
        """The stacks of processes, (name, process id), and of all that they have started, within ``seconds``."""
        return await asyncio.to_thread(stacks_of_families, families, seconds)


def _open(process: ProcessId) -> int | None:
    """A pidfd, readable once the process has ended; None if it has been reaped already."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    with suppress(OSError):
        if process_id(process.pid) == process:
            return descriptor
    os.close(descriptor)
    return None
