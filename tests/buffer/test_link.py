"""Calls over a socket: each ends with its answer, or with the loss of the connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from megasync.buffer.link import READ_BYTES, Link, listen
from megasync.errors import LedgerError, MegasyncError

PATIENCE = 30.0


class Target:
    def __init__(self) -> None:
        self.held = asyncio.Event()

    async def double(self, value, times: int = 2):
        return value * times

    async def hold(self) -> str:
        await self.held.wait()
        return "held"

    async def fail(self, error: Exception) -> None:
        raise error

    async def unsendable(self):
        return lambda: None


@pytest.fixture
async def target() -> Target:
    return Target()


@pytest.fixture
async def connect(target: Target) -> Callable[[], Awaitable[Link]]:
    address = await listen(target)
    return lambda: Link.connect(address)


@pytest.mark.parametrize(
    "size", [0, 1, 1000, *(READ_BYTES + step for step in range(-70, 10, 8)), 3 * READ_BYTES, 5_000_000]
)
async def test_calls_of_every_size_are_answered_in_any_number_at_once(connect, size: int) -> None:
    link = await connect()
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*(link.call("double", bytes([n]) * size, times=1) for n in range(4)))
    assert answers == [bytes([n]) * size for n in range(4)]


async def test_arrays_arrive_as_they_were(connect) -> None:
    link = await connect()
    for array in (np.arange(10), np.arange(300_000, dtype=np.float32), np.empty(0, np.int32)):
        assert np.array_equal(await link.call("double", array), array * 2)


async def test_a_call_that_waits_does_not_hold_up_others(connect, target: Target) -> None:
    link, other = await connect(), await connect()
    waiting = asyncio.create_task(link.call("hold"))
    assert await link.call("double", 4) == await other.call("double", 4) == 8
    assert not waiting.done()
    target.held.set()
    assert await asyncio.wait_for(waiting, PATIENCE) == "held"


async def test_a_cancelled_call_leaves_the_link_in_order(connect, target: Target) -> None:
    link = await connect()
    waiting = asyncio.create_task(link.call("hold"))
    await link.call("double", 1)
    waiting.cancel()
    target.held.set()
    assert await link.call("double", 2) == 4


async def test_errors_are_raised_where_the_call_was_made(connect) -> None:
    link = await connect()
    with pytest.raises(LedgerError, match="the disk is full"):
        await link.call("fail", LedgerError("the disk is full"))
    with pytest.raises(ZeroDivisionError):
        await link.call("fail", ZeroDivisionError())
    with pytest.raises(MegasyncError, match="the answer to unsendable cannot be sent: .*pickle"):
        await link.call("unsendable")
    with pytest.raises(AttributeError, match="lambda"):
        await link.call("double", lambda: None)
    assert await link.call("double", 2) == 4


async def test_a_lost_connection_ends_its_calls_and_refuses_others(connect) -> None:
    link = await connect()
    waiting = asyncio.create_task(link.call("hold"))
    await link.call("double", 1)
    link.close()
    with pytest.raises(ConnectionError, match="closed here"):
        await asyncio.wait_for(waiting, PATIENCE)
    with pytest.raises(ConnectionError, match="closed here"):
        await link.call("double", 1)


async def test_another_user_cannot_call(connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    link = await connect()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(link.call("double", 1), PATIENCE)
