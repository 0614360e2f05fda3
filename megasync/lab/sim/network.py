"""HTTP in virtual time: the subset of aiohttp that `RolloutClient` and `ServerControl` use, over simulated servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from megasync.lab.sim.answer import Answer, failed_answer, sent_answer
from megasync.lab.sim.chance import Chance
from megasync.lab.sim.invariants import Invariants
from megasync.lab.sim.servers import ROUTER_URL, SimRouter, SimServer
from megasync.rollout.client import RequestBody
from megasync.serving.plugin_protocol import ROUTING_KEY_HEADER

LATENCY_SECONDS = 0.003


class Network:
    """Maps URLs to the simulated servers and the router."""

    def __init__(self, chance: Chance, invariants: Invariants) -> None:
        self.chance = chance
        self.invariants = invariants
        self.servers: dict[str, SimServer] = {}
        self.router: SimRouter

    async def call(self, url: str, data: bytes | RequestBody | None, key: str) -> Answer:
        """Send a request and return its response. Raises aiohttp.ClientConnectionError if nothing listens there."""
        parts = urlsplit(url)
        base, body = f"{parts.scheme}://{parts.netloc}", orjson.loads(data.decode()) if data else {}
        await asyncio.sleep(self.chance.seconds("call", LATENCY_SECONDS, key or base))
        if base == ROUTER_URL:
            return await self._routed(body, key)
        if parts.path == "/generate":
            return await _begun(self._server(base).generate(body, key), body)
        return await self._server(base).answer(parts.path, body)

    async def _routed(self, body: dict[str, Any], key: str) -> Answer:
        """Route a request as the router does: 503 without a server, 500 if the server dies before it sends anything."""
        if not self.router.up:
            raise _unreachable(ROUTER_URL)
        if not self.router.listed:
            return failed_answer(503, "no server is available")
        server = self.servers[self.router.choose(self.chance.share(f"route {key}"))]
        try:
            return await _begun(self.router.register(server.generate(body, key)), body)
        except aiohttp.ClientError as error:
            if not self.router.up:
                raise
            return failed_answer(500, str(error))

    def _server(self, url: str) -> SimServer:
        server = self.servers[url]
        if server.gone.is_set():
            raise _unreachable(url)
        return server


class SimSession:
    """The part of `aiohttp.ClientSession` that the client and the control use."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def post(
        self, url: str, *, data: bytes | RequestBody | None = None, headers: Mapping[str, str] | None = None, **_: Any
    ) -> AbstractAsyncContextManager[Answer]:
        return self._exchange(url, data, (headers or {}).get(ROUTING_KEY_HEADER, ""))

    def request(
        self,
        method: str,
        url: str,
        *,
        data: bytes | RequestBody | None = None,
        **_: Any,
    ) -> AbstractAsyncContextManager[Answer]:
        return self._exchange(url, data, "")

    @asynccontextmanager
    async def _exchange(self, url: str, data: bytes | RequestBody | None, key: str) -> AsyncGenerator[Answer]:
        """A request and its response. Leaving the context before the response has ended closes the connection."""
        answer = await self._network.call(url, data, key)
        try:
            yield answer
        finally:
            if not answer.received:
                answer.left = True
                self._network.invariants.unreported(key)

    async def close(self) -> None: ...


async def _begun(answer: Answer, body: dict[str, Any]) -> Answer:
    """Return the response once its head is available: at once for a stream, else with the whole body."""
    if body.get("stream"):
        answer.content_type = "text/event-stream"
        return answer
    try:
        return sent_answer(await answer.read())
    except asyncio.CancelledError:
        answer.left = True
        raise


def _unreachable(url: str) -> aiohttp.ClientConnectorError:
    key: Any = SimpleNamespace(host=url, port=0, ssl=False, is_ssl=False)
    return aiohttp.ClientConnectorError(key, ConnectionRefusedError("connection refused"))
