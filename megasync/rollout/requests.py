"""A workflow's view of the client: every request of one sample, stamped with what belongs to that sample.

Invariant: while the gate is closed no request of a workflow starts, and `RequestGate.close` returns only when none is
running. Workflows of several turns therefore stop between turns, never inside one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megasync.errors import ServerError


class RequestGate:
    """Open: requests pass and are counted. Closed: they wait until it opens."""

    def __init__(self) -> None:
        self.inflight = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        await self._opened.wait()
        self.inflight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.inflight -= 1
            if self.inflight == 0:
                self._idle.set()

    async def close(self, timeout: float) -> None:
        """Starts no new request and waits for the running ones, `timeout` seconds at most (then ServerError)."""
        self._opened.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            raise ServerError(
                f"{self.inflight} requests still ran {timeout:.0f} s after the rollout was paused for a weight sync; "
                f"raise timeouts.request or set schedule.partial_rollout=true"
            ) from None

    def open(self) -> None:
        self._opened.set()


class SampleClient:
    """The client as one sample's workflow sees it. Whatever the workflow passes itself wins over the defaults.

    All requests of a prompt carry the same routing key, so the router may send them where the prompt is cached. With
    `seed`, request number t of the sample is sent with a seed drawn from (seed, t): a run can be repeated.
    """

    def __init__(
        self, client: Any, gate: RequestGate, *, routing_key: str, seed: int | None = None, **sampling: Any
    ) -> None:
        self._client = client
        self._gate = gate
        self._routing_key = routing_key
        self._seed = seed
        self._sampling = sampling
        self._requests = 0

    async def generate(self, prompt_ids: list[int], **options: Any) -> Any:
        """Generates from token ids; see `RolloutClient.generate`."""
        async with self._gate.request():
            return await self._client.generate(prompt_ids, **self._options(options))

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        """Answers chat messages; see `RolloutClient.chat`."""
        async with self._gate.request():
            return await self._client.chat(messages, **self._options(options))

    def _options(self, own: dict[str, Any]) -> dict[str, Any]:
        options = {"routing_key": self._routing_key, **self._sampling}
        if self._seed is not None:
            options["seed"] = request_seed(self._seed, self._requests)
        self._requests += 1
        return options | own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def request_seed(*parts: object) -> int:
    """A seed of 31 bits drawn from all parts, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
