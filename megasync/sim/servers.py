"""Servers that hold a version of the weights, die, wedge and start again; and the fleet that looks after them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from megasync.errors import ServerError
from megasync.sim.chance import Chance
from megasync.sim.laws import INITIAL, Laws, Weights

START_SECONDS, BACKOFF_SECONDS = 0.6, 0.2
# A wedged server answers its probes; only its silent requests give it away.
WEDGED_SECONDS = 4.0
RESTARTS = 6
SYNC_FAILURES = 2


class SimServer:
    """`weights` is None while it holds a mixture. It generates unless it is paused, wedged or gone."""

    def __init__(self, url: str, laws: Laws) -> None:
        self.url = url
        self.version = 0
        self.weights: Weights | None = INITIAL
        self.serves = False
        self.sync_failures = 0
        self.gone = asyncio.Event()
        self._laws = laws
        self._running = asyncio.Event()
        self._running.set()
        self.wedged = False

    def pause(self) -> None:
        self._running.clear()

    def go_on(self) -> None:
        self._running.set()

    async def answer(self, seconds: float) -> int:
        """Samples a token; the version that it was sampled by. Raises ServerError when the server goes under it."""
        if not self.gone.is_set():
            done = asyncio.create_task(self._sample(seconds), name=f"sampling {self.url}")
            gone = asyncio.create_task(self.gone.wait(), name=f"gone {self.url}")
            try:
                await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
                if done.done() and self.serves:
                    self._laws.serves(self.url, self.version, self.weights)
                    return self.version
            finally:
                done.cancel()
                gone.cancel()
        raise ServerError(f"{self.url} went away")

    async def _sample(self, seconds: float) -> None:
        if self.wedged:
            await self.gone.wait()
        await asyncio.sleep(seconds)
        await self._running.wait()


class SimFleet:
    """The controller's `Fleet`. `on_up` and `on_gone` tell the weight sync who can be reached."""

    def __init__(self, servers: int, life: int, chance: Chance, laws: Laws) -> None:
        self._chance = chance
        self._laws = laws
        self._count = servers
        self._life_number = life
        self._up: dict[int, SimServer] = {}
        self._lives: list[asyncio.Task] = []
        self._retired: set[int] = set()
        self._change = asyncio.Event()
        self.on_up: Callable[[SimServer], None] = lambda server: None
        self.on_gone: Callable[[str], None] = lambda url: None

    def start(self) -> None:
        """All servers are up and hold the initial weights."""
        for index in range(self._count):
            self._add(index, 0)
            self._lives.append(asyncio.create_task(self._life(index), name=f"server {index}"))

    async def stop(self) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    def up(self) -> list[SimServer]:
        return [self._up[index] for index in sorted(self._up)]

    def serving(self) -> list[SimServer]:
        return [server for server in self.up() if server.serves]

    def joiners(self) -> list[SimServer]:
        return [server for server in self.up() if not server.serves]

    async def changed(self) -> None:
        await self._change.wait()
        self._change.clear()

    async def joined(self, urls: Collection[str]) -> None:
        for server in self.joiners():
            if server.url in urls:
                server.serves, server.sync_failures = True, 0
                self._laws.note(f"{server.url} joins at version {server.version}")

    async def sync_failed(self, reasons: Mapping[str, str]) -> None:
        for server in self.up():
            if server.url in reasons:
                server.serves = False
                server.sync_failures += 1
                if server.sync_failures >= SYNC_FAILURES:
                    server.gone.set()
        self._change.set()

    async def watch(self) -> None:
        for life in self._lives:
            if life.done() and not life.cancelled() and life.exception() is not None:
                raise life.exception()
        if len(self._retired) == self._count:
            raise ServerError("no server has a restart left")

    def _add(self, index: int, start: int) -> SimServer:
        server = self._up[index] = SimServer(f"server-{self._life_number}.{index}.{start}", self._laws)
        self._laws.note(f"{server.url} is up")
        self.on_up(server)
        self._change.set()
        return server

    async def _life(self, index: int) -> None:
        for start in range(1, RESTARTS + 1):
            server = self._up[index]
            await server.gone.wait()
            del self._up[index]
            self._laws.note(f"{server.url} is gone")
            self.on_gone(server.url)
            self._change.set()
            await asyncio.sleep(BACKOFF_SECONDS * start)
            about = f"start {self._life_number}.{index}.{start}"
            await asyncio.sleep(self._chance.seconds("generate", START_SECONDS, about))
            server = self._add(index, start)
            if self._chance.happens("server dies while it starts", about):
                server.gone.set()
        await self._up[index].gone.wait()
        self.on_gone(self._up.pop(index).url)
        self._retired.add(index)
        self._change.set()

    def wedge(self, server: SimServer) -> None:
        server.wedged = True
        asyncio.get_running_loop().call_later(WEDGED_SECONDS, server.gone.set)
