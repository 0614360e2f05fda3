"""The end of a process is reported at once, by a watch that is not its parent."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from megasync.serving.process_watch import ProcessId, ProcessWatch, process_id


@pytest.fixture
def sleepers():
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


async def test_the_end_of_one_of_several_processes_is_reported_before_it_is_reaped(sleepers):
    first, second = (process_id(process.pid) for process in sleepers)
    ended = asyncio.create_task(ProcessWatch().ended([first, second], 60.0))
    await asyncio.sleep(0.05)
    assert not ended.done()
    sleepers[1].kill()
    assert await ended == [second]


async def test_processes_that_ended_before_the_call_are_all_reported(sleepers):
    known = [process_id(process.pid) for process in sleepers]
    for process in sleepers:
        process.kill()
        process.wait()
    assert await ProcessWatch().ended(known, 60.0) == sorted(known)


async def test_another_process_with_the_same_id_is_not_mistaken_for_it(sleepers):
    now = process_id(sleepers[0].pid)
    earlier = ProcessId(now.pid, now.started - 1)
    assert await ProcessWatch().ended([now, earlier], 60.0) == [earlier]


async def test_nothing_is_reported_after_the_given_time_or_once_another_call_begins(sleepers):
    watch, process = ProcessWatch(), process_id(sleepers[0].pid)
    assert await watch.ended([process], 0.05) == []
    first = asyncio.create_task(watch.ended([process], 600.0))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(watch.ended([process], 600.0))
    assert await first == []
    sleepers[0].kill()
    assert await second == [process]
