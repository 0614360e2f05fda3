"""Reward for programs: 1.0 if the program in a completion passes all tests, or the share of tests that it passes.

The program is the last fenced code block of the completion; without one the score is 0.0. It runs in the sandbox
(`sandbox`), once per test. A row's `tests` column is either

- a list of {"input": text, "output": text}: the program reads the input and must print the output; trailing white space
  of lines and of the whole output is ignored; or
- Python text, such as assert statements, which uses the program's names and must run to its end. It runs in a separate
  sandbox (`sandbox_link`).

Invariant: the program can never read or change an expected output or a test result.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from megasync.concurrency.tasks import gather_or_cancel
from megasync.errors import DataError
from megasync.rewards.sandbox import Limits, isolation, network_is_cut, run_check, run_program, sweep

log = logging.getLogger(__name__)

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class CodeReward:
    """Scores each completion against its row's `tests`; None for rows without any.

    With `partial` the score is the share of tests passed instead of all or nothing. At most `parallel` programs run at
    once (default: the number of cores). With `require_no_network`, a kernel that cannot isolate the network is an error
    at start, otherwise a warning. The other options are the sandbox's `Limits`. Raises DataError for rows whose tests
    have neither form.
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
        self._swept = False
        if not network_is_cut():
            if require_no_network:
                raise TypeError(
                    "require_no_network=True, but this kernel does not allow unprivileged namespaces; enable them "
                    "(sysctl kernel.unprivileged_userns_clone=1 or user.max_user_namespaces), or run in a container "
                    "without network"
                )
            log.warning(
                "The code reward runs without namespaces, which this kernel does not allow: programs have network "
                "access, can read %s, and have no disk limit. See docs/rewards.md",
                "what every user can read"
                if isolation().own_user
                else "everything that you can, including this process's memory",
            )

    async def __call__(self, completions: Sequence[str], **columns: Any) -> list[float | None]:
        if "tests" not in columns:
            raise DataError(f"the code reward needs a tests column; the rows have {sorted(columns)}")
        if not self._swept:
            self._swept = True
            await sweep()
        pairs = zip(completions, columns["tests"], strict=True)
        return await gather_or_cancel(*(self._score(completion, tests) for completion, tests in pairs))

    async def _score(self, completion: str, tests: Any) -> float | None:
        checks = _checks(tests)
        if not checks:
            return None
        blocks = _BLOCK.findall(completion)
        if not blocks:
            return 0.0
        passed = 0
        for check in checks:
            if await self._passes(blocks[-1], check):
                passed += 1
            elif not self._partial:
                return 0.0
        return passed / len(checks)

    async def _passes(self, program: str, check: str | tuple[str, str]) -> bool:
        async with self._free:
            if isinstance(check, str):
                return await run_check(program, check, self._limits)
            stdin, expected = check
            result = await run_program(program, stdin, self._limits)
        return result.code == 0 and _lines(result.stdout) == _lines(expected)


def _checks(tests: Any) -> list[str | tuple[str, str]]:
    """The individual tests of a row; empty if it has none. Raises DataError for any other form."""
    if not tests:
        return []
    if isinstance(tests, str):
        return [tests]
    try:
        return [(str(test["input"]), str(test["output"])) for test in tests]
    except (TypeError, KeyError) as error:
        raise DataError(
            f'tests={tests!r:.200} must be Python text or a list of {{"input": ..., "output": ...}} ({error!r})'
        ) from error


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
