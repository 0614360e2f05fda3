"""One text file about a run that hangs, in RUN/hang: what everything of it is doing, written before anything is killed.

It joins what each task of the driver awaits, the stacks of the driver and of every other process on every node, the
collectives that ranks are in, and the states of buffer and servers. Processes whose stacks are equal are shown once,
so a report does not grow with the cluster. Every part has a deadline of its own and the whole has `TOTAL_SECONDS`:
a caller that waits for a report, such as a recovery, waits at most that long. A failed part is named in its place.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from megasync.base.files import atomic_write
from megasync.concurrency.tasks import within
from megasync.observe.stacks import ProcessStacks, describe_tasks, own_stacks
from megasync.observe.state_file import RunState

log = logging.getLogger(__name__)

HANG_FOLDER = "hang"
# Seconds for a whole report; for the state of the run; for the stacks on the nodes, of which the nodes get less.
TOTAL_SECONDS = 20.0
STATE_SECONDS = 8.0
STACKS_SECONDS = 17.0
NODE_SECONDS = 14.0
# Processes up to whose number those are named too that serve.
MOST_NAMED = 32
# Older reports are removed: something may hang again and again for days.
MOST_REPORTS = 20
_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9]{3}\.txt")


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A process of the run. ``node`` is Ray's id of its node."""

    name: str
    node: str
    pid: int


class HangSink(Protocol):
    """Whoever writes reports."""

    async def report(self, reason: str, only: Collection[str] | None = None) -> Path | None:
        """Writes a report; its path, or None if it could not be written. Does not raise.

        ``only`` names the processes whose stacks are read besides the driver's; None means all.
        """


class NoReports(HangSink):
    """Writes nothing."""


# Reads the stacks of processes on one node, within these seconds.
ReadNode = Callable[[str, Sequence[RunProcess], float], Awaitable[list[ProcessStacks]]]


