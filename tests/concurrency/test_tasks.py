"""Backoff doubles up to its limit with jitter; coroutines that run together end together."""

import asyncio
import random

import pytest

from megasync.concurrency.tasks import Backoff, gather_or_cancel, set_within, to_its_end, within


def test_a_delay_doubles_up_to_the_longest_until_it_is_reset():
    backoff = Backoff((1.0, 5.0), random.Random(0))
    delays = [backoff.next() for _ in range(5)]
    assert all(0.75 * base <= delay <= 1.25 * base for delay, base in zip(delays, (1, 2, 4, 5, 5), strict=True))
    backoff.reset()
    assert backoff.next() <= 1.25


async def test_the_first_error_cancels_the_others_and_is_raised_once_they_have_ended():
    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("endless")

    async def fails():
        await asyncio.sleep(0)
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        await gather_or_cancel(endless(), fails())
    assert ended == ["endless"]


async def test_a_cancellation_that_arrives_together_with_the_result_is_not_lost():
    async def waits(result):
        await within(result, 60)
        return "not cancelled"

    result = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(waits(result))
    await asyncio.sleep(0)
    result.set_result(None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_result_that_does_not_arrive_is_a_timeout():
    with pytest.raises(TimeoutError):
        await within(asyncio.Event().wait(), 0.01)


async def test_an_event_is_awaited_at_most_so_long():
    event = asyncio.Event()
    assert not await set_within(event, 0.01)
    event.set()
    assert await set_within(event, 60.0)


@pytest.mark.parametrize("ticks", range(4))
async def test_a_cancellation_that_arrives_together_with_the_event_ends_the_wait(ticks):
    event = asyncio.Event()
    waiting = asyncio.create_task(set_within(event, 60.0))
    await asyncio.sleep(0.01)
    event.set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_what_must_end_does_although_its_task_is_cancelled_meanwhile():
    began, may_end, ended = asyncio.Event(), asyncio.Event(), []

    async def work() -> str:
        began.set()
        await may_end.wait()
        ended.append(True)
        return "done"

    task = asyncio.ensure_future(to_its_end(work()))
    await began.wait()
    task.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True] and await to_its_end(work()) == "done"
