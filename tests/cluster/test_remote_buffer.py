"""kill -9 of the buffer's process: a new one continues from the ledger, and no caller notices."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import command_line, family, living

from megasync.buffer import AsyncBuffer, BufferClosed, BufferStateError
from megasync.buffer.payload import EncodedGroup, GroupHeader, encode, encode_partial
from megasync.buffer.segments import load
from megasync.cluster import remote_buffer
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.remote_buffer import RemoteBuffer
from megasync.cluster.roles import ROLES
from megasync.config import Config
from megasync.config.schema import ScheduleConfig
from megasync.errors import LedgerError, TrainingError
from megasync.trajectory import Group, Partial, Trajectory

pytestmark = pytest.mark.processes

SCHEDULE = ScheduleConfig(groups_per_step=2, max_staleness=1)
PATIENCE = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    session = RayCluster(Config(), devices_needed=1)
    session.connect()
    yield
    session.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def make(cluster: None, ledger: Path) -> Iterator[Callable[..., RemoteBuffer]]:
    made = []

    def start(*arguments: object, **options: object) -> RemoteBuffer:
        made.append(RemoteBuffer(SCHEDULE, *arguments, **{"ledger": str(ledger)} | options))
        return made[-1]

    yield start
    for handle in made:
        handle.kill()


def the_process() -> psutil.Process:
    (process,) = [p for p in living(family(os.getpid())) if "ray::AsyncBuffer" in command_line(p)]
    return process


def kill_buffer() -> None:
    """As an operator or the kernel's OOM killer would."""
    process = the_process()
    process.kill()
    process.wait(PATIENCE)


def group(uid: str, version: int = 0) -> EncodedGroup:
    return encode(Group(uid, [Trajectory([1], [2, 3], [1, 1], [-0.5] * 2, [version] * 2, reward=1.0)] * 2))


def headers(*uids: str) -> list[GroupHeader]:
    return [group(uid).header for uid in uids]


async def lease(buffer: RemoteBuffer, step: int, version: int) -> list[GroupHeader]:
    """The batch's headers. Every body can be read, wherever it lies."""
    batch = await buffer.lease(step, version)
    assert all(len(load(leased).trajectories) == 2 for leased in batch)
    return [leased.header for leased in batch]


async def test_a_restarted_buffer_loses_nothing_and_keeps_its_waiters(make: Callable[..., RemoteBuffer]) -> None:
    buffer = make()
    for uid in "abcd":
        await buffer.admit(uid)
    # Importing it takes most of a restart.
    assert "libtorch" not in Path(f"/proc/{the_process().pid}/maps").read_text()
    await buffer.commit(group("a"))
    partial = encode_partial(Partial("digest", [2], [-0.5], [0]))
    await buffer.save_partials({("b", 0, 0): partial})
    waits = [asyncio.create_task(call) for call in (buffer.admit("e"), lease(buffer, 1, 0), buffer.reclaim())]
    await asyncio.wait(waits, timeout=1)
    kill_buffer()

    assert await buffer.partials("b") == {(0, 0): partial.data}
    assert (await buffer.counts())["slots"] | {"generating": 3, "finished": 1} == (await buffer.counts())["slots"]
    assert await buffer.commit(group("a")) and await buffer.commit(group("b"))
    assert await asyncio.wait_for(waits[1], PATIENCE) == headers("a", "b")
    kill_buffer()
    assert await lease(buffer, 1, 0) == headers("a", "b"), "the answer may have been lost"
    await buffer.ack(1)
    kill_buffer()
    await buffer.ack(1)
    await buffer.publish(1)
    await asyncio.wait_for(waits[0], PATIENCE)
    kill_buffer()
    counts = await buffer.counts()
    assert (counts["admitted"], counts["trained"], counts["live"]) == (5, 2, 3)

    await buffer.rollback(0, 1)
    assert (await buffer.counts())["trained"] == 0
    assert await lease(buffer, 1, 1) == headers("a", "b")
    await buffer.close("the test is over")
    kill_buffer()
    with pytest.raises(BufferClosed, match="the test is over"):
        await asyncio.wait_for(waits[2], PATIENCE)


