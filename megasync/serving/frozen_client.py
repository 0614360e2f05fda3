"""Sends requests to the servers of one frozen model: bounded, to the least busy server, and to another if one fails.

Invariant: a server failure reaches the caller only as a ServerError, after `timeout` seconds of retries. It never looks
like a fault of the text in the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from megasync.concurrency.tasks import Backoff
from megasync.errors import DataError, HttpStatusError, ServerError
from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds of backoff after a failure, doubled for each further one up to the second number.
_FAILURE_WAIT = (0.2, 5.0)
# Seconds between two warnings about failed attempts.
_NOTE_SECONDS = 30.0
# Statuses that mean that the request itself is invalid.
_BAD_REQUEST = frozenset({400, 413, 422})


class FrozenModelClient:
    """Balances requests over the servers of one reward or auxiliary model. Requests wait while there is no server.

    `name` appears in messages, such as "reward model 'judge'".
    """

    def __init__(self, name: str, max_inflight: int, timeout: float) -> None:
        """`timeout` is in seconds, per request; it excludes the wait for one of `max_inflight` slots."""
        self._name = name
        self._timeout = timeout
        self._places = asyncio.Semaphore(max_inflight)
        self._running: dict[ServerControl, int] = {}
        self._some = asyncio.Event()
        self._requests = 0
        self._retries = 0
        self._quiet_until = 0.0

    def add_server(self, server: ServerControl) -> None:
        self._running[server] = 0
        self._some.set()

    def remove_server(self, url: str) -> None:
        self._running = {server: count for server, count in self._running.items() if server.url != url}
        if not self._running:
            self._some.clear()

    def metrics(self) -> dict[str, float]:
        """Numbers of answered requests, failed attempts and requests in flight."""
        return {
            "requests": float(self._requests),
            "retries": float(self._retries),
            "inflight": float(sum(self._running.values())),
        }

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """The result of `read` on a server's answer. If `read` raises ServerError, that server has failed.

        Raises DataError when a server rejects the request, and ServerError after `timeout` seconds.
        """
        failures: list[str] = []
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await self._until_answered(path, body, read, failures)
            except TimeoutError:
                last = f"; the last of {len(failures)} failed attempts: {failures[-1]}" if failures else ""
                raise ServerError(
                    f"{self._name} gave no answer within {self._timeout:g} s (timeouts.request); "
                    f"{len(self._running)} of its servers are up{last}"
                ) from None
        self._requests += 1
        return answer

    def _note(self, failure: str) -> None:
        """Logs a failed attempt, at most once in a while: an outage makes all requests fail again and again."""
        now = time.monotonic()
        level = logging.WARNING if now >= self._quiet_until else logging.DEBUG
        if level == logging.WARNING:
            self._quiet_until = now + _NOTE_SECONDS
        log.log(level, "%s: attempt %d failed, trying again: %s", self._name, self._retries, failure)

    async def _until_answered(
        self, path: str, body: dict[str, Any], read: Callable[[Any], T], failures: list[str]
    ) -> T:
        backoff = Backoff(_FAILURE_WAIT)
        failed: ServerControl | None = None
        while True:
            await self._some.wait()
            server = min(self._running, key=lambda server: (server is failed, self._running[server]))
            self._running[server] += 1
            try:
                return read(await server.post(path, body, timeout=self._timeout))
            except HttpStatusError as refused:
                if refused.status in _BAD_REQUEST:
                    # Without a cause: a ServerError in the chain means that another server may accept the request.
                    raise DataError(f"{self._name} refused a request: {refused}") from None
                failures.append(str(refused))
            except ServerError as error:
                failures.append(str(error))
            finally:
                if server in self._running:
                    self._running[server] -= 1
            failed = server
            self._retries += 1
            self._note(failures[-1])
            await asyncio.sleep(backoff.next())
