"""The buffer's actor as its callers see it: calls take time and get reordered, replies get lost, and the process dies.

As with a Ray actor, cancelling the caller does not cancel the call. As with `RemoteBuffer`, a call is retried when its
reply is lost or the process dies during it. The retry reaches the replacement process, which has restored the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from megasync.buffer import AsyncBuffer
from megasync.buffer.payload import EncodedPartial
from megasync.buffer.state import BufferCounts
from megasync.cluster.remote_buffer import RemoteBuffer
from megasync.errors import LedgerError
from megasync.lab.sim.chance import Chance
from megasync.lab.sim.invariants import Invariants

CALL_SECONDS = 0.002


class DistantBuffer(RemoteBuffer):
    """`RemoteBuffer` over simulated calls. `on_orphan` receives the errors of calls whose callers were cancelled."""

    def __init__(
        self,
        start: Callable[[], AsyncBuffer],
        chance: Chance,
        invariants: Invariants,
        on_orphan: Callable[[str, BaseException], None],
    ) -> None:
        self._start_process = start
        self._chance = chance
        self._invariants = invariants
        self._on_orphan = on_orphan
        self._claims = 0
        self._cut = False
        self._calls: set[asyncio.Task[Any]] = set()
        # The buffer's counts when it was killed.
        self._before: BufferCounts | None = None
        # Whether the ledger failed to record a change.
        self.unrecorded = False
        self._open()

    def _open(self) -> None:
        self._died = asyncio.Event()
        self.process = self._start_process()
        self._opened = False

    def _ready(self) -> None:
        """Restore the ledger at the first call. If that fails, the next call tries again. Raises LedgerError."""
        if self._opened:
            return
        state = self.process._state
        self._opened = True
        self._invariants.watch(state)
        if self._before is not None:
            self._invariants.survives(self._before, state.counts())

    def crash(self) -> None:
        """Kill the process as kill -9 does: recorded changes survive, calls in flight are lost."""
        sound = self._opened and not self.unrecorded
        self._before = self.process._state.counts() if sound else None
        self._abandon()
        self._open()
        self._invariants.note("the buffer has started again")

    def cut(self) -> None:
        """Cancel all calls because the driver died. No caller remains, neither to call nor to receive a reply."""
        self._cut = True
        self._abandon()

    def _abandon(self) -> None:
        for call in self._calls:
            call.cancel()
        self._died.set()
        # The attribute exists only after the process's first call.
        if (durable := vars(self.process).get("_durable")) is not None:
            durable.ledger.close()

    async def reclaim(self) -> str:
        self._claims += 1
        return await self._call("reclaim", f"claimant {self._claims}")

    async def save_partials(self, partials: dict[tuple[str, int, int], EncodedPartial]) -> None:
        for uid, _, _ in partials:
            # A saved partial was taken before the final piece of its request, with the server's report of versions.
            self._invariants.unreported(uid)
        await super().save_partials(partials)

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        # The key omits the reason of `close`: it may contain the run directory, whose name differs in each process.
        named = arguments and method != "close"
        about = f"{method} {getattr(arguments[0], 'uid', arguments[0])}" if named else method
        await self._travel(about)
        while True:
            if self._cut:
                await asyncio.Event().wait()
            if self._chance.happens("buffer dies", f"before {about}"):
                self.crash()
            request = partial(getattr(self.process, method), *arguments, **options)
            answered, answer = await self._deliver(about, request)
            if answered and self._chance.happens("buffer dies", f"after {about}"):
                self.crash()
                continue
            await self._travel(about)
            if answered and not self._chance.happens("answer is lost", about):
                return answer

    async def _travel(self, about: str) -> None:
        await asyncio.sleep(self._chance.seconds("call", CALL_SECONDS, about))

    async def _deliver(self, about: str, request: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[bool, Any]:
        """Return whether the process survived until it replied, and its reply."""
        self._ready()
        call = asyncio.create_task(request(), name=f"call {about}")
        death = asyncio.create_task(self._died.wait(), name=f"death during {about}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait({call, death}, return_when=asyncio.FIRST_COMPLETED)
            return (False, None) if death.done() else (True, call.result())
        except LedgerError:
            self.unrecorded = True
            raise
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._orphaned(about, done))
            raise
        finally:
            death.cancel()

    def _orphaned(self, about: str, call: asyncio.Task[Any]) -> None:
        if not call.cancelled() and (error := call.exception()) is not None:
            self._on_orphan(about, error)
