"""Holds requests back in their worker: a gate with a limit on how many run at once, and the suspects' quarantine.

Too few requests leave servers idle. Too many are retracted, or wait at one server while another is idle. So the limit
grows while the servers have room and the limit is what holds requests back, and shrinks by a factor when KV caches run
out: additive increase, multiplicative decrease, with doubling until the first pressure, as in TCP's slow start.

Invariants: while the gate is closed no request of a workflow starts, and `RequestGate.close` returns only when none is
running, so workflows of several turns stop between turns and never inside one. The limit is never below one request per
server, so it can slow a run down but never stop it.

The quarantine holds back requests for prompts that may kill servers. The driver's `quarantine` decides about them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.concurrency.tasks import within
from megasync.errors import PoisonPrompt, ServerError
from megasync.serving.answers import parse_as

# Requests per server before any load is reported. As many may wait at a server that runs fewer: requests arrive in
# bursts, by groups, and a server orders those that wait.
FIRST_REQUESTS = 64
# The limit is multiplied by this under pressure.
DECREASE = 0.8
# Requests per server that the limit grows by when there is room.
INCREASE = 8


class RequestGate:
    """Open, it admits up to `limit` requests at once and counts them. Closed, requests wait until it opens.

    Those of the lowest priority number go first, and equal ones in the order in which they came.
    """

    def __init__(self) -> None:
        self.inflight = 0
        # Requests that may run at once; None for no limit.
        self._limit: int | None = None
        self._closed = False
        # A heap of (priority, number, turn); the numbers count the requests.
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._came = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def set_limit(self, limit: int) -> None:
        """Changes how many requests may run at once. A lower limit does not affect running requests."""
        self._limit = limit
        self._admit_waiting()

    @asynccontextmanager
    async def request(self, priority: int = 0) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._came += 1
        heapq.heappush(self._waiting, (priority, self._came, turn))
        self._admit_waiting()
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
        """Admits no further request and waits up to `timeout` seconds for the running ones, then raises ServerError."""
        self.shut()
        try:
            await within(self._idle.wait(), timeout)
        except TimeoutError:
            raise ServerError(
                f"{self.inflight} requests still ran {timeout:.0f} s after the rollout was paused for a weight sync; "
                f"raise timeouts.request or set schedule.partial_rollout=true"
            ) from None

    def shut(self) -> None:
        """Admits no further request."""
        self._closed = True

    def open(self) -> None:
        self._closed = False
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and not self._closed and (self._limit is None or self.inflight < self._limit):
            _, _, turn = heapq.heappop(self._waiting)
            # A cancelled waiter leaves its future behind.
            if not turn.done():
                # Counted here, not when the waiter resumes: the next iteration must see the place taken.
                self.inflight += 1
                self._idle.clear()
                turn.set_result(None)

    def _leave(self) -> None:
        self.inflight -= 1
        if self.inflight == 0:
            self._idle.set()
        self._admit_waiting()


@prepared
class _Queues(msgspec.Struct):
    retracted: int = 0


@prepared
class _Load(msgspec.Struct):
    token_usage: float
    num_running_reqs: int
    num_waiting_reqs: int
    queues: _Queues | None = None
    timestamp: float = 0.0
    # Sums over the decoding steps so far; the last one is of sampled tokens. None before the first.
    decode_moments: list[float] | None = None


@prepared
class _Loads(msgspec.Struct):
    loads: list[_Load]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """One server's report. `token_usage` is the share of its KV cache in use, in [0, 1]; the rest are requests."""

    token_usage: float
    running: int
    waiting: int
    retracted: int = 0
    # Tokens decoded since the server started, without the first one of each response; and the time by its clock.
    decoded: float = 0.0
    time: float = 0.0
    # Decoded tokens per second since the report before, pauses included. SGLang's own figure is of the latest 40 steps
    # and is zero after each pause.
    throughput: float = 0.0

    @classmethod
    def parse(cls, answer: Any) -> ServerLoad:
        """Combines the scheduler ranks in an answer of `/v1/loads`. Raises InvalidAnswer for another shape."""
        ranks = parse_as(answer, _Loads, "/v1/loads").loads
        return cls(
            token_usage=max((rank.token_usage for rank in ranks), default=0.0),
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            retracted=sum(rank.queues.retracted for rank in ranks if rank.queues is not None),
            decoded=sum(rank.decode_moments[-1] for rank in ranks if rank.decode_moments),
            time=max((rank.timestamp for rank in ranks), default=0.0),
        )

    def after(self, before: ServerLoad | None) -> ServerLoad:
        """This report with the throughput since an earlier one of the same process; 0 without one."""
        if before is None:
            return self
        if (seconds := self.time - before.time) <= 0:
            # The same report: a scheduler without work writes none.
            return replace(self, throughput=before.throughput if self.running else 0.0)
        return replace(self, throughput=max(0.0, self.decoded - before.decoded) / seconds)


