"""Servers and a router that exist in virtual time only, as processes and as what answers under their URLs.

They stand behind the real fleet: it starts them, probes them, tells the router of them, and buries them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from megasync.errors import ServerError
from megasync.sim.chance import Chance
from megasync.sim.laws import INITIAL, Laws, Weights

START_SECONDS, ROUTER_SECONDS, ANSWER_SECONDS = 0.6, 0.2, 0.005


class SimServer:
    """A process (`start`, `alive`, `tail`, `stop`) with an address. `weights` is None while it holds a mixture."""

    def __init__(self, url: str, chance: Chance, laws: Laws) -> None:
        self.url = url
        self.version = 0
        self.weights: Weights | None = INITIAL
        self.gone = asyncio.Event()
        self._chance = chance
        self._laws = laws
        self._wedged = False
        self._requests: set[asyncio.Task] = set()
        self._running = asyncio.Event()
        self._running.set()

    # As the fleet's process

    async def start(self, timeout: float) -> str:
        await asyncio.sleep(self._chance.seconds("generate", START_SECONDS, self.url))
        if self._chance.happens("server dies while it starts", self.url):
            self.gone.set()
            raise ServerError(f"{self.url} died while it started")
        self._laws.note(f"{self.url} is up")
        return self.url

    async def alive(self) -> bool:
        await asyncio.sleep(ANSWER_SECONDS)
        return not self.gone.is_set()

    async def tail(self, lines: int) -> str:
        return "killed"

    async def stop(self, timeout: float) -> None:
        self.kill()

    # As the victim

    def kill(self) -> None:
        if not self.gone.is_set():
            self._laws.note(f"{self.url} is gone")
            self.gone.set()

    def wedge(self) -> None:
        """Its scheduler stands still, its HTTP process answers."""
        self._wedged = True

    # As the weight sync sees it

    def pause(self) -> None:
        self._running.clear()

    def go_on(self) -> None:
        self._running.set()

    # As a client sees it

    async def sample(self, seconds: float) -> int:
        """One token; the version that it was sampled by. Raises ServerError when it is aborted or the server goes."""
        if self.gone.is_set():
            raise ServerError(f"{self.url} refuses the connection")
        request = asyncio.create_task(self._sample(seconds), name=f"request at {self.url}")
        gone = asyncio.create_task(self.gone.wait(), name=f"end of {self.url}")
        self._requests.add(request)
        try:
            await asyncio.wait({request, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() or request.cancelled():
                raise ServerError(f"{self.url} gave the request up")
            request.result()
            self._laws.serves(self.url, self.version, self.weights)
            return self.version
        finally:
            self._requests.discard(request)
            request.cancel()
            gone.cancel()

    async def _sample(self, seconds: float) -> None:
        if self._wedged:
            await self.gone.wait()
        await asyncio.sleep(seconds)
        await self._running.wait()

    def abort(self) -> None:
        if not self._wedged:
            for request in self._requests:
                request.cancel()

    @property
    def busy(self) -> int:
        return len(self._requests)

    async def answer(self, path: str, timeout: float) -> Any:
        """What the HTTP process says; only what needs the scheduler waits for it."""
        await asyncio.sleep(ANSWER_SECONDS)
        if self._wedged and path == "/server_info":
            await asyncio.sleep(timeout)
            raise ServerError(f"{self.url}{path}: no answer within {timeout:g} s")
        if self.gone.is_set():
            raise ServerError(f"{self.url} refuses the connection")
        if path == "/abort_request":
            self.abort()
        rank = {"token_usage": 0.0, "num_running_reqs": self.busy, "num_waiting_reqs": 0}
        return {"loads": [rank]}


class SimControl:
    """`ServerControl` of a simulated server."""

    def __init__(self, server: SimServer) -> None:
        self.server = server
        self.url = server.url

    async def get(self, path: str, timeout: float = 60.0) -> Any:
        return await self.server.answer(path, timeout)

    async def post(self, path: str, body: dict | None = None, timeout: float = 60.0) -> Any:
        return await self.server.answer(path, timeout)

    async def close(self) -> None: ...


class SimRouter:
    """The router's process and its list, which outlives no restart."""

    def __init__(self, chance: Chance, laws: Laws) -> None:
        self.listed: set[str] = set()
        self._up = False
        self._starts = 0
        self._chance = chance
        self._laws = laws

    async def start(self, timeout: float) -> str:
        self._starts += 1
        self.listed.clear()
        await asyncio.sleep(self._chance.seconds("generate", ROUTER_SECONDS, f"router {self._starts}"))
        self._up = True
        return "http://router:1"

    async def alive(self) -> bool:
        return self._up

    async def tail(self, lines: int) -> str:
        return "killed"

    async def stop(self, timeout: float) -> None:
        self.kill()

    def kill(self) -> None:
        self._up = False

    async def adjust(self, wanted: Collection[str]) -> bool:
        """As `RouterMembers`: what is asked for is there when it is looked at the next time."""
        await asyncio.sleep(ANSWER_SECONDS)
        if not self._up:
            raise ServerError("the router refuses the connection")
        settled = self.listed == set(wanted)
        self.listed = set(wanted)
        return settled

    async def close(self) -> None: ...

    def choose(self, number: float) -> str:
        """The server that a request goes to; `number` is in [0, 1). Raises ServerError."""
        if not self._up or not self.listed:
            raise ServerError("the router has no server" if self._up else "the router refuses the connection")
        return sorted(self.listed)[int(number * len(self.listed))]
