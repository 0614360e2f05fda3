"""Worker processes for reward functions that are CPU-bound, or that need a main thread for their own timeouts.

Invariant: a call has a process to itself. A call that exceeds its deadline, or ends its process, affects no other call,
and a call's deadline does not include the wait for a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megasync.base.importing import name_of
from megasync.concurrency.foreign import DeadlineExceeded, ForeignExit, explain, invoke
from megasync.concurrency.processes import answer_in_process, kill_pool, one_process
from megasync.errors import ConfigError


class RewardProcesses:
    """Runs picklable functions without arguments in one of `processes` processes, on its main thread."""

    def __init__(self, processes: int) -> None:
        # Pools of one process each. In a pool of several, the death of one process ends all calls, and CPython 3.11
        # starts processes one by one without noticing that later ones die until something else happens in the pool.
        self._idle: list[ProcessPoolExecutor] = []
        self._busy: set[ProcessPoolExecutor] = set()
        self._free = asyncio.Semaphore(processes)

    async def call(self, function: Callable[[], Any], timeout: float) -> Any:
        """Calls the function in a process; returns its result, which must be plain data.

        Raises DeadlineExceeded `timeout` seconds after the call began, BrokenProcessPool when it ends its process, and
        otherwise megasync's own errors and ForeignExit, which says what the function raised.
        """
        async with self._free:
            if self._idle:
                # An idle process may have died for another reason; a new process shows whether the call is the cause.
                with contextlib.suppress(BrokenProcessPool):
                    return await self._call_in(self._idle.pop(), timeout, function)
            return await self._call_in(one_process(), timeout, function)

    def close(self) -> None:
        """Ends the processes, including those in the middle of a call."""
        for pool in [*self._idle, *self._busy]:
            kill_pool(pool)
        self._idle.clear()

    async def _call_in(self, pool: ProcessPoolExecutor, seconds: float, function: Callable[[], Any]) -> Any:
        """Runs the call in `pool`. Afterwards the pool is idle or killed."""
        call: Future | None = None
        answer: asyncio.Future[Any] | None = None
        self._busy.add(pool)
        try:
            call = pool.submit(_answer, function)
            answer = asyncio.wrap_future(call)
            await asyncio.wait({answer}, timeout=seconds)
            if not answer.done():
                raise DeadlineExceeded
            return answer.result()
        finally:
            if answer is not None:
                answer.cancel()
            self._busy.discard(pool)
            if call is not None and _process_is_idle(call):
                self._idle.append(pool)
            else:
                # A running call cannot be cancelled inside its process.
                kill_pool(pool)


def check_picklable(function: Callable[..., Any]) -> None:
    """Raises ConfigError for a function that cannot be sent to another process."""
    try:
        invoke(lambda: pickle.loads(pickle.dumps(function)))
    except Exception as error:  # pickle raises whatever the object's own hooks raise
        raise ConfigError(
            f"rollout.reward_processes sends the reward function to other processes, but {name_of(function)} cannot be "
            f"pickled ({explain(error)}); define it at the top level of a module, or set rollout.reward_processes=0"
        ) from error


def _process_is_idle(call: Future) -> bool:
    """Whether the call's process is alive and idle."""
    return call.cancelled() or (call.done() and not isinstance(call.exception(), BrokenProcessPool))


def _answer(function: Callable[[], Any]) -> Any:
    answer = answer_in_process(function)
    if inspect.isawaitable(answer):
        raise ForeignExit("it returned an awaitable, which cannot leave its process; write it as `async def`")
    return answer
