"""Keeps prompts that kill servers from taking the fleet down: `suspects` with its events, its waits and its trials.

    generate() ──▶ request(key) ──▶ enter() ───── free ───▶ the router
                                        │  ▲
                                     suspected, waits ──▶ trial: alone at one server ──▶ completed | the server dies
                                                                                                        │
                                                                                             guilty: PoisonPrompt

    task    consumes                         produces                waits for
    ------  -------------------------------  ----------------------  ----------------------------------------------
    trials  suspects that wait at the door   a server to themselves  completed requests, the server's end, the clock

After a cut nothing is sent again before the fleet had time to see whether a server has died: otherwise a prompt that kills
at once would kill the next server meanwhile. Time spent in `enter` is no time of the request.

Keys with the same prompt, such as two epochs of a small dataset that are in flight together, are one suspect under the
first of these keys: a death that one of them was near counts for all of them, and all are held back together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from megasync.errors import MegasyncError, PoisonPrompt
from megasync.files import atomic_write
from megasync.rollout.suspects import Standing, Suspects

log = logging.getLogger(__name__)

# Seconds after a cut in which nothing is sent again: a dead process is seen every half second, but takes a moment to die.
VERDICT_SECONDS = 3.0
# Seconds after which a trial is over without a verdict against anybody, beyond what the fleet takes to see that a server
# hangs, because to hang is a way to die.
TRIAL_SECONDS = 120.0
# Seconds before another look for a server that a trial could have.
_SERVER_WAIT = 1.0


class Servers(Protocol):
    """What the quarantine asks of the fleet."""

    async def isolate(self, avoid: Collection[int]) -> tuple[int, str] | None:
        """Slot and URL of a serving server that runs nothing and gets nothing from the router; None when there is none."""

    def release(self, slot: int) -> None:
        """The router may send requests to it again."""

    def excuse(self, slot: int) -> None:
        """A death of its server was no fault of its own: it takes no restart from its budget."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One generation of a prompt, from its first attempt to its end."""

    key: str
    prompt: Sequence[int]
    # Key under which the prompt is suspected: that of the first generation of the same prompt that was cut.
    suspect: str
    # Of the latest attempt: clock readings of its sending and its cut, how the prompt stood then, whether a death explains
    # the cut, and what was sent.
    sent: float = 0.0
    broke: float | None = None
    standing: Standing = Standing.FREE
    explained: bool = False
    body: dict[str, Any] = field(default_factory=dict)


