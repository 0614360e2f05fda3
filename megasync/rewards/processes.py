"""Worker processes for reward functions that burn CPU, or that need a main thread for their own timeouts.

Invariant: a call that runs past its deadline is ended with its process, and at most `processes` calls are handed over at
once, so that no call's deadline runs while it waits behind others. A process that dies takes the whole pool with it; whose
call killed it shows when each of them is made again in a process of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megasync.errors import ConfigError
from megasync.process_pool import kill_pool
from megasync.rollout.workflow import name_of


class RewardProcesses:
    """Runs `function(completions, **arguments)` in one of `processes` processes, on its main thread."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        # Pools of one process, for calls that are made again.
        self._alone: set[ProcessPoolExecutor] = set()
        self._free = asyncio.Semaphore(processes)

    async def call(
        self, function: Callable[..., Any], completions: list[str], arguments: dict[str, list], timeout: float
    ) -> Any:
        """Raises TimeoutError after `timeout` seconds of the call's own, BrokenProcessPool when it ends its process."""
        async with self._free:
            if self._pool is None:
                self._pool = _pool_of(self._processes)
            pool = self._pool
            try:
                return await _within(timeout, pool, function, completions, arguments)
            except TimeoutError:
                # A running call cannot be taken back, so its process goes, and with it the pool.
                self._end(pool)
                raise
            except BrokenProcessPool:
                # Another group's call may have ended the pool, and will do so again.
                self._end(pool)
            alone = _pool_of(1)
            self._alone.add(alone)
            try:
                return await _within(timeout, alone, function, completions, arguments)
            finally:
                self._alone.discard(alone)
                kill_pool(alone)

    def close(self) -> None:
        """Ends the processes, also those in the middle of a call."""
        if self._pool is not None:
            self._end(self._pool)
        for alone in self._alone:
            kill_pool(alone)

    def _end(self, pool: ProcessPoolExecutor) -> None:
        """Kills the pool, unless another call has replaced it already."""
        if pool is not self._pool:
            return
        self._pool = None
        kill_pool(pool)


def check_picklable(function: Callable[..., Any]) -> None:
    """Raises ConfigError for a function that cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(function))
    except Exception as error:  # pickle raises whatever the object's own hooks raise
        raise ConfigError(
            f"rollout.reward_processes sends the reward function to other processes, but {name_of(function)} cannot be "
            f"pickled ({error}); define it at the top level of a module, or set rollout.reward_processes=0"
        ) from error


def _pool_of(processes: int) -> ProcessPoolExecutor:
    # spawn: a fork of this process would copy its threads' locks and its sockets.
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))


async def _within(
    seconds: float,
    pool: ProcessPoolExecutor,
    function: Callable[..., Any],
    completions: list[str],
    arguments: dict[str, list],
) -> Any:
    call = asyncio.wrap_future(pool.submit(_invoke, function, completions, arguments))
    return await asyncio.wait_for(call, seconds)


def _invoke(function: Callable[..., Any], completions: list[str], arguments: dict[str, list]) -> Any:
    return function(completions, **arguments)