class InflightCap:
    """A pure controller of the gate's limit. `limit` is in requests; `update` adjusts it to the servers' loads."""

    def __init__(self, servers: int, high_usage: float) -> None:
        """`high_usage` is the share of a KV cache above which a server is under pressure."""
        self._high = high_usage
        self._slow_start = True
        self._servers = max(1, servers)
        self.limit = FIRST_REQUESTS * self._servers

    def update(self, loads: Sequence[ServerLoad], inflight: int) -> int:
        """The new limit, given the serving servers' loads and the requests in flight. Without loads it stays."""
        if not loads:
            return self.limit
        # The limit per server stays when their number changes.
        if len(loads) != self._servers:
            self.limit, self._servers = max(1, self.limit * len(loads) // self._servers), len(loads)
        # A server that runs nothing of what waits there is paused for a weight sync, or computes its first prompts.
        # That says nothing about room.
        running_or_idle = [load for load in loads if load.running or not load.waiting]
        if any(
            load.retracted > 0 or load.token_usage > self._high or load.waiting > max(load.running, FIRST_REQUESTS)
            for load in running_or_idle
        ):
            self._slow_start = False
            # From what is really in flight, because a limit far above it would take many steps to have an effect. Only
            # once it has come down to the limit, or long requests would bring the limit down to nothing.
            if inflight <= self.limit:
                self.limit = int(inflight * DECREASE)
        elif inflight >= self.limit and len(running_or_idle) == len(loads):
            self.limit = 2 * self.limit if self._slow_start else self.limit + INCREASE * len(loads)
        self.limit = max(self.limit, len(loads))
        return self.limit


# The quarantine, as a client of servers uses it


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request for the next tokens of a generation, which waits for clearance.

    `cut` is set if the request before it was cut: the seconds since that one was sent, and since it was cut. Ages,
    because the clocks of two machines differ.
    """

    key: str
    prompt: Sequence[int]
    body: Mapping[str, Any]
    cut: tuple[float, float] | None = None


@dataclass(eq=False, slots=True)
class Ticket:
    """One generation in its client, which the driver knows once it is `reported`.

    `sent` and `cut` are clock readings of its latest request.
    """

    number: int
    key: str
    prompt: Sequence[int]
    sent: float = 0.0
    cut: float | None = None
    reported: bool = False


async def _clear(number: int, attempt: Attempt) -> str | None:
    return None


class QuarantineClient:
    """Asks the driver's `Quarantine`, which `enter` and `end` reach, where a prompt may kill servers.

    By default there is none, and every request is cleared.
    """

    def __init__(
        self,
        enter: Callable[[int, Attempt], Awaitable[str | None]] = _clear,
        end: Callable[[int, bool], None] = lambda number, completed: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enter, self._end, self._clock = enter, end, clock
        self._numbers = itertools.count()
        self._watched: frozenset[str] = frozenset()
        self._refusals: dict[str, str] = {}

    def watch(self, watched: frozenset[str]) -> None:
        """Asks for clearance from now on before a prompt with one of these keys or digests is sent."""
        self._watched = watched

    def evidence(self, key: str) -> str | None:
        """Why a request for this prompt was refused; None if none was."""
        return self._refusals.get(key)

    @contextmanager
    def request(self, key: str | None, prompt: Sequence[int]) -> Iterator[Ticket]:
        """Track one generation of a prompt, which has completed if the context exits without an error."""
        number, completed = next(self._numbers), False
        ticket = Ticket(number, f"request {number}" if key is None else key, prompt)
        try:
            yield ticket
            completed = True
        finally:
            if ticket.reported:
                self._end(ticket.number, completed)

    def clears(self, ticket: Ticket) -> bool:
        """Whether `enter` returns at once, with None."""
        watched = self._watched and not self._watched.isdisjoint((ticket.key, prompt_digest(ticket.prompt)))
        return not (ticket.reported or watched or ticket.cut is not None)

    async def enter(self, ticket: Ticket, body: Mapping[str, Any]) -> str | None:
        """Wait while the prompt is held back. Returns the URL of the trial server, or None for the router.

        Call it before each request of the ticket. Raises PoisonPrompt for a poison prompt.
        """
        url = None
        if not self.clears(ticket):
            ticket.reported, now = True, self._clock()
            cut = None if ticket.cut is None else (now - ticket.sent, now - ticket.cut)
            try:
                url = await self._enter(ticket.number, Attempt(ticket.key, ticket.prompt, body, cut))
            except PoisonPrompt as error:
                self._refusals[ticket.key] = str(error)
                raise
        ticket.sent, ticket.cut = self._clock(), None
        return url

    def cut(self, ticket: Ticket) -> None:
        """Note that the connection of the latest request broke before its answer was complete."""
        ticket.cut = self._clock()


def prompt_digest(prompt: Sequence[int]) -> str:
    return sha256(repr(list(prompt)).encode()).hexdigest()
