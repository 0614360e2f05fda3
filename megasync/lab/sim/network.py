"""HTTP in virtual time: the subset of aiohttp that `RolloutClient` and `ServerControl` use, over simulated servers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from megasync.rollout.request_body import RequestBody
from megasync.serving.engine_protocol import ROUTING_KEY_HEADER

if TYPE_CHECKING:
    from megasync.lab.sim.chance import Chance
    from megasync.lab.sim.laws import Laws
    from megasync.lab.sim.servers import SimRouter, SimServer

ROUTER_URL = "http://router:1"
LATENCY_SECONDS = 0.003


class Answer:
    """An HTTP response, for the server that sends it and, as `aiohttp.ClientResponse`, for the client that reads it.

    Its body consists of chunks, then its end or a broken connection.
    """

    def __init__(self) -> None:
        self.status = 200
        self.content_type = "application/json"
        self.headers: dict[str, str] = {}
        self.ended = False
        self.broken = False
        # The client has closed the connection.
        self.left = False
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def send(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._changed.set()

    def end(self) -> None:
        self.ended = True
        self._changed.set()

    @property
    def content(self) -> Answer:
        return self

    @property
    def received(self) -> bool:
        """Whether the client has received the whole body."""
        return self.ended and not self.broken and not self._pieces

    def cut(self) -> None:
        """Break the connection. The client can still read chunks that were sent before."""
        if not self.ended:
            self.broken = self.ended = True
            self._changed.set()

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.iter_any()])

    async def iter_any(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self.broken:
                raise aiohttp.ClientPayloadError("the connection broke")
            if self.ended:
                return
            self._changed.clear()
            await self._changed.wait()


class Network:
    """Maps URLs to the simulated servers and the router."""

    def __init__(self, chance: Chance, laws: Laws) -> None:
        self.chance = chance
        self.laws = laws
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
        return self._exchange(url, data, (headers or {}).get(ROUTING_KEY_HEADER, ""), None)

    def request(
        self,
        method: str,
        url: str,
        *,
        data: bytes | RequestBody | None = None,
        timeout: aiohttp.ClientTimeout,
        **_: Any,
    ) -> AbstractAsyncContextManager[Answer]:
        return self._exchange(url, data, "", timeout.total)

    @asynccontextmanager
    async def _exchange(
        self, url: str, data: bytes | RequestBody | None, key: str, timeout: float | None
    ) -> AsyncGenerator[Answer]:
        """A request and its response. Leaving the context before the response has ended closes the connection."""
        async with asyncio.timeout(timeout):
            answer = await self._network.call(url, data, key)
        try:
            yield answer
        finally:
            if not answer.received:
                answer.left = True
                self._network.laws.unreported(key)

    async def close(self) -> None: ...


async def _begun(answer: Answer, body: dict[str, Any]) -> Answer:
    """Return the response once its head is available: at once for a stream, else with the whole body."""
    if body.get("stream"):
        answer.content_type = "text/event-stream"
        return answer
    try:
        return _done(await answer.read())
    except asyncio.CancelledError:
        answer.left = True
        raise


def _unreachable(url: str) -> aiohttp.ClientConnectorError:
    key: Any = SimpleNamespace(host=url, port=0, ssl=False, is_ssl=False)
    return aiohttp.ClientConnectorError(key, ConnectionRefusedError("connection refused"))


def _done(body: bytes, status: int = 200) -> Answer:
    answer = Answer()
    answer.status = status
    answer.send(body)
    answer.end()
    return answer


def json_answer(value: Any) -> Answer:
    return _done(orjson.dumps(value))


def failed_answer(status: int, text: str) -> Answer:
    return _done(text.encode(), status)