class HangReporter:
    """Writes the reports of a run. One is written at a time."""

    def __init__(
        self,
        run_dir: Path,
        state: Callable[[], RunState],
        say: Callable[[str], None],
        describe: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`state` is that of the run, `say` announces a report, and `describe` asks more about the run's state."""
        self._folder = Path(run_dir) / HANG_FOLDER
        self._observed = state
        self._say = say
        self._describe = describe
        self._sources: list[tuple[ReadNode, Callable[[], list[RunProcess]]]] = []
        self._writing = asyncio.Lock()

    def cover(self, read_node: ReadNode, *sources: Callable[[], list[RunProcess]]) -> None:
        """Shows from now on what the processes do that these sources return, without asking them, for each report."""
        self._sources += [(read_node, source) for source in sources]

    async def report(self, reason: str, only: Collection[str] | None = None) -> Path | None:
        try:
            return await within(self._report(reason, only), TOTAL_SECONDS)
        except Exception as error:  # noqa: BLE001 - a report must not end the run that it is about
            log.warning("Could not write a hang report: %s: %s", type(error).__name__, error)
            return None

    async def _report(self, reason: str, only: Collection[str] | None) -> Path:
        async with self._writing:
            # First what the driver does now, without the tasks of this report.
            driver = "\n".join(
                line for t in own_stacks() for line in (f"thread {t.name}", *(f"    {frame}" for frame in t.frames))
            )
            tasks = describe_tasks()
            state, (stacks, missing) = await asyncio.gather(self._state(), self._stacks(only))
            text = rendered(reason, state, tasks, driver, stacks, missing)
            path = self._folder / f"{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]
            path = path.with_name(f"{path.name}.txt")
            await asyncio.to_thread(self._write, path, text)
        self._say(f"hang report: {path} ({reason.splitlines()[0] if reason else ''})")
        return path

    async def _state(self) -> str:
        try:
            description = described(self._observed())
            if self._describe is not None:
                description += "\n" + await within(self._describe(), STATE_SECONDS)
        except Exception as error:  # noqa: BLE001 - the rest of the report is worth more
            description = f"(unknown: {type(error).__name__} {error})"
        return description

    async def _stacks(self, only: Collection[str] | None) -> tuple[list[ProcessStacks], list[str]]:
        """The stacks by processes, and what is missing."""
        by_node: dict[tuple[ReadNode, str], list[RunProcess]] = {}
        missing = []
        for read_node, source in self._sources:
            for process in source():
                if only is None or process.name in only:
                    by_node.setdefault((read_node, process.node), []).append(process)
        calls = {
            (read_node, node): asyncio.ensure_future(read_node(node, processes, NODE_SECONDS))
            for (read_node, node), processes in by_node.items()
        }
        if calls:
            await asyncio.wait(calls.values(), timeout=STACKS_SECONDS)
        stacks = []
        for (read_node, node), call in calls.items():
            names = ", ".join(process.name for process in by_node[read_node, node])
            if not call.done():
                call.cancel()
                missing.append(f"{names}: node {node or '?'} did not answer within {STACKS_SECONDS:g} s")
            elif call.exception() is not None:
                missing.append(f"{names}: {type(call.exception()).__name__}: {call.exception()}")
            else:
                stacks += call.result()
        return stacks, missing

    def _write(self, path: Path, text: str) -> None:
        self._folder.mkdir(exist_ok=True)
        atomic_write(path, text)
        reports = sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
        for old in reports[:-MOST_REPORTS]:
            old.unlink(missing_ok=True)


def rendered(
    reason: str, state: str, tasks: str, driver: str, stacks: Sequence[ProcessStacks], missing: Sequence[str]
) -> str:
    """The text of a report. Processes with equal stacks are described together."""
    parts = [f"Hang report of {time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n{reason}"]
    parts.append(_chapter("Where each process is", _summary(stacks, missing)))
    parts.append(_chapter("State of the run", state))
    parts.append(_chapter("What the tasks of the driver await", tasks))
    parts.append(_chapter("Stacks of the driver", driver))
    alike: dict[tuple[str, str], list[ProcessStacks]] = {}
    for process in stacks:
        if process.text:
            alike.setdefault((process.title, process.text), []).append(process)
    for (title, text), processes in alike.items():
        parts.append(_chapter(f"{_named(processes)}: {title}", text))
    return "\n\n".join(parts) + "\n"


def described(state: RunState) -> str:
    """The state of a run in lines. Of servers, models and workers those are named that do not simply serve."""
    lines = [f"{state.status}, step {state.step} of {state.total_steps}, version {state.version}"]
    lines += [f"{part}: {doing} for {state.time - since:.0f} s" for part, (doing, since) in state.activities.items()]
    processes = [*state.servers, *state.frozen_models, *state.workers, *([state.router] if state.router else [])]
    for process in processes:
        requests = f", {process.running} requests run" if process.running is not None else ""
        requests += f", {process.waiting} wait" if process.waiting is not None else ""
        if len(processes) <= MOST_NAMED or process.state not in ("healthy", "up"):
            why = f" ({process.reason.splitlines()[0]})" if process.reason else ""
            lines.append(f"{process.name}: {process.state}{why}{requests}")
    if (buffer := state.buffer) is not None:
        lines.append(
            f"buffer: {buffer.slots}, {buffer.capacity} places, {buffer.admitted} admitted, {buffer.trained} trained, "
            f"{buffer.live} live, dropped {buffer.dropped or 0}"
        )
    return "\n".join(lines)


def _summary(stacks: Sequence[ProcessStacks], missing: Sequence[str]) -> str:
    alike: dict[tuple[str, str, str], list[ProcessStacks]] = {}
    for process in stacks:
        alike.setdefault((process.title, process.state, process.place), []).append(process)
    stopped = {"stopped": "STOPPED by a signal", "tracing-stop": "STOPPED by a signal"}
    lines = [
        f"{_named(processes)}: {title}, {stopped.get(state, state)}: {place or 'no Python stack'}"
        for (title, state, place), processes in alike.items()
    ]
    return "\n".join([*lines, *(f"no stacks of {line}" for line in missing)]) or "there is only the driver"


def _named(processes: Sequence[ProcessStacks], most: int = 8) -> str:
    names = [f"{process.name} (process {process.pid})" for process in processes]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _chapter(title: str, text: str) -> str:
    return f"== {title}\n{text}"
