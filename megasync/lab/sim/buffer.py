"""The driver's buffer in a simulated run. Its threads take virtual time, and the driver may die between their steps.

a worker's body written ──▶ change ──▶ driver's body and row written ──▶ answer
▲                       ▲          ▲                                 ▲
└───────────────────────┴──────────┴── a driver may die here ────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megasync.buffer import AsyncBuffer
from megasync.lab.sim.chance import Chance
from megasync.lab.sim.invariants import Invariants

WORK_SECONDS = 0.002


class SimThreads:
    """Replaces the threads of a buffer and of body writers. `die` ends the driver."""

    def __init__(self, chance: Chance, die: Callable[[], None] | None) -> None:
        self._chance = chance
        self._die = die
        self._cut = False

    def cut(self) -> None:
        """Nothing is written anymore: the process is dead."""
        self._cut = True

    async def __call__(self, work: Callable[[], Any]) -> Any:
        await self._pass("before")
        result = work()
        await self._pass("after")
        return result

    async def _pass(self, when: str) -> None:
        await asyncio.sleep(self._chance.seconds("call", WORK_SECONDS, "work"))
        if not self._cut and self._die is not None and self._chance.happens("driver dies", when):
            self.cut()
            self._die()
        if self._cut:
            await asyncio.Event().wait()


class SimBuffer(AsyncBuffer):
    """The real buffer, whose answers and events the invariants see."""

    def __init__(self, invariants: Invariants, threads: SimThreads, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, run=threads)
        self._invariants = invariants
        self._threads = threads
        invariants.watch(self._state)

    def cut(self) -> None:
        """The driver died. The lock on the ledger goes with it."""
        self._threads.cut()
        assert self._ledger is not None
        self._ledger.close()

    async def publish(self, version: int) -> None:
        await super().publish(version)
        self._invariants.buffer_publishes(version)

    async def of_worker(self, call: str, *arguments: Any) -> Any:
        if call == "save_partials":
            for uid, _, _ in arguments[0]:
                # A saved partial was taken before the final piece of its request, with the server's report of versions.
                self._invariants.unreported(uid)
        if call == "commit":
            self._invariants.commits(arguments[0])
        answer = await super().of_worker(call, *arguments)
        if answer is True:
            self._invariants.answered(call, arguments[0] if call == "drop" else arguments[0].uid)
        return answer
