"""JSON requests to several servers that do the same, with deadlines, retries and failover.

A failure (no connection, no answer in time, status 429 or 5xx) is tried again: at once where another endpoint is awake,
else after a pause that doubles. What an endpoint refuses (any other status) is the caller's fault and is not tried
again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from deepresearch.endpoints import Endpoint, Endpoints
from megasync.errors import ServerError

FIRST_PAUSE = 0.1  # seconds


class ServiceFailed(ServerError):
    """No endpoint answered within the attempts and the deadline, or none with what was asked for: says why.

    As a ServerError it is an outage to megasync, which tries the sample again: the model is not trained on it.
    """


class RequestRefused(RuntimeError):
    """An endpoint answered that the request itself is wrong; no other would take it either."""


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds: `attempt` for one try, `deadline` for all together, `rest` for an endpoint that failed."""

    attempts: int = 8
    attempt: float = 10.0
    deadline: float = 30.0
    rest: float = 5.0


DEFAULT_LIMITS = Limits()


class HttpPool:
    def __init__(
        self,
        urls: Sequence[str],
        limits: Limits = DEFAULT_LIMITS,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.endpoints = Endpoints(urls, limits.rest)
        self._limits = limits
        self._chance = chance
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer. Raises ServiceFailed or RequestRefused."""
        end = asyncio.get_running_loop().time() + self._limits.deadline
        tried: list[Endpoint] = []
        problem = "no time was left"
        pause = FIRST_PAUSE
        for attempt in range(self._limits.attempts):
            if attempt and not self.endpoints.untried(tried):
                # By chance up to half longer, so that clients that failed together do not come back together.
                await asyncio.sleep(pause * (1 + self._chance() / 2))
                pause *= 2
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                break
            endpoint = self.endpoints.acquire(tried)
            tried.append(endpoint)
            ok: bool | None = None
            answered: tuple[int, Any] | None = None
            try:
                async with asyncio.timeout(min(left, self._limits.attempt)):
                    answered = await self._ask(method, endpoint.url + path, body)
                ok = True
            except TimeoutError:
                ok, problem = False, f"{endpoint.url}: no answer within {min(left, self._limits.attempt):.3g} s"
            except (aiohttp.ClientError, ValueError) as error:
                ok, problem = False, f"{endpoint.url}: {type(error).__name__}: {error}"
            finally:
                self.endpoints.release(endpoint, ok)
            if answered is None:
                continue
            status, answer = answered
            if status == 200:
                return answer
            raise RequestRefused(f"{endpoint.url}{path} refused with status {status}: {answer!r:.300}")
        raise ServiceFailed(f"{path} failed after {len(tried)} attempts; the last: {problem}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Status and JSON. Raises ClientError for a status that another try may change."""
        if self._session is None:
            # Here, not in the constructor: a session belongs to the event loop that it was made on.
            self._session = aiohttp.ClientSession()
        async with self._session.request(method, url, json=body) as response:
            if response.status >= 500 or response.status == 429:
                raise aiohttp.ClientError(f"status {response.status}: {(await response.text())[:300]}")
            return response.status, await response.json(content_type=None)