class Quarantine:
    """`folder` takes a file for each guilty prompt; none is written without one. `hang_seconds` is what the fleet takes to
    declare a server dead that hangs. `close` ends the task."""

    def __init__(
        self,
        servers: Servers,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        verdict_seconds: float = VERDICT_SECONDS,
        hang_seconds: float = 0.0,
    ) -> None:
        self._servers = servers
        self._folder = folder
        self._clock = clock
        self._verdict_seconds = verdict_seconds
        self._trial_seconds = TRIAL_SECONDS + hang_seconds
        self._suspects = Suspects(clock)
        # By suspect: tickets that were cut, or held back, and are not completed.
        self._owed: dict[str, set[Ticket]] = {}
        # Suspects by the digest of their prompts; guilty ones stay, because they come again, such as in the next epoch.
        self._prompts: dict[bytes, str] = {}
        self._waiting: Counter[str] = Counter()
        # Requests that have waited at the door, and those that do now.
        self.holds = 0
        self._held = 0
        self._url = ""
        self._news = asyncio.Event()
        self._trials: asyncio.Task | None = None
        self._crimes: dict[str, str] = {}
        self._requests: dict[str, dict[str, Any]] = {}

    def crime(self, key: str) -> str | None:
        """Why this prompt is never asked again; None when it may be."""
        return self._crimes.get(key)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/suspect_prompts": float(sum(self._suspects.count(each) for each in Standing if each != "guilty")),
            "rollout/poison_prompts": float(len(self._crimes)),
        }

    @property
    def busy(self) -> bool:
        """Requests are held back or on trial, so they take longer than others."""
        return bool(self._held or self._suspects.members)

    async def close(self) -> None:
        if self._trials is not None:
            self._trials.cancel()
            await asyncio.gather(self._trials, return_exceptions=True)

    # As the client sees it

    @asynccontextmanager
    async def request(self, key: str, prompt: Sequence[int]) -> AsyncIterator[Ticket]:
        """Around one generation. Raises PoisonPrompt for a prompt that has been found to."""
        ticket = Ticket(key, prompt, key)
        try:
            yield ticket
        except BaseException:
            self._end(ticket, completed=False)
            raise
        self._end(ticket, completed=True)

    async def enter(self, ticket: Ticket, body: dict[str, Any]) -> str | None:
        """Before each request for it: the URL of the server that it must go to, None for the router; waits while the
        prompt is held back. Raises PoisonPrompt."""
        url = await self._door(ticket)
        ticket.sent = self._clock()
        ticket.broke, ticket.explained, ticket.body = None, False, body
        return url

    def cut(self, ticket: Ticket) -> None:
        """The connection of the latest attempt broke before the answer was whole."""
        if not self._owes(ticket):
            ticket.suspect = self._prompts.setdefault(_digest(ticket.prompt), ticket.key)
        ticket.broke, ticket.standing = self._clock(), self._suspects.standing(ticket.suspect)
        self._owed.setdefault(ticket.suspect, set()).add(ticket)
        ticket.explained = self._suspects.cut(ticket.suspect, ticket.sent)

    # As the fleet sees it

    def left(self, slot: int, died: bool, to_blame: bool) -> None:
        """A server serves no more. `to_blame` says whether requests may have killed it."""
        ours = slot == self._suspects.trial_slot
        if died:
            accused = self._suspects.members if ours else frozenset()
            ruling = self._suspects.died(slot, to_blame)
            for excused in ruling.excused:
                self._servers.excuse(excused)
            if accused and to_blame:
                log.warning("server %d died while it ran nothing but %s", slot, ", ".join(sorted(accused)))
            for key in ruling.guilty:
                self._convict(key)
        elif ours:
            self._suspects.end_trial()
        self._tell()

    # At the door

    async def _door(self, ticket: Ticket) -> str | None:
        if ticket.broke is not None:
            until = ticket.broke + self._verdict_seconds
            with self._holding():
                while not ticket.explained and (left := until - self._clock()) > 0:
                    await asyncio.sleep(min(left, self._verdict_seconds / 10))
                    ticket.explained = self._suspects.standing(ticket.suspect) is not ticket.standing
        while True:
            if self._prompts and not self._owes(ticket):
                ticket.suspect = self._prompts.get(_digest(ticket.prompt), ticket.key)
            standing = self._suspects.standing(ticket.suspect)
            if standing is Standing.GUILTY:
                raise PoisonPrompt(self._crimes.setdefault(ticket.key, self._crimes[ticket.suspect]))
            if standing is Standing.FREE:
                return None
            self._owed.setdefault(ticket.suspect, set()).add(ticket)
            if standing is Standing.ON_TRIAL:
                return self._url
            self._waiting[ticket.suspect] += 1
            try:
                self._open_trials()
                with self._holding():
                    await self._news.wait()
            finally:
                self._waiting -= Counter([ticket.suspect])

    @contextmanager
    def _holding(self) -> Iterator[None]:
        self.holds += 1
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def _owes(self, ticket: Ticket) -> bool:
        return ticket in self._owed.get(ticket.suspect, ())

    def _end(self, ticket: Ticket, completed: bool) -> None:
        if not self._owes(ticket):
            return
        owed = self._owed[ticket.suspect]
        owed.discard(ticket)
        if owed:
            return
        del self._owed[ticket.suspect]
        if completed:
            self._suspects.completed(ticket.suspect)
        else:
            self._suspects.withdraw(ticket.suspect)
        if self._suspects.standing(ticket.suspect) is Standing.FREE:
            self._prompts = {digest: key for digest, key in self._prompts.items() if key != ticket.suspect}
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # Trials

    def _open_trials(self) -> None:
        if self._trials is None or self._trials.done():
            self._trials = asyncio.create_task(self._try_all(), name="trials of suspects")

    async def _try_all(self) -> None:
        # Others that were cut by the same death come to the door at about the same time.
        await asyncio.sleep(self._verdict_seconds)
        while members := self._suspects.choose(self._waiting):
            try:
                place = await self._servers.isolate(self._suspects.avoid(members))
            except MegasyncError as error:
                log.warning("no server could be made free for suspects, trying again: %s", error)
                place = None
            if place is None:
                await asyncio.sleep(_SERVER_WAIT)
                continue
            slot, self._url = place
            try:
                # Some may have gone while the server was made free.
                if members := [key for key in members if self._suspects.standing(key) is Standing.QUARANTINED]:
                    log.warning("server %d runs nothing but %s: they were near deaths of servers", slot, members)
                    await self._try(members, slot)
            finally:
                self._suspects.end_trial()
                self._servers.release(slot)
                self._tell()

    async def _try(self, members: Sequence[str], slot: int) -> None:
        self._suspects.begin_trial(members, slot)
        self._tell()
        deadline = self._clock() + self._trial_seconds
        while self._suspects.members and (left := deadline - self._clock()) > 0:
            news = self._news
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                break
        for key in self._suspects.members:
            log.info(
                "%s ran alone for %.0f s and killed no server: it runs beside others again", key, self._trial_seconds
            )
            self._suspects.completed(key)

    # The guilty

    def _convict(self, key: str) -> None:
        evidence = self._suspects.evidence(key)
        tickets = self._owed.get(key, set())
        request = next((ticket.body for ticket in tickets if ticket.body), {})
        now = time.time() - self._clock()
        deaths = {
            kind: [{"server": slot, "unix_time": round(now + when, 3)} for when, slot in found]
            for kind, found in evidence.items()
        }
        path = "" if self._folder is None else f"; what it was is in {self._path(key)}"
        self._crimes[key] = (
            f"prompt {key} was in flight at {len(evidence['crowd'])} deaths of servers among others, and was the only one "
            f"at {len(evidence['alone'])} more (servers {', '.join(str(slot) for _, slot in evidence['alone'])}){path}"
        )
        # Other prompts under this key may have been completed.
        self._prompts = {digest: other for digest, other in self._prompts.items() if other != key}
        self._prompts |= {_digest(ticket.prompt): key for ticket in tickets}
        self._requests[key] = {
            "uid": key,
            "reason": "kills_servers",
            "deaths": deaths,
            "prompt_ids": [list(ids) for ids in {tuple(ticket.prompt) for ticket in tickets}],
            "input_ids": request.get("input_ids", []),
            "sampling_params": request.get("sampling_params", {}),
        }
        log.error("%s. It is not asked again", self._crimes[key])
        self.describe(key, {})

    def describe(self, key: str, row: Mapping[str, Any]) -> None:
        """Writes what is known of a guilty prompt, with its dataset row. Failing to is logged: the run goes on."""
        if self._folder is None or key not in self._requests:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(key), json.dumps(self._requests[key] | {"row": dict(row)}, indent=1, default=repr))
        except OSError as error:
            log.error("what killed servers could not be written to %s: %s", self._path(key), error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{re.sub(r'[^A-Za-z0-9._-]', '-', key)}.json"


def _digest(prompt: Sequence[int]) -> bytes:
    return sha256(repr(list(prompt)).encode()).digest()
