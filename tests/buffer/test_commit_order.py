"""Body before row, row before answer: what is on disk when a process, or the machine, dies at any point of a commit."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_buffer import kill

from megasync.buffer import AsyncBuffer
from megasync.buffer.beginning import begin_ledger, resume_ledger
from megasync.buffer.ledger import Ledger
from megasync.buffer.payload import decode
from megasync.buffer.remote import RemoteBuffer
from megasync.buffer.segments import BodyWriter, SegmentWriter, load, segments_of
from megasync.config.schema import ScheduleConfig

SCHEDULE = ScheduleConfig(groups_per_step=1, samples_per_group=2, max_staleness=3)
APPENDED, FLUSHED, SENT, WRITTEN, COMMITTED, ANSWERED = (
    "appended",
    "flushed",
    "sent",
    "written",
    "committed",
    "answered",
)


class Machine:
    """Copies the run directory at each point: all of it, as a kill leaves it, and what was flushed to disk."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self._disk, self._images = folder / "run", folder / "disk", folder / "images"
        self.run.mkdir()
        self.points: list[str] = []
        self._after(monkeypatch, SegmentWriter, "append", APPENDED)
        self._after(monkeypatch, Ledger, "_write", WRITTEN)
        self._after(monkeypatch, Ledger, "transact", COMMITTED)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._flush)

    @property
    def ledger(self) -> Path:
        return self.run / "ledger.db"

    def _after(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, point: str) -> None:
        method = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            self.dies_here(point)
            return result

        monkeypatch.setattr(owner, name, call)

    def _flush(self, file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_file() and path.is_relative_to(self.run):
            copy = self._disk / path.relative_to(self.run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
            self.dies_here(FLUSHED)

    def dies_here(self, point: str) -> None:
        image = self._images / str(len(self.points))
        self.points.append(point)
        shutil.copytree(self.run, image / "killed")
        # The file's own content changes with a checkpoint of its log only, which SQLite flushes.
        if self.ledger.exists():
            shutil.copytree(self._disk, image / "power lost")
            shutil.copy(self.ledger, image / "power lost" / "ledger.db")

    def image(self, number: int, what: str) -> Path:
        return self._images / str(number) / what / "ledger.db"


def maker(buffer: AsyncBuffer, machine: Machine, remote: bool, shared: bool) -> Any:
    """The buffer as the process that makes groups has it."""
    if not remote:
        return buffer, None

    async def ask(call: str, *arguments: Any) -> Any:
        machine.dies_here(SENT)
        return pickle.loads(pickle.dumps(await buffer.of_worker(call, *pickle.loads(pickle.dumps(arguments)))))

    bodies = BodyWriter(segments_of(machine.ledger), "worker-0", shared)
    return RemoteBuffer(ask, bodies), bodies


async def resumed(ledger: Path, check: Callable[[AsyncBuffer], Any]) -> Any:
    resume_ledger(ledger, SCHEDULE, 100, 0)
    buffer = AsyncBuffer(SCHEDULE, 100, ledger=ledger)
    try:
        return await check(buffer)
    finally:
        await buffer.release()


async def trainable(buffer: AsyncBuffer) -> dict[str, Any]:
    """The groups that a resumed run trains, with their tokens; damaged ones are found by then."""
    found = {}
    step = 1
    while (await buffer.counts())["slots"]["finished"]:
        lease = asyncio.create_task(buffer.lease(step, 0))
        while not lease.done() and not await buffer.waiting():
            await asyncio.sleep(0)
        if not lease.done():
            # Only damaged ones were left.
            lease.cancel()
            break
        (group,) = lease.result()
        found[group.uid] = load(group)
        await buffer.ack(step)
        step += 1
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["one machine", "several machines"])
@pytest.mark.parametrize("remote", [False, True], ids=["driver", "worker"])
async def test_no_answer_before_its_row_and_no_row_before_its_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Callable[..., Any], remote: bool, shared: bool
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    begin_ledger(machine.ledger, 0, 0, {}, {"cursor": None, "pending": []})
    buffer = AsyncBuffer(SCHEDULE, 100, ledger=machine.ledger, shared=shared)
    sink, bodies = maker(buffer, machine, remote, shared)
    groups = {uid: group(uid, 0, 0) for uid in "ab"}
    for uid in groups:
        await buffer.admit(uid)
    begun = len(machine.points)
    # Uids that were answered, and that a checkpoint relies on, by the point from which on they are.
    answered: list[tuple[int, str]] = []
    for uid, each in groups.items():
        assert await sink.commit(each)
        answered.append((len(machine.points), uid))
        machine.dies_here(ANSWERED)
    await buffer.before_checkpoint()
    on_disk = len(machine.points)
    machine.dies_here(ANSWERED)
    commit = machine.points[begun : answered[0][0] + 1]
    places = [commit.index(point) for point in (APPENDED, *[FLUSHED] * shared, *[SENT] * remote, WRITTEN, COMMITTED)]
    assert places == sorted(places) and commit[-1] == ANSWERED
    kill(buffer)
    if bodies is not None:
        await bodies.close()
    monkeypatch.undo()

    expected = {uid: decode(each.header, each.body) for uid, each in groups.items()}
    for number in range(begun, len(machine.points)):
        for what in ("killed", "power lost"):
            kept = await resumed(machine.image(number, what), trainable)
            assert all(kept[uid] == expected[uid] for uid in kept), (machine.points[number], what)
            safe = {uid for at, uid in answered if at <= number} if what == "killed" or number >= on_disk else set()
            assert safe <= set(kept), f"{what} after {machine.points[: number + 1]}: {set(kept)} of {safe} are left"

    async def repeated(buffer: AsyncBuffer) -> dict[str, Any]:
        for uid, each in groups.items():
            assert await buffer.commit(each), f"{uid} may be committed again"
        return await trainable(buffer)

    for number in range(begun, len(machine.points)):
        assert await resumed(machine.image(number, "killed"), repeated) == expected, machine.points[number]
