"""A client for control calls to one server or to the router: JSON in and out, errors that name the call.

Calls go straight to the server, never through the router, which forwards generation only. HTTP sessions open on the
event loop of the first calls; `close`, or the end of an `async with`, closes them there, for good. Calls to a closed
control raise ServerError.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

import aiohttp
import orjson

from megasync.errors import HttpStatusError, InvalidAnswer, ServerError, raised_as
from megasync.serving.answers import read_bounded

# Idle seconds after which a connection is not reused. SGLang and the router close it after 5 s.
_KEEPALIVE_SECONDS = 3.0
# Characters of a refused answer that go into the error.
_BODY_SHOWN = 500
# The largest answer, in bytes: the layout of one rank of a very large model takes about ten million.
_MOST_BYTES = 1 << 28


class ServerControl:
    """Calls that pause one SGLang server, load its weights and query its state."""

    def __init__(self, url: str, api_key: str | None = None, trust: ssl.SSLContext | None = None) -> None:
        """`trust` verifies an https URL; the system's certificate authorities by default."""
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._trust = trust
        # By whether connections are reused.
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"ServerControl({self.url})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 60.0) -> Any:
        """The parsed JSON answer, or its text when it is not JSON. `timeout` is in seconds.

        Raises:
            HttpStatusError: the server answered with an error status.
            InvalidAnswer: the answer is too long.
            ServerError: no answer within `timeout`, or the connection failed.
        """
        return await self._request("POST", path, body or {}, timeout)

    async def get(self, path: str, timeout: float = 60.0) -> Any:
        """Like `post`."""
        return await self._request("GET", path, None, timeout)

    async def delete(self, path: str, timeout: float = 60.0) -> Any:
        """Like `post`."""
        return await self._request("DELETE", path, None, timeout)

    def stream(self, path: str, body: Mapping[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The response to a POST, to be read while it arrives. Raises like `post`; the caller sets the deadline."""
        return self._respond("POST", path, body, timeout=None)

    async def weight_version(self, timeout: float = 60.0) -> int:
        """The version of the weights that the server holds, by its own report. Raises like `post`."""
        info = await self.get("/model_info", timeout)
        try:
            return int(info["weight_version"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidAnswer(f"{self.url}/model_info has no integer weight_version: {info!r:.500}") from error

    async def close(self) -> None:
        self._closed = True
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        async with self._respond(method, path, body, timeout) as response:
            raw = await _body(response, f"{method} {self.url}{path}")
        try:
            return orjson.loads(raw) if raw else ""
        except orjson.JSONDecodeError:
            return raw.decode("utf-8", "replace")

    @asynccontextmanager
    async def _respond(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a call with a status of success; its body is still to be read."""
        call = f"{method} {self.url}{path}"
        if self._closed:
            raise ServerError(f"{call}: the server is gone, or no longer part of the run")
        try:
            # Not the timeout of aiohttp: where that ends together with the caller's own, it takes the caller's away.
            async with (
                asyncio.timeout(timeout),
                self._open(reuse=method == "GET").request(
                    method,
                    self.url + path,
                    data=None if body is None else orjson.dumps(body),
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response,
            ):
                if response.status >= 400:
                    shown = (await _body(response, call))[:_BODY_SHOWN].decode("utf-8", "replace")
                    raise HttpStatusError(f"{call}: status {response.status}: {shown}", response.status)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            late = timeout is not None and isinstance(error, TimeoutError)
            problem = f"no answer within {timeout:g} s" if late else f"{type(error).__name__}: {error}"
            raise ServerError(f"{call}: {problem}") from error

    def _open(self, reuse: bool) -> aiohttp.ClientSession:
        # Created here and not in __init__: a session belongs to the event loop that is running when it is created.
        if reuse not in self._sessions:
            headers = {"Content-Type": "application/json"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            # Servers close idle connections, and a call that meets a closing one fails although nothing is wrong.
            # aiohttp repeats a GET then, so probes reuse connections, at half the cost. Anything else gets its own.
            ssl = self._trust or True
            connector = (
                aiohttp.TCPConnector(ssl=ssl, keepalive_timeout=_KEEPALIVE_SECONDS)
                if reuse
                else aiohttp.TCPConnector(ssl=ssl, force_close=True)
            )
            self._sessions[reuse] = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._sessions[reuse]


async def _body(response: aiohttp.ClientResponse, call: str) -> bytes:
    with raised_as(InvalidAnswer, call, of=InvalidAnswer):
        return await read_bounded(response, _MOST_BYTES)
