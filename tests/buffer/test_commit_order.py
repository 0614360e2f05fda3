"""Body before row, row before answer, log before removal: what is on disk when a process, or the machine, dies.

It may die at any point of a commit, and at any point while segments are removed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_buffer import kill

from megasync.buffer import AsyncBuffer
from megasync.buffer.beginning import begin_ledger, resume_ledger
from megasync.buffer.groups import GroupState
from megasync.buffer.ledger import Ledger
from megasync.buffer.payload import decode
from megasync.buffer.segments import SUFFIX, BodyWriter, GroupSink, SegmentWriter, load, segments_in, segments_of
from megasync.config.schema import ScheduleConfig

SCHEDULE = ScheduleConfig(groups_per_step=1, samples_per_group=2, max_staleness=3)
APPENDED, FLUSHED, SENT, WRITTEN, COMMITTED, ANSWERED, REMOVED = (
    "appended",
    "flushed",
    "sent",
    "written",
    "committed",
    "answered",
    "removed",
)


class Machine:
    """Copies the run directory at each point: all of it, as a kill leaves it, and what was flushed to disk.

    A removal may outlive a power loss ("power lost") or not ("files back").
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self._disk, self._images = folder / "run", folder / "disk", folder / "images"
        self.run.mkdir()
        self.points: list[str] = []
        self._lock = threading.RLock()
        self._after(monkeypatch, SegmentWriter, "write", APPENDED)
        self._after(monkeypatch, Ledger, "_write", WRITTEN)
        self._after(monkeypatch, Ledger, "transact", COMMITTED)
        monkeypatch.setattr(Path, "unlink", self._remover(Path.unlink))
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

    def _remover(self, unlink: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Path, missing_ok: bool = False) -> None:
            with self._lock:
                unlink(path, missing_ok)
                if path.suffix == SUFFIX and path.is_relative_to(self.run):
                    self.dies_here(REMOVED)

        return remove

    def _flush(self, file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_file() and path.is_relative_to(self.run):
            with self._lock:
                copy = self._disk / path.relative_to(self.run)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
                self.dies_here(FLUSHED)

    def dies_here(self, point: str) -> None:
        with self._lock:
            image = self._images / str(len(self.points))
            self.points.append(point)
            shutil.copytree(self.run, image / "killed")
            # The file's own content changes with a checkpoint of its log only, which SQLite flushes.
            if self.ledger.exists():
                for what in ("power lost", "files back"):
                    shutil.copytree(self._disk, image / what)
                    shutil.copy(self.ledger, image / what / "ledger.db")
                kept = {path.name for path in segments_of(self.ledger).glob("*")}
                for path in segments_of(image / "power lost" / "ledger.db").glob("*"):
                    if path.name not in kept:
                        os.remove(path)

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
    return GroupSink(ask, bodies), bodies


async def resumed(ledger: Path, check: Callable[[AsyncBuffer], Any], step: int = 0) -> Any:
    resume_ledger(ledger, SCHEDULE, 100, step)
    buffer = AsyncBuffer(SCHEDULE, 100, ledger=ledger)
    try:
        return await check(buffer)
    finally:
        await buffer.release()


async def trainable(buffer: AsyncBuffer) -> dict[str, Any]:
    """The groups that a resumed run trains, with their tokens; damaged ones are found by then."""
    found = {}
    while (await buffer.counts())["slots"]["finished"]:
        step = buffer._state.status.last_step + 1
        lease = asyncio.create_task(buffer.lease(step, buffer._state.version))
        while not lease.done() and not await buffer.waiting():
            await asyncio.sleep(0)
        if not lease.done():
            # Only damaged ones were left.
            lease.cancel()
            break
        (group,) = lease.result()
        found[group.uid] = load(group)
        await buffer.ack(step)
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
    await buffer.before_checkpoint(0)
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
            if (await buffer.counts())["admitted"] < len(groups):
                await buffer.admit(uid)
            assert await buffer.commit(each), f"{uid} may be committed again"
        return await trainable(buffer)

    for number in range(begun, len(machine.points)):
        assert await resumed(machine.image(number, "killed"), repeated) == expected, machine.points[number]


async def test_a_resumed_run_makes_again_what_was_answered_before_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Callable[..., Any]
) -> None:
    """Admissions, leases, acknowledgements and publications wait for no transaction, and their loss costs nothing."""
    machine = Machine(tmp_path, monkeypatch)
    begin_ledger(machine.ledger, 0, 0, {}, {"cursor": None, "pending": []})
    buffer = AsyncBuffer(SCHEDULE, 100, ledger=machine.ledger)
    begun, steps = len(machine.points), range(1, 5)
    uids = [f"0:{step}" for step in steps]
    # From which point on a group's commit was answered, and a checkpoint of a step was written.
    committed: dict[str, int] = {}
    saved: dict[int, int] = {}
    for step, uid in zip(steps, uids, strict=True):
        await buffer.admit(uid)
        machine.dies_here(ANSWERED)
        assert await buffer.commit(group(uid, step - 1, step - 1))
        committed[uid] = len(machine.points)
        machine.dies_here(ANSWERED)
        for call in (buffer.lease(step, step - 1), buffer.ack(step), buffer.publish(step)):
            await call
            machine.dies_here(ANSWERED)
        if step == 2:
            await buffer.before_checkpoint(0)
            saved[step] = len(machine.points)
            machine.dies_here(ANSWERED)
    kill(buffer)
    monkeypatch.undo()

    for number in range(begun, len(machine.points)):
        trained = max((step for step, at in saved.items() if at <= number), default=0)
        answered = [uid for uid, at in committed.items() if at <= number]
        for what in ("killed", "power lost"):
            again = resume_ledger(machine.image(number, what), SCHEDULE, 100, trained)
            buffer = AsyncBuffer(SCHEDULE, 100, ledger=machine.image(number, what))
            assert again.admitted == uids[: len(again.admitted)], "the source draws the others, in their order"
            for uid in uids[len(again.admitted) :]:
                await buffer.admit(uid)
            generated = await buffer.unfinished(uids)
            assert set(generated).isdisjoint(uids[:trained] if what == "power lost" else answered)
            if what == "killed":
                assert again.version >= len(answered) - 1, "no version of a token names other weights later"
            for uid in generated:
                assert await buffer.commit(group(uid, buffer._state.version, buffer._state.version))
            for step, uid in zip(steps[trained:], uids[trained:], strict=True):
                assert [load(leased).uid for leased in await buffer.lease(step, buffer._state.version)] == [uid]
                await buffer.ack(step)
            assert (await buffer.counts())["trained"] == len(uids), "each once"
            kill(buffer)


