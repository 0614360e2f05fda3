"""Time that passes on an event loop when a test says so, so that no deadline depends on the machine."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from megasync.concurrency.tasks import Backoff


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def pass_time(seconds: float) -> None:
    """Moves the clock of the running loop on: every timer until then is due.

    Who took `loop.time` before the first call does not see it move.
    """
    loop: Any = asyncio.get_running_loop()
    if not hasattr(loop, "passed"):
        clock = loop.time
        loop.time = lambda: clock() + loop.passed
        loop.passed = 0.0
    loop.passed += seconds


def late_after(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The call, whose end comes after every deadline."""

    async def late(*arguments: Any, **options: Any) -> Any:
        try:
            return await call(*arguments, **options)
        finally:
            pass_time(1000.0)

    return late


@pytest.fixture
def endless_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pause between two attempts outlasts every deadline."""

    def begin(backoff: Backoff) -> float:
        pass_time(1000.0)
        return 1000.0

    monkeypatch.setattr(Backoff, "next", begin)
