"""The driver's quarantine for clients in other processes: no work in the driver for a request that no death is near.

    worker: RemoteQuarantine ──(tickets that were cut, or whose prompt is watched)──▶ driver: TicketDesk ──▶ Quarantine
                     ▲────────────────(clearance for a request; which prompts are watched)────────────────┘

A ticket stays in its worker until its connection breaks, or until its prompt or key is watched, because some worker's
request for it was cut. From then on the driver decides about each of its requests. So the evidence of all workers is
combined, and a suspect is isolated once, whichever worker sends it.

A prompt that becomes a suspect is watched by every worker a moment later. A request sent in between is like one that
was sent just before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from megasync.errors import PoisonPrompt
from megasync.rollout.quarantine import Quarantine, Ticket, Watched, open_ticket, prompt_digest

log = logging.getLogger(__name__)

# Tells the other side: a name and arguments.
Tell = Callable[..., None]


class RemoteQuarantine:
    """What a worker's client uses instead of a `Quarantine`. `tell` reaches the worker's `TicketDesk`."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._watched = Watched()
        # Numbers of the tickets that the driver knows, and their requests that wait for clearance.
        self._reported: dict[Ticket, int] = {}
        self._count = 0
        self._waiting: dict[int, asyncio.Future[str | None]] = {}
        self._evidence: dict[str, str] = {}

    def evidence(self, key: str) -> str | None:
        return self._evidence.get(key)

    def request(self, key: str, prompt: Sequence[int]) -> AbstractAsyncContextManager[Ticket]:
        """See `Quarantine.request`."""
        return open_ticket(key, prompt, self._end)

    async def enter(self, ticket: Ticket, body: dict[str, Any]) -> str | None:
        """See `Quarantine.enter`."""
        url = None
        if ticket in self._reported or self._is_watched(ticket):
            number = self._report(ticket)
            answer = self._waiting[number] = asyncio.get_running_loop().create_future()
            self._tell("enter", number, body)
            try:
                url = await answer
            except PoisonPrompt as error:
                self._evidence[ticket.key] = str(error)
                raise
            finally:
                del self._waiting[number]
        ticket.sent = self._clock()
        return url

    def cut(self, ticket: Ticket) -> None:
        """See `Quarantine.cut`."""
        # Its age, because the clocks of two machines differ.
        self._tell("cut", self._report(ticket), self._clock() - ticket.sent)

    # From the driver

    def entered(self, number: int, url: str | None, poison: str | None) -> None:
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if poison is None:
            answer.set_result(url)
        else:
            answer.set_exception(PoisonPrompt(poison))

    def watch(self, watched: Watched) -> None:
        self._watched = watched

    def _is_watched(self, ticket: Ticket) -> bool:
        watched = self._watched
        return ticket.key in watched.keys or (bool(watched.digests) and prompt_digest(ticket.prompt) in watched.digests)

    def _report(self, ticket: Ticket) -> int:
        if ticket not in self._reported:
            self._count += 1
            self._reported[ticket] = self._count
            self._tell("open", self._count, ticket.key, ticket.prompt)
        return self._reported[ticket]

    def _end(self, ticket: Ticket, completed: bool) -> None:
        if (number := self._reported.pop(ticket, None)) is not None:
            self._tell("end", number, completed)


class TicketDesk:
    """The tickets of one worker in the driver's quarantine. `answer(number, url, poison)` reaches the worker."""

    def __init__(
        self,
        quarantine: Quarantine,
        answer: Callable[[int, str | None, str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quarantine = quarantine
        self._answer = answer
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._entering: dict[int, asyncio.Task[None]] = {}

    def told(self, what: str, number: int, *arguments: Any) -> None:
        """What `RemoteQuarantine` tells, in its order."""
        {"open": self._open, "enter": self._enter, "cut": self._cut, "end": self._end}[what](number, *arguments)

    def close(self) -> None:
        """Ends all tickets: their worker is lost, so none of them completes."""
        for number in list(self._tickets):
            self._end(number, completed=False)

    def _open(self, number: int, key: str, prompt: Sequence[int]) -> None:
        self._tickets[number] = Ticket(key, prompt, key)

    def _enter(self, number: int, body: dict[str, Any]) -> None:
        self._entering[number] = asyncio.create_task(self._clear(number, body), name=f"clearance of ticket {number}")

    async def _clear(self, number: int, body: dict[str, Any]) -> None:
        try:
            url = await self._quarantine.enter(self._tickets[number], body)
        except PoisonPrompt as error:
            self._answer(number, None, str(error))
        except Exception:
            # The request has no deadline while it waits for clearance.
            log.exception("The quarantine failed on ticket %d, whose request is sent", number)
            self._answer(number, None, None)
        else:
            self._answer(number, url, None)

    def _cut(self, number: int, age: float) -> None:
        ticket = self._tickets[number]
        ticket.sent = self._clock() - age
        self._quarantine.cut(ticket)

    def _end(self, number: int, completed: bool) -> None:
        if (task := self._entering.pop(number, None)) is not None:
            task.cancel()
        self._quarantine.end(self._tickets.pop(number), completed)