async def test_a_segment_is_removed_once_the_log_says_so_and_what_is_unneeded_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Callable[..., Any]
) -> None:
    """Publications remove what is stale, with nothing but the flush before it on disk; a checkpoint what it covers."""
    monkeypatch.setattr(SegmentWriter.__init__, "__defaults__", ("driver", 1))
    machine = Machine(tmp_path, monkeypatch)
    begin_ledger(machine.ledger, 0, 0, {}, {"cursor": None, "pending": []})
    buffer = AsyncBuffer(SCHEDULE, 100, ledger=machine.ledger)
    bound = buffer._state.pacing.staleness_bound
    groups: dict[str, Any] = {}

    async def commit(version: int) -> None:
        uid = f"0:{len(groups)}"
        groups[uid] = group(uid, version, version)
        await buffer.admit(uid)
        assert await buffer.commit(groups[uid])
        # A flush may find later rows in the log, whose bodies it leaves out.
        for flush in [*buffer._ledger._flushes]:
            await asyncio.wrap_future(flush)

    begun = 0
    for step in range(1, bound + 4):
        if step == bound + 1:
            # Its publication is the first one that removes something.
            begun = len(machine.points)
        await commit(step - 1)
        await buffer.lease(step, step - 1)
        await buffer.ack(step)
        await buffer.publish(step)
    await commit(step)
    await buffer.before_checkpoint(0)
    saved = len(machine.points)
    assert machine.points[begun:saved].count(REMOVED) == 3
    # The last checkpoint but one is that of the step before.
    await buffer.checkpointed(step, step - 1)
    await buffer.before_checkpoint(0)
    assert machine.points[saved:].count(REMOVED) == bound - 1
    kill(buffer)
    monkeypatch.undo()
    expected = {uid: decode(each.header, each.body) for uid, each in groups.items()}

    async def trained_on(buffer: AsyncBuffer) -> None:
        held = {entry.uid for entry in buffer._state._groups.among(GroupState.FINISHED)}
        for uid in buffer._state.reclaimable():
            # Trained after the checkpoint, and too old to be trained again.
            assert await buffer.drop(uid, "stale")
        kept = await trainable(buffer)
        assert kept == {uid: expected[uid] for uid in held}
        assert (await buffer.counts())["damaged"] == 0
        last = buffer._state.status.last_step
        await buffer.checkpointed(last, last)
        await buffer.before_checkpoint(0)
        named = {name for (name,) in buffer._ledger._db.execute("SELECT segment FROM payloads")}
        left = [segment.name for segment in segments_in(segments_of(buffer._ledger.path)) if segment.name not in named]
        # A writer's last segment keeps the number.
        assert left in ([], [max(left, default="")])

    for number in range(begun, len(machine.points)):
        for what in ("killed", "power lost", "files back"):
            await resumed(machine.image(number, what), trained_on, step - 1 if number >= saved else 0)
