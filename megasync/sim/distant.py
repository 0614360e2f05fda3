"""The buffer's actor as its callers see it: calls take time and overtake each other, answers get lost, the process dies.

As with a Ray actor, a caller that gives up does not take its call back. As with `BufferHandle`, a call is made again when
its answer is lost or the process died under it, to the process that took its place with what is in the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megasync.buffer import AsyncBuffer
from megasync.sim.chance import Chance
from megasync.sim.laws import Laws

CALL_SECONDS = 0.002


class DistantBuffer:
    """The methods of `AsyncBuffer`, each as a remote call. A call that fails although nobody waits for it is reported."""

    def __init__(
        self,
        start: Callable[[], AsyncBuffer],
        chance: Chance,
        laws: Laws,
        on_orphan: Callable[[str, BaseException], None],
    ) -> None:
        self._start = start
        self._chance = chance
        self._laws = laws
        self._on_orphan = on_orphan
        self._claims = 0
        self._cut = False
        self._calls: set[asyncio.Task] = set()
        self._open()

    def _open(self) -> None:
        self._died = asyncio.Event()
        self.process = self._start()
        self._laws.watch(self.process._state)

    def crash(self) -> None:
        """kill -9: what was recorded stays, what was under way is gone."""
        before = self.process._state.counts()
        self._abandon()
        self._open()
        self._laws.note("the buffer has started again")
        self._laws.survives(before, self.process._state.counts())

    def cut(self) -> None:
        """The driver is gone, and with it everybody who could call, or hear an answer."""
        self._cut = True
        self._abandon()

    def _abandon(self) -> None:
        for call in self._calls:
            call.cancel()
        self._died.set()
        if self.process._durable.ledger is not None:
            self.process._durable.ledger.close()

    async def reclaim(self) -> str:
        self._claims += 1
        return await self._call("reclaim", f"claimant {self._claims}")

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            return await self._call(method, *args)

        return call

    async def _call(self, method: str, *args: Any) -> Any:
        about = f"{method} {getattr(args[0], 'uid', args[0])}" if args else method
        await self._travel(about)
        while True:
            if self._cut:
                await asyncio.Event().wait()
            if self._chance.happens("buffer dies", f"before {about}"):
                self.crash()
            answered, answer = await self._deliver(about, method, args)
            if answered and self._chance.happens("buffer dies", f"after {about}"):
                self.crash()
                continue
            await self._travel(about)
            if answered and not self._chance.happens("answer is lost", about):
                return answer

    async def _travel(self, about: str) -> None:
        await asyncio.sleep(self._chance.seconds("call", CALL_SECONDS, about))

    async def _deliver(self, about: str, method: str, args: tuple) -> tuple[bool, Any]:
        """Whether the process lived until it answered, and the answer."""
        call = asyncio.create_task(getattr(self.process, method)(*args), name=f"call {about}")
        death = asyncio.create_task(self._died.wait(), name=f"death during {about}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait({call, death}, return_when=asyncio.FIRST_COMPLETED)
            return (False, None) if death.done() else (True, call.result())
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._orphaned(about, done))
            raise
        finally:
            death.cancel()

    def _orphaned(self, about: str, call: asyncio.Task) -> None:
        if not call.cancelled() and call.exception() is not None:
            self._on_orphan(about, call.exception())
