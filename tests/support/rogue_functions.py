"""A reward and a workflow that raise, block, exit and refuse to end at random, in a module that runs can import."""

import asyncio
import random
import sys
import time

from megasync.rollout.workflow import single_turn

# The share of calls that misbehave, and seconds that one blocks for: longer than the deadline of a reward in such runs.
SHARE = 0.1
BLOCKED_SECONDS = 3.0


class Own(BaseException):
    """No Exception: only a bare `except` catches it."""


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise Own


class Hostile:
    """A score whose code exits."""

    def __float__(self):
        sys.exit(0)

    __repr__ = __float__


def raises(error):
    raise error


FAILURES = (
    lambda: raises(ValueError("the answer cannot be parsed")),
    lambda: sys.exit(0),
    lambda: raises(KeyboardInterrupt()),
    lambda: raises(GeneratorExit()),
    lambda: raises(asyncio.CancelledError()),
    lambda: raises(Own()),
    lambda: raises(Unspeakable()),
    lambda: raises(BaseExceptionGroup("several", [SystemExit(0), ValueError()])),
)


def reward(completions, answer, **columns):
    if random.random() < SHARE:
        choice = random.randrange(len(FAILURES) + 3)
        if choice < len(FAILURES):
            FAILURES[choice]()
        if choice == len(FAILURES):
            time.sleep(BLOCKED_SECONDS)
        if choice == len(FAILURES) + 1:
            return (sys.exit(0) for _ in completions)
        return [Hostile() for _ in completions]
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


async def rollout(client, sample):
    if random.random() < SHARE:
        choice = random.randrange(len(FAILURES) + 3)
        if choice < len(FAILURES):
            FAILURES[choice]()
        if choice == len(FAILURES):
            time.sleep(BLOCKED_SECONDS / 6)  # noqa: ASYNC251 - as a user's code might
        if choice == len(FAILURES) + 1:
            await asyncio.create_task(exits())
        # Until the sample is cancelled, or for a while.
        await refuses()
    return await single_turn(client, sample)


async def exits():
    await asyncio.sleep(0)
    sys.exit(0)


async def refuses(times=3):
    for _ in range(times):
        try:
            await asyncio.sleep(BLOCKED_SECONDS)
        except:  # noqa: E722 - as people write their retries
            await asyncio.sleep(0)
