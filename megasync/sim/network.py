"""HTTP in virtual time: the subset of aiohttp that `RolloutClient` and `ServerControl` use, over simulated servers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from megasync.serving.router import ROUTING_KEY_HEADER

if TYPE_CHECKING:
    from megasync.sim.chance import Chance
    from megasync.sim.laws import Laws
    from megasync.sim.servers import SimRouter, SimServer

ROUTER_URL = "http://router:1"
LATENCY_SECONDS = 0.003


class Answer:
    """The server's side of an HTTP response: chunks of the body, then its end or a broken connection."""

    def __init__(self) -> None:
        self.status = 200
        self.content_type = "application/json"
        self.broken = False
        # The client has closed the connection.
        self.left = False
        self._pieces: deque[bytes] = deque()
        self.ended = False
        self._news = asyncio.Event()

    def send(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._news.set()

    def end(self) -> None:
        self.ended = True
        self._news.set()

    @property
    def read(self) -> bool:
        """Whether the client has received the whole body."""
        return self.ended and not self.broken and not self._pieces

    def cut(self) -> None:
        """Break the connection. The client can still read chunks that were sent before."""
        if not self.ended:
            self.broken = self.ended = True
            self._news.set()

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self.broken:
                raise aiohttp.ClientPayloadError("the connection broke")
            if self.ended:
                return
            self._news.clear()
            await self._news.wait()


class Network:
    """Maps URLs to the simulated servers and the router."""

    def __init__(self, chance: Chance, laws: Laws) -> None:
        self._chance = chance
        self.laws = laws
        self.servers: dict[str, SimServer] = {}
        self.router: SimRouter

    async def call(self, url: str, data: bytes | None, key: str) -> _Response:
        """Send a request and return its response. Raises aiohttp.ClientConnectionError if nothing listens there."""
        parts = urlsplit(url)
        base, body = f"{parts.scheme}://{parts.netloc}", orjson.loads(data) if data else {}
        await asyncio.sleep(self._chance.seconds("call", LATENCY_SECONDS, key or base))
        if base == ROUTER_URL:
            answer = await self._routed(body, key)
        elif parts.path == "/generate":
            answer = await _begun(self._server(base).generate(body, key), body)
        else:
            answer = await self._server(base).answer(parts.path, body)
        return _Response(url, answer)

    async def _routed(self, body: dict[str, Any], key: str) -> Answer:
        """Route a request as the router does: 503 without a server, 500 if the server dies before it sends anything."""
        if not self.router.up:
            raise _unreachable(ROUTER_URL)
        if not self.router.listed:
            return _failed(503, "no server is available")
        server = self.servers[self.router.choose(self._chance.share(f"route {key}"))]
        try:
            return await _begun(self.router.carries(server.generate(body, key)), body)
        except aiohttp.ClientError as error:
            if not self.router.up:
                raise
            return _failed(500, str(error))

    def _server(self, url: str) -> SimServer:
        server = self.servers[url]
        if server.gone.is_set():
            raise _unreachable(url)
        return server


class SimSession:
    """The part of `aiohttp.ClientSession` that the client and the control use."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def post(self, url: str, *, data: bytes | None = None, headers: dict[str, str] | None = None, **_: Any) -> _Call:
        key = (headers or {}).get(ROUTING_KEY_HEADER, "")
        return _Call(self._network, url, data, key, None)

    def request(
        self, method: str, url: str, *, data: bytes | None = None, timeout: aiohttp.ClientTimeout, **_: Any
    ) -> _Call:
        return _Call(self._network, url, data, "", timeout.total)

    async def close(self) -> None: ...


class _Call:
    """An HTTP request. Leaving its context before the response has ended closes the connection."""

    def __init__(self, network: Network, url: str, data: bytes | None, key: str, timeout: float | None) -> None:
        self._network = network
        self._url = url
        self._data = data
        self._key = key
        self._timeout = timeout
        self._response: _Response | None = None

    async def __aenter__(self) -> _Response:
        async with asyncio.timeout(self._timeout):
            self._response = await self._network.call(self._url, self._data, self._key)
        return self._response

    async def __aexit__(self, *_: object) -> None:
        if not self._response.answer.read:
            self._response.answer.left = True
            self._network.laws.unheard(self._key)


class _Response:
    """The part of `aiohttp.ClientResponse` that the client and the control use."""

    def __init__(self, url: str, answer: Answer) -> None:
        self.url = url
        self.answer = answer
        self.content = self
        self.headers: dict[str, str] = {}

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def content_type(self) -> str:
        return self.answer.content_type

    async def read(self) -> bytes:
        return await self.answer.whole()

    def iter_any(self) -> AsyncIterator[bytes]:
        return self.answer.pieces()


async def _begun(answer: Answer, body: dict[str, Any]) -> Answer:
    """Return the response once its head is available: at once for a stream, else with the whole body."""
    if body.get("stream"):
        answer.content_type = "text/event-stream"
        return answer
    try:
        return _done(await answer.whole())
    except asyncio.CancelledError:
        answer.left = True
        raise


def _unreachable(url: str) -> aiohttp.ClientConnectorError:
    key: Any = SimpleNamespace(host=url, port=0, ssl=False, is_ssl=False)
    return aiohttp.ClientConnectorError(key, ConnectionRefusedError("connection refused"))


def _done(body: bytes) -> Answer:
    answer = Answer()
    answer.send(body)
    answer.end()
    return answer


def _failed(status: int, text: str) -> Answer:
    answer = _done(text.encode())
    answer.status = status
    return answer


def said(value: Any, status: int = 200) -> Answer:
    """Build a complete JSON response."""
    answer = _done(orjson.dumps(value))
    answer.status = status
    return answer
