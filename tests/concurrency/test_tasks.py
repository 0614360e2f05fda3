"""Backoff doubles up to its limit with jitter; coroutines that run together end together."""

import asyncio
import random

import pytest

from megasync.concurrency.tasks import Backoff, gather_or_cancel


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
