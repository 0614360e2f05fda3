"""Calls the reward functions once per group and sets the combined reward of each trajectory.

Invariant: a score that reaches a trajectory is a finite number or None. Anything else (an exception, NaN, a wrong
number of scores, no answer in time) is a DataError that names the function and the prompt.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections import Counter, UserString
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from megasync.base.importing import name_of
from megasync.concurrency.foreign import DeadlineExceeded, explain, invoke, run, shown
from megasync.concurrency.threads import AllThreadsStuck, DaemonThreads
from megasync.data.rows import place
from megasync.errors import DataError, ServerError, raised_as
from megasync.observe import trace
from megasync.rewards.function import Given, RewardFunction, combine, combine_tokens, reward_functions
from megasync.rewards.processes import RewardProcesses, check_picklable
from megasync.trajectory import TOKEN_REWARDS, Trajectory, finite_float
from megasync.trajectory.runs import FloatArray

# Threads of one sync function that may be held by calls past their deadline.
THREADS = 8
# What can be iterated over, but has no scores, or none in the order of the responses.
_NO_SEQUENCE = (str, bytes, bytearray, memoryview, UserString, Mapping, Set)
# What Python says of an alarm outside the main thread.
NO_MAIN_THREAD = "signal only works in main thread"

# Of a response, or of its tokens: float32, NaN for those without one. None for a response that is not scored.
Score = float | FloatArray | None


class Failed(Enum):
    """In place of a score: the function failed at this response."""

    FAILED = "failed"


FAILED = Failed.FAILED


class InvalidScores(DataError):
    """A reward function gave no valid scores. Names the function and the prompt; `grader` is its name in metrics."""

    grader = ""


class RewardRunner:
    """Scores groups with functions `f(completions, **columns) -> list[Score]`, sync or async.

    A score is a number, None, or a list with a number or None for each token, whose sum is the number.

    `functions` is one function, several with weights, or None if every workflow scores its own trajectories. A reward
    that a workflow has set is kept. Columns are repeated once per completion, and "completion_ids" (token ids) and
    "finish_reasons" are added. `combine` turns several scores into one reward. Each trajectory's metrics get
    `reward/<name>`, absent if the function returned None, and `reward/<name>/none`, 1.0 in that case and 0.0 otherwise.

    With `processes` > 0, sync functions run in that many worker processes. Otherwise each has a thread of this one, in
    which its calls run one after the other; a call past its deadline is abandoned. `timeout` is in seconds, per call.
    Raises ConfigError when a function cannot be sent to another process.
    """

    def __init__(self, functions: Given | None, processes: int = 0, timeout: float = 60.0) -> None:
        self._functions = reward_functions(functions)
        self._timeout = timeout
        self._threads = DaemonThreads(THREADS, at_once=1)
        sync = [function for function in self._functions if not function.is_async]
        processes = processes or int(any(function.needs_main_thread for function in sync))
        self._processes = RewardProcesses(processes) if processes and sync else None
        if self._processes:
            for function in sync:
                check_picklable(function.call)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the functions by name, if there are several."""
        return {f.name: f.weight for f in self._functions} if len(self._functions) > 1 else {}

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        columns: dict[str, Any],
        uid: str = "",
        failed: Counter[str] | None = None,
    ) -> list[Trajectory]:
        """The trajectories of one prompt with their rewards, in the same order.

        With `failed`, responses at which alone a function fails, by a score that is no number or, if it is called for
        each response, by an error, are left without a reward, and counted there by the function's name. Raises
        DataError, or ServerError from a reward model whose servers do not answer.
        """
        unscored = [t for t in trajectories if t.reward is None]
        scored = iter(await self._scored(unscored, columns, uid, failed) if unscored and self._functions else unscored)
        return [
            next(scored) if t.reward is None else replace(t, reward=_number(t.reward, uid, "the workflow"))
            for t in trajectories
        ]

    def check_rows(self, rows: Sequence[Mapping[str, Any]], source: str) -> None:
        """Raises DataError for a row that a function's `check_row`, if it has one, refuses. `source` names the rows."""
        methods = (getattr(function.call, "check_row", None) for function in self._functions)
        checks = [check for check in methods if check is not None]
        for number, row in enumerate(rows if checks else ()):
            for check in checks:
                with raised_as(DataError, place(row, number, source), of=DataError):
                    invoke(check, row)

    async def close(self) -> None:
        """Ends the worker processes, including those in the middle of a call."""
        if self._processes:
            self._processes.close()

    async def _scored(
        self, trajectories: list[Trajectory], columns: dict[str, Any], uid: str, failed: Counter[str] | None
    ) -> list[Trajectory]:
        lenient = failed is not None
        calls = [self._scores(function, trajectories, columns, uid, lenient) for function in self._functions]
        # All of them end before the first error is raised, so that none keeps running.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        rewarded = []
        for trajectory, scores in zip(trajectories, zip(*answers, strict=True), strict=True):
            names = [f.name for f, score in zip(self._functions, scores, strict=True) if score is FAILED]
            if failed is not None:
                failed.update(names)
            # The other functions alone would make another reward of it.
            rewarded.append(trajectory if names else self._rewarded(trajectory, scores))
        return rewarded

    def _rewarded(self, trajectory: Trajectory, scores: Sequence[Score]) -> Trajectory:
        weights = [function.weight for function in self._functions]
        totals = [float(np.nansum(score)) if isinstance(score, np.ndarray) else score for score in scores]
        metrics, arrays = trajectory.metrics | self._metrics(totals), trajectory.arrays
        if (tokens := combine_tokens(weights, scores)) is not None:
            arrays = {**arrays, TOKEN_REWARDS: tokens}
        return replace(trajectory, reward=combine(weights, totals), metrics=metrics, arrays=arrays)

    def _metrics(self, scores: Sequence[float | None]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for function, score in zip(self._functions, scores, strict=True):
            metrics[f"reward/{function.name}/none"] = float(score is None)
            if score is not None:
                metrics[f"reward/{function.name}"] = score
        return metrics

    async def _scores(
        self, function: RewardFunction, trajectories: list[Trajectory], columns: dict[str, Any], uid: str, lenient: bool
    ) -> list[Score]:
        lengths = [len(t.response_ids) for t in trajectories]
        added = {
            "completion_ids": [t.response_ids.tolist() for t in trajectories],
            "finish_reasons": [t.finish_reason for t in trajectories],
        }
        work = partial(score_group, function, [t.text for t in trajectories], columns, added, lengths, uid, lenient)
        try:
            with trace.span("reward", function.name, responses=len(trajectories)):
                return await self._call(function, work)
        except InvalidScores as error:
            error.grader = function.name
            raise
        except ServerError:
            # It is not the fault of the function or the responses: the caller backs off and retries.
            raise
        except DeadlineExceeded as error:
            problem = f"did not answer within {self._timeout:g} s; raise timeouts.reward, or make it faster"
            raise _error(function, uid, problem) from error
        except AllThreadsStuck as error:
            problem = f"cannot be called: {error}; set rollout.reward_processes, where such calls are killed"
            raise _error(function, uid, problem) from error
        except BrokenProcessPool as error:
            problem = "ended its worker process (out of memory, or a crash in native code)"
            raise _error(function, uid, problem) from error
        except Exception as error:  # whatever a user's function raises
            said = explain(error)
            hint = "; set rollout.reward_processes, whose processes call it on their main thread"
            raise _error(function, uid, f"raised {said}{hint if NO_MAIN_THREAD in said else ''}") from error

    async def _call(self, function: RewardFunction, work: partial[Any]) -> list[Score]:
        name = f"the reward function {name_of(function.call)}"
        timeout = None if function.keeps_own_deadlines else self._timeout
        if function.is_async:
            return await run(_read, name, timeout, work)
        if self._processes:
            return await self._processes.call(work, self._timeout)
        answer = await self._threads.call(work, name, timeout)
        # A sync function may return an awaitable, such as a lambda around an async one.
        return await run(_read, name, timeout, lambda: answer) if inspect.isawaitable(answer) else answer


def score_group(
    function: RewardFunction,
    completions: Sequence[str],
    columns: Mapping[str, Any],
    added: Mapping[str, Sequence[Any]],
    lengths: Sequence[int],
    uid: str,
    lenient: bool = False,
) -> list[Score] | Awaitable[list[Score]]:
    """The scores of a group, of responses of these numbers of tokens; an awaitable of them from an async function.

    All that touches the function's answer happens here, where the function may run: a generator, or an object's
    `__float__`, is its code as well. What is returned is plain data.
    """
    # A copy, so that a function cannot change the columns for others.
    repeated = {name: [value] * len(completions) for name, value in copy.deepcopy(dict(columns)).items()}
    answer = function.convention.call(function.call, list(completions), {**repeated, **added})
    if not inspect.isawaitable(answer):
        return _checked(function, answer, lengths, uid, lenient)

    async def later() -> list[Score]:
        return _checked(function, await answer, lengths, uid, lenient)

    return later()


async def _read(work: Callable[[], Awaitable[list[Score]]]) -> list[Score]:
    return await work()


def _checked(function: RewardFunction, answer: Any, lengths: Sequence[int], uid: str, lenient: bool) -> list[Score]:
    """The scores as plain data. Raises InvalidScores, or the error in place of a score.

    With `lenient`, an invalid score, or an error, is FAILED if another score is valid.
    """
    count = len(lengths)
    try:
        items = iter(answer)
    except TypeError:
        raise _error(function, uid, f"must return one score per completion, not {shown(answer)}") from None
    scores = list(islice(items, count + 1))
    if isinstance(answer, _NO_SEQUENCE) or len(scores) != count:
        raise _error(function, uid, f"must return {count} scores, one per completion, not {shown(answer)}")
    source = f"the reward function {name_of(function.call)}"
    checked: list[Any] = []
    failures: list[Exception] = []
    for score, length in zip(scores, lengths, strict=True):
        try:
            checked.append(_one(score, length, uid, source))
        except Exception as error:
            if not lenient:
                raise
            checked.append(FAILED)
            failures.append(error)
    if failures and all(score is None or score is FAILED for score in checked):
        raise failures[0]
    return checked


def _one(score: Any, length: int, uid: str, source: str) -> Score:
    if score is None:
        return None
    if isinstance(score, Exception):
        raise score
    if isinstance(score, list | tuple) or getattr(score, "ndim", 0):
        return _of_tokens(score, length, uid, source)
    return _number(score, uid, source)


def _of_tokens(score: Any, length: int, uid: str, source: str) -> FloatArray:
    """The rewards of a response's tokens, NaN where the function gave None."""
    values: list[Any] = score.tolist() if hasattr(score, "tolist") else list(score)
    if len(values) != length:
        raise InvalidScores(
            f"{source} returned {len(values)} rewards of tokens for prompt {uid}, but the response has {length} "
            f"tokens; return one number for each of completion_ids, or one for the response"
        )
    return np.array([math.nan if value is None else _number(value, uid, source) for value in values], np.float32)


def _number(score: Any, uid: str, source: str) -> float:
    if (number := finite_float(score)) is None:
        raise InvalidScores(
            f"{source} returned the reward {shown(score, 80)} for prompt {uid}; it must be a finite number, or None to "
            f"leave a response unscored"
        )
    return number


def _error(function: RewardFunction, uid: str, problem: str) -> InvalidScores:
    error = InvalidScores(f"the reward function {name_of(function.call)} {problem} (prompt {uid})")
    error.grader = function.name
    return error
