"""Reward for programs: 1.0 if the program in a completion passes all tests, or the share of tests that it passes.

`answer` finds the program, `tests` reads the row's `tests`. The program runs in the sandbox (`sandbox`), once
per test; test code runs in a sandbox of its own (`sandbox_check`).

Invariant: the program can never read or change an expected output or a test result.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.coding.answer import program_of
from megasync.coding.sandbox import Check, run_check, run_program
from megasync.coding.tests import COLUMNS, Run, read_tests
from megasync.concurrency.tasks import gather_or_cancel
from megasync.errors import DataError, SandboxError, raised_as
from megasync.sandboxes import Limits
from megasync.sandboxes.local import isolation, probe

log = logging.getLogger(__name__)


class CodeReward:
    """Scores each completion against its row's `tests`; None for rows without any.

    With `partial` the score is the share of tests passed instead of all or nothing. At most `parallel` programs run at
    once (default: the number of cores). With `require_no_network`, a kernel that cannot isolate the network is an error
    at start, otherwise a warning. The other options are the sandbox's `Limits`. Raises DataError for rows whose tests
    have no known form or cannot fail.
    """

    __name__ = "code"
    # Each program has a deadline of its own, which excludes the time in the queue.
    keeps_own_deadlines = True

    def __init__(
        self,
        *,
        partial: bool = False,
        parallel: int | None = None,
        require_no_network: bool = False,
        **limits: Any,
    ) -> None:
        self._partial = partial
        self._limits = Limits(**limits)
        if parallel is not None and parallel < 1:
            raise TypeError(f"parallel={parallel} must be at least 1")
        self._free = asyncio.Semaphore(parallel or os.cpu_count() or 1)
        with raised_as(TypeError, "the code reward cannot run programs on this machine", of=SandboxError):
            kind = isolation()
        if self._limits != Limits() and (problem := probe(kind, self._limits)):
            raise TypeError(f"no program can run within {self._limits}; raise the limits ({problem})")
        if not kind.namespaces:
            if require_no_network:
                raise TypeError(
                    "require_no_network=True, but this kernel does not allow unprivileged namespaces; enable them "
                    "(sysctl kernel.unprivileged_userns_clone=1 or user.max_user_namespaces), or run in a container "
                    "without network"
                )
            log.warning(
                "The code reward runs without namespaces, which this kernel does not allow: programs have network "
                "access, can read %s, and have no disk limit. See docs/code_reward.md",
                "what every user can read"
                if kind.own_user
                else "everything that you can, including this process's memory",
            )

    async def __call__(self, completions: Sequence[str], **columns: Any) -> list[float | None]:
        if "tests" not in columns:
            raise DataError(f"the code reward needs a tests column; the rows have {sorted(columns)}")
        tests = await asyncio.to_thread(self._read, len(completions), columns)
        # Equal responses to the same tests are run once: a group has many of them when the model is sure of its answer.
        keys = [(completion, id(own)) for completion, own in zip(completions, tests, strict=True)]
        runs = dict(zip(keys, zip(completions, tests, strict=True), strict=True))
        scores = await gather_or_cancel(*(self._score(*run) for run in runs.values()))
        found = dict(zip(runs, scores, strict=True))
        return [found[key] for key in keys]

    @staticmethod
    def check_row(row: Mapping[str, Any]) -> None:
        """Raises DataError for a row whose tests cannot be run."""
        if "tests" not in row:
            raise DataError(f"the code reward needs a tests column; the row has {sorted(row)}")
        read_tests(row["tests"], row)

    @staticmethod
    def _read(count: int, columns: Mapping[str, Any]) -> list[list[Run | Check]]:
        """The tests of each completion. Those of a group have the same row, whose tests are read once."""
        rows = [{name: values[n] for name, values in columns.items() if name in COLUMNS} for n in range(count)]
        read: list[list[Run | Check]] = []
        for n, row in enumerate(rows):
            same = n > 0 and all(value is rows[n - 1][name] for name, value in row.items())
            read.append(read[-1] if same else read_tests(row["tests"], row))
        return read

    async def _score(self, completion: str, tests: Sequence[Run | Check]) -> float | None:
        if not tests:
            return None
        names = {name for test in tests if isinstance(test, Check) for name in test.names}
        program = program_of(completion, names)
        if program is None:
            return 0.0
        passed = 0
        for test in tests:
            if await self._passes(program, test):
                passed += 1
            elif not self._partial:
                return 0.0
        return passed / len(tests)

    async def _passes(self, program: str, test: Run | Check) -> bool:
        async with self._free:
            if isinstance(test, Check):
                return await run_check(program, test, self._limits)
            result = await run_program(program, test.stdin, self._limits)
        return result.code == 0 and test.agrees(result.stdout)