async def test_errors_of_the_buffer_are_re_raised_unchanged(make: Callable[..., RemoteBuffer], ledger: Path) -> None:
    buffer = make()
    with pytest.raises(BufferStateError, match="group z cannot be dropped: it is unknown"):
        await buffer.drop("z", "why")
    buffer.kill()
    for file in ledger.parent.iterdir():
        file.unlink()
    with sqlite3.connect(ledger) as other:
        other.execute("CREATE TABLE a (b)")
    other.close()
    with pytest.raises(LedgerError, match="is a database, but not a ledger"):
        await make().counts()


async def test_a_buffer_that_keeps_dying_fails_with_its_last_cause(make, monkeypatch) -> None:
    monkeypatch.setattr(remote_buffer, "MAX_DEATHS", 1)
    buffer = make(clock=lambda: 7.0)
    for _ in range(2):
        await buffer.counts()
        kill_buffer()
    with pytest.raises(LedgerError, match=r"(?s)lost 2 times within 0 s.*buffer 0 died during.*megasync resume"):
        await buffer.counts()


async def test_a_killed_buffer_is_not_restarted(make: Callable[..., RemoteBuffer]) -> None:
    buffer = make()
    waiting = asyncio.create_task(buffer.lease(1, 0))
    await buffer.counts()
    buffer.kill()
    with pytest.raises(TrainingError, match="buffer 0 died during lease"):
        await asyncio.wait_for(waiting, PATIENCE)


async def test_without_a_ledger_a_death_is_fatal(make: Callable[..., RemoteBuffer]) -> None:
    buffer = make(ledger=None)
    await buffer.admit("a")
    kill_buffer()
    with pytest.raises(LedgerError, match="no ledger to restart from"):
        await buffer.counts()


@pytest.mark.parametrize("method", ["counts", "lease"])
async def test_a_hung_buffer_is_killed_and_continues_from_the_ledger(make, monkeypatch, method: str) -> None:
    monkeypatch.setattr(remote_buffer, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(remote_buffer, "PULSE_SECONDS", 0.5)
    buffer = make()
    for uid in "abc":
        await buffer.admit(uid)
    lease = asyncio.create_task(buffer.lease(1, 0))
    await buffer.commit(group("a"))
    hung = the_process()
    hung.suspend()
    async with asyncio.timeout(PATIENCE):
        if method == "counts":
            assert (await buffer.counts())["admitted"] == 3
        else:
            # Only a waiting call can notice.
            await asyncio.to_thread(hung.wait)
        await buffer.commit(group("b"))
        assert [leased.header for leased in await lease] == headers("a", "b")
    assert not hung.is_running()


@pytest.mark.parametrize("hangs", [False, True])
async def test_reading_the_ledger_has_no_deadline_while_it_progresses(make, monkeypatch, tmp_path, hangs: bool) -> None:
    hung_once = tmp_path / "hung once"

    class SlowBuffer(AsyncBuffer):
        """Reads for longer than any call may take; the first process may stop in the middle of it."""

        async def open(self) -> None:
            for read in range(25):
                self._report(f"{read} groups")
                if read == 5 and hangs and not hung_once.exists():
                    hung_once.touch()
                    await asyncio.Event().wait()
                await asyncio.sleep(0.1)
            await super().open()

    monkeypatch.setitem(ROLES, "buffer", replace(ROLES["buffer"], actor=SlowBuffer))
    monkeypatch.setattr(remote_buffer, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(remote_buffer, "OPEN_SECONDS", 1.0)
    monkeypatch.setattr(remote_buffer, "PULSE_SECONDS", 0.2)
    buffer = make()
    async with asyncio.timeout(PATIENCE):
        calls = await asyncio.gather(buffer.counts(), buffer.admit("a"), buffer.before_checkpoint())
    assert calls[0]["capacity"] == 4 and (await buffer.before_checkpoint())["pending"] == ["a"]
    assert len(buffer._deaths) == (1 if hangs else 0)


async def test_a_hung_buffer_without_a_ledger_is_an_error(make, monkeypatch) -> None:
    monkeypatch.setattr(remote_buffer, "ANSWER_SECONDS", 2.0)
    buffer = make(ledger=None)
    await buffer.admit("a")
    the_process().suspend()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LedgerError, match=r"did not finish counts\(\) within 2 s.*no ledger to restart from"):
            await buffer.counts()
