"""A workflow's view of the client: every request of one sample, stamped with what belongs to that sample.

Invariant: while the gate is closed no request of a workflow starts, and `RequestGate.close` returns only when none is
running. Workflows of several turns therefore stop between turns, never inside one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from megasync.errors import ServerError
from megasync.rollout.conversation import Conversation
from megasync.rollout.generation import Generation, Reply
from megasync.rollout.partials import SamplePartials


class RequestGate:
    """Open: requests pass up to `limit` at once, and are counted. Closed: they wait, in order, until it opens."""

    def __init__(self) -> None:
        self.inflight = 0
        self._limit: int | None = None
        self._closed = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def limit(self) -> int | None:
        """Requests that may run at once; None for any number. Those that run already are left alone."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = limit
        self._let_in()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    async def close(self, timeout: float) -> None:
        """Starts no new request and waits for the running ones, `timeout` seconds at most (then ServerError)."""
        self._closed = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            raise ServerError(
                f"{self.inflight} requests still ran {timeout:.0f} s after the rollout was paused for a weight sync; "
                f"raise timeouts.request or set schedule.partial_rollout=true"
            ) from None

    def open(self) -> None:
        self._closed = False
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and not self._closed and (self._limit is None or self.inflight < self._limit):
            turn = self._waiting.popleft()
            # Whoever was cancelled while it waited has left its place behind.
            if not turn.done():
                # Counted here, not when it wakes: the next one must see the place taken.
                self.inflight += 1
                self._idle.clear()
                turn.set_result(None)

    def _leave(self) -> None:
        self.inflight -= 1
        if self.inflight == 0:
            self._idle.set()
        self._let_in()


class SampleClient:
    """The client as one sample's workflow sees it. Whatever the workflow passes itself wins over the defaults.

    All requests of a prompt carry the same routing key, so the router may send them where the prompt is cached. With
    `seed`, request number t of the sample is sent with a seed drawn from (seed, t): a run can be repeated. With `partials`
    a request goes on from what is known of its response, and what comes of it is known there. What is `trained` on can be
    sampled only as the trainer scores it. `conversation` has all that was sampled.
    """

    def __init__(
        self,
        client: Any,
        gate: RequestGate,
        *,
        routing_key: str,
        seed: int | None = None,
        partials: SamplePartials | None = None,
        trained: bool = False,
        **sampling: Any,
    ) -> None:
        self._client = client
        self._gate = gate
        self._routing_key = routing_key
        self._seed = seed
        self._partials = partials
        self._trained = trained
        self._sampling = sampling
        self._requests = 0
        self.conversation = Conversation()

    async def generate(self, prompt_ids: list[int], **options: Any) -> Generation:
        """Generates from token ids; see `RolloutClient.generate`. A prompt that begins with all tokens of an earlier
        turn continues its trajectory."""
        return self.conversation.record(await self._turn(self._client.generate, prompt_ids, options))

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> Reply:
        """Answers chat messages; see `RolloutClient.chat`. Messages that go on from an earlier reply's continue its
        trajectory."""
        return await self._turn(self._client.chat, messages, {"conversation": self.conversation} | options)

    async def _turn(self, ask: Callable[..., Awaitable[Any]], prompt: list, own: dict[str, Any]) -> Any:
        turn = self._requests
        self._requests += 1
        options = {"routing_key": self._routing_key, **self._sampling}
        if self._seed is not None:
            options["seed"] = request_seed(self._seed, turn)
        partials = self._partials
        if partials is not None:
            options["keep"] = lambda digest: partials.begin(turn, digest)
        if self._trained:
            options["trained"] = True
        async with self._gate.request():
            return await ask(prompt, **options | own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def request_seed(*parts: object) -> int:
    """A seed of 31 bits drawn from all parts, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
