"""Rewards: calls the reward function once per group and puts its scores on the trajectories.

Invariant: a score that reaches a trajectory is a finite number or None; anything else (an exception, NaN, a wrong
number of scores, no answer in time) is a DataError that names the function and the prompt.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

from megasync.buffer.trajectory import Trajectory
from megasync.errors import ConfigError, DataError
from megasync.rollout.workflow import name_of

log = logging.getLogger(__name__)

# A call in the controller's own process holds up everything else; above this it is worth a word.
SLOW_SECONDS = 1.0


class RewardRunner:
    """Scores groups with `function(completions, **columns) -> list[float | None]`, sync or async.

    The columns are repeated once per completion; "completion_ids" (token ids) and "finish_reasons" come with them.
    None leaves a response unscored. Trajectories that the workflow scored itself keep their reward. `function` may be
    None when every workflow does that.

    With `processes` > 0 a sync function runs in that many worker processes; otherwise it runs in this one, where no
    deadline can be kept. `timeout` is in seconds, per call. Raises ConfigError when the function cannot be sent to
    another process.
    """

    def __init__(self, function: Callable[..., Any] | None, processes: int = 0, timeout: float = 60.0) -> None:
        self._function = function
        self._timeout = timeout
        self._processes = 0 if function is None or _is_async(function) else processes
        self._pool: ProcessPoolExecutor | None = None
        self._warned = False
        if self._processes:
            _check_picklable(function)

    async def score(
        self, trajectories: Sequence[Trajectory], columns: dict[str, Any], uid: str = ""
    ) -> list[Trajectory]:
        """The trajectories of one prompt with their rewards, in the same order. Raises DataError."""
        unscored = [t for t in trajectories if t.reward is None]
        scores = iter(await self._scores(unscored, columns, uid) if unscored and self._function else [])
        return [replace(t, reward=next(scores, None)) if t.reward is None else self._own(t, uid) for t in trajectories]

    async def close(self) -> None:
        """Ends the worker processes, also those in the middle of a call."""
        self._end_pool()

    async def _scores(self, trajectories: list[Trajectory], columns: dict[str, Any], uid: str) -> list[float | None]:
        count = len(trajectories)
        own = copy.deepcopy(columns)
        arguments = {name: [value] * count for name, value in own.items()}
        arguments["completion_ids"] = [list(t.response_ids) for t in trajectories]
        arguments["finish_reasons"] = [t.finish_reason for t in trajectories]
        try:
            answer = await self._call([t.text for t in trajectories], arguments)
        except TimeoutError as error:
            raise self._error(uid, f"did not answer within {self._timeout:g} s") from error
        except BrokenProcessPool as error:
            raise self._error(uid, "ended its worker process (out of memory, or a crash in native code)") from error
        except Exception as error:  # whatever a user's function raises
            raise self._error(uid, f"raised {type(error).__name__}: {error}") from error
        return self._checked(answer, count, uid)

    async def _call(self, completions: list[str], arguments: dict[str, list]) -> Any:
        if self._processes:
            return await self._call_in_pool(completions, arguments)
        started = time.monotonic()
        answer = self._function(completions, **arguments)
        if inspect.isawaitable(answer):
            return await asyncio.wait_for(answer, self._timeout)
        if (seconds := time.monotonic() - started) > SLOW_SECONDS and not self._warned:
            self._warned = True
            log.warning(
                "the reward function %s took %.1f s and held up the run meanwhile; set rollout.reward_processes",
                name_of(self._function),
                seconds,
            )
        return answer

    async def _call_in_pool(self, completions: list[str], arguments: dict[str, list]) -> Any:
        for attempt in (1, 2):
            pool = self._open_pool()
            call = asyncio.wrap_future(pool.submit(_invoke, self._function, completions, arguments))
            try:
                return await asyncio.wait_for(call, self._timeout)
            except TimeoutError:
                # A running call cannot be taken back, so its process goes, and with it the pool.
                self._end_pool(pool)
                raise
            except BrokenProcessPool:
                # Another group's call may have ended the pool; this one is to blame only if it does so again.
                self._end_pool(pool)
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # spawn: a fork of this process would copy its threads' locks and its sockets.
            self._pool = ProcessPoolExecutor(self._processes, multiprocessing.get_context("spawn"))
        return self._pool

    def _end_pool(self, pool: ProcessPoolExecutor | None = None) -> None:
        """Kills the pool, unless another call has replaced it already."""
        if self._pool is None or (pool is not None and pool is not self._pool):
            return
        ending, self._pool = self._pool, None
        workers = list((ending._processes or {}).values())
        for worker in workers:
            worker.kill()
        ending.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.join(timeout=5)

    def _own(self, trajectory: Trajectory, uid: str) -> Trajectory:
        """A reward that the workflow set itself; it must be a number too."""
        return replace(trajectory, reward=self._number(trajectory.reward, uid, "the workflow"))

    def _checked(self, answer: Any, count: int, uid: str) -> list[float | None]:
        try:
            scores = list(answer)
        except TypeError:
            raise self._error(uid, f"must return one score per completion, not {answer!r:.200}") from None
        if isinstance(answer, (str, dict)) or len(scores) != count:
            raise self._error(uid, f"must return {count} scores, one per completion, not {answer!r:.200}")
        source = f"the reward function {name_of(self._function)}"
        return [None if score is None else self._number(score, uid, source) for score in scores]

    @staticmethod
    def _number(score: Any, uid: str, source: str) -> float:
        try:
            number = float(score)
        except (TypeError, ValueError):
            raise DataError(f"{source} gave {score!r:.80} as a reward of prompt {uid}; it must be a number") from None
        if not math.isfinite(number):
            raise DataError(
                f"{source} gave {number} as a reward of prompt {uid}; use None to leave a response unscored"
            )
        return number

    def _error(self, uid: str, problem: str) -> DataError:
        return DataError(f"the reward function {name_of(self._function)} {problem} (prompt {uid})")


def _invoke(function: Callable[..., Any], completions: list[str], arguments: dict[str, list]) -> Any:
    return function(completions, **arguments)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_picklable(function: Callable[..., Any]) -> None:
    try:
        pickle.loads(pickle.dumps(function))
    except Exception as error:  # pickle raises whatever the object's own hooks raise
        raise ConfigError(
            f"rollout.reward_processes sends the reward function to other processes, but {name_of(function)} cannot be "
            f"pickled ({error}); define it at the top level of a module, or set rollout.reward_processes=0"
        ) from error
