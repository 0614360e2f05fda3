"""Control calls to one server, or to the router: an HTTP session with JSON in and out, and errors that say who answered what.

Calls go straight to the server, never through the router, which forwards generation only. The session opens on the
loop of the first call and is closed by `close` on that loop, for good: whoever still holds the control of a server that
is gone gets a ServerError.
"""

from __future__ import annotations

import ssl
from typing import Any

import aiohttp
import orjson

from megasync.errors import InvalidAnswer, Refused, ServerError
from megasync.serving.answers import read_bounded

# Characters of a refused answer that go into the error.
_BODY_SHOWN = 500
# The largest answer, in bytes: the layout of a rank of a very large model has some ten million.
_MOST_BYTES = 1 << 28


class ServerControl:
    """One SGLang server, seen by whoever pauses it, loads its weights and asks how it is."""

    def __init__(self, url: str, api_key: str | None = None, trust: ssl.SSLContext | None = None) -> None:
        """`trust` is for an https URL; the system's authorities by default."""
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._trust = trust
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"ServerControl({self.url})"

    async def post(self, path: str, body: dict | None = None, timeout: float = 60.0) -> Any:
        """The parsed JSON answer, or its text when it is not JSON. Raises ServerError, Refused for an error status; `timeout` is in seconds."""
        return await self._request("POST", path, body or {}, timeout)

    async def get(self, path: str, timeout: float = 60.0) -> Any:
        """As `post`."""
        return await self._request("GET", path, None, timeout)

    async def delete(self, path: str, timeout: float = 60.0) -> Any:
        """As `post`."""
        return await self._request("DELETE", path, None, timeout)

    async def weight_version(self, timeout: float = 60.0) -> int:
        """The version of the weights that the server holds, by its own report."""
        info = await self.get("/model_info", timeout)
        try:
            return int(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"{self.url}/model_info carries no integer weight_version: {info!r:.500}") from error

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _request(self, method: str, path: str, body: dict | None, timeout: float) -> Any:
        if self._closed:
            raise ServerError(f"{method} {self.url}{path}: the server is gone, or no longer part of the run")
        session = self._open()
        data = None if body is None else orjson.dumps(body)
        try:
            async with session.request(
                method, self.url + path, data=data, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as response:
                raw = await read_bounded(response, _MOST_BYTES)
                status = response.status
        except TimeoutError as error:
            raise ServerError(f"{method} {self.url}{path}: no answer within {timeout:g} s") from error
        except InvalidAnswer as error:
            raise InvalidAnswer(f"{method} {self.url}{path}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        if status >= 400:
            shown = raw[:_BODY_SHOWN].decode("utf-8", "replace")
            raise Refused(f"{method} {self.url}{path}: status {status}: {shown}", status)
        try:
            return orjson.loads(raw) if raw else ""
        except orjson.JSONDecodeError:
            return raw.decode("utf-8", "replace")

    def _open(self) -> aiohttp.ClientSession:
        # Created here and not in __init__: a session belongs to the loop that is running when it is made.
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            # A connection per call: servers close idle ones after seconds, and a call that meets such a closing fails
            # although nothing is wrong.
            self._session = aiohttp.ClientSession(
                headers=headers, connector=aiohttp.TCPConnector(force_close=True, ssl=self._trust or True)
            )
        return self._session
