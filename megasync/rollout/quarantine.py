"""Protects the fleet from poison prompts, which kill servers: runs the waits and trials that `suspects` decides.

    generate() ──▶ request(key) ──▶ enter() ───── free ───▶ the router
                                        │  ▲
                                  suspected, waits ──▶ trial: alone on one server ──▶ completed | the server dies
                                                                                                        │
                                                                                             poison: PoisonPrompt

    task    consumes                    produces                      waits for
    ------  --------------------------  ----------------------------  -----------------------------------------------
    trials  suspects waiting in enter   exclusive use of one server   completed requests, the server's exit, the clock

After a cut, the request is not retried until the fleet has had time to detect whether a server died. Otherwise a prompt
that kills immediately would kill the next server in the meantime. Time spent in `enter` does not count against the
request's deadline.

Keys with the same prompt, such as two epochs of a small dataset in flight at the same time, are one suspect under the
first of these keys: a death near one of them counts against all of them, and all are held back together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from megasync.base.files import atomic_write
from megasync.concurrency.tasks import cancel_and_wait, set_within
from megasync.errors import MegasyncError, PoisonPrompt
from megasync.rollout.suspects import Suspects, SuspectStatus

log = logging.getLogger(__name__)

# Seconds after a cut before the request is retried. The end of a process is reported at once, but a killed server takes
# a moment to exit.
VERDICT_SECONDS = 3.0
# Seconds after which a trial acquits its remaining members. The time that the fleet needs to detect a hung server is
# added, because a prompt may also make a server hang.
TRIAL_SECONDS = 120.0
# Seconds between two attempts to isolate a server for a trial.
_SERVER_WAIT = 1.0


class TrialServers(Protocol):
    """The part of the fleet that the quarantine uses."""

    async def isolate(self, avoid: Collection[int]) -> tuple[int, str] | None:
        """Take a serving server out of the router and drain it, so that it runs no requests.

        Returns its slot and URL, or None if no server could be isolated. Prefers a slot outside `avoid`.
        """

    def release(self, slot: int) -> None:
        """Return an isolated server to the router."""

    def refund_restart(self, slot: int) -> None:
        """Remove a death caused by a prompt from the restart budget of this server."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One generation of a prompt, from its first attempt until it ends."""

    key: str
    prompt: Sequence[int]
    # Key under which the prompt is suspected: the key of the first generation of the same prompt that was cut.
    suspect: str
    # Of the latest attempt: clock readings of its sending and its cut, the prompt's status at the cut, whether a death
    # explains the cut, and the request body.
    sent: float = 0.0
    cut_at: float | None = None
    status: SuspectStatus = SuspectStatus.FREE
    explained: bool = False
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Watched:
    """The digests of all suspect prompts, and the keys that they are suspected under."""

    digests: frozenset[bytes] = frozenset()
    keys: frozenset[str] = frozenset()


class Quarantine:
    """Holds suspects back, runs their trials, and rejects poison prompts.

    A report of each poison prompt is written to `folder`, unless it is None. `hang_seconds` is the time that the fleet
    needs to declare a hung server dead. `close` cancels the background task.
    """

    def __init__(
        self,
        servers: TrialServers,
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
        # By suspect: tickets that were cut or held back and have not completed.
        self._open: dict[str, set[Ticket]] = {}
        # Suspects by the digest of their prompts. Poison ones stay, because they recur, for example in the next epoch.
        self._prompts: dict[bytes, str] = {}
        self._waiting: Counter[str] = Counter()
        # Number of waits in `enter` so far, and of those in progress.
        self.holds = 0
        self._held = 0
        self._url = ""
        self._changed = asyncio.Event()
        self._trials: asyncio.Task[None] | None = None
        self._followers: list[Callable[[], None]] = []
        self._evidence: dict[str, str] = {}
        self._reports: dict[str, dict[str, Any]] = {}

    def follow(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever `watched` has changed."""
        self._followers.append(on_change)

    def unfollow(self, on_change: Callable[[], None]) -> None:
        self._followers.remove(on_change)

    def watched(self) -> Watched:
        return Watched(frozenset(self._prompts), frozenset((*self._prompts.values(), *self._evidence)))

    def evidence(self, key: str) -> str | None:
        """Return why this prompt is never sent again, or None if it may be sent."""
        return self._evidence.get(key)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/suspect_prompts": float(
                sum(self._suspects.count(status) for status in SuspectStatus if status is not SuspectStatus.POISON)
            ),
            "rollout/poison_prompts": float(len(self._evidence)),
        }

    @property
    def busy(self) -> bool:
        """Whether any request is held back or on trial and may therefore take longer than usual."""
        return bool(self._held or self._suspects.members)

    async def close(self) -> None:
        if self._trials is not None:
            await cancel_and_wait(self._trials)

    # Called by the client

    def request(self, key: str, prompt: Sequence[int]) -> AbstractAsyncContextManager[Ticket]:
        """Track one generation of a prompt. The ticket closes when the context exits."""
        return open_ticket(key, prompt, self.end)

    async def enter(self, ticket: Ticket, body: dict[str, Any]) -> str | None:
        """Wait while the prompt is held back. Returns the URL of the trial server, or None for the router.

        Call it before each request of the ticket. Raises PoisonPrompt for a poison prompt.
        """
        url = await self._wait_for_clearance(ticket)
        ticket.sent = self._clock()
        ticket.cut_at, ticket.explained, ticket.body = None, False, body
        return url

    def cut(self, ticket: Ticket) -> None:
        """Report that the connection of the latest attempt broke before its answer was complete."""
        if not self._is_open(ticket):
            ticket.suspect = self._prompts.setdefault(prompt_digest(ticket.prompt), ticket.key)
            self._prompts_changed()
        ticket.cut_at, ticket.status = self._clock(), self._suspects.status(ticket.suspect)
        self._open.setdefault(ticket.suspect, set()).add(ticket)
        ticket.explained = self._suspects.cut(ticket.suspect, ticket.sent)

    # Called by the fleet

    def left(self, slot: int, died: bool, by_requests: bool) -> None:
        """Report that a server stopped serving. `by_requests` is whether requests may have killed it."""
        on_trial = slot == self._suspects.trial_slot
        if died:
            members = self._suspects.members if on_trial else frozenset()
            ruling = self._suspects.died(slot, by_requests)
            for excused in ruling.excused:
                self._servers.refund_restart(excused)
            if members and by_requests:
                log.warning("Server %d died while running only %s", slot, ", ".join(sorted(members)))
            for key in ruling.poison:
                self._condemn(key)
        elif on_trial:
            self._suspects.end_trial()
        self._notify()

    # Waiting

    async def _wait_for_clearance(self, ticket: Ticket) -> str | None:
        if ticket.cut_at is not None:
            until = ticket.cut_at + self._verdict_seconds
            with self._holding():
                while not ticket.explained and (left := until - self._clock()) > 0:
                    await asyncio.sleep(min(left, self._verdict_seconds / 10))
                    ticket.explained = self._suspects.status(ticket.suspect) is not ticket.status
        while True:
            if self._prompts and not self._is_open(ticket):
                ticket.suspect = self._prompts.get(prompt_digest(ticket.prompt), ticket.key)
            status = self._suspects.status(ticket.suspect)
            if status is SuspectStatus.POISON:
                raise PoisonPrompt(self._evidence.setdefault(ticket.key, self._evidence[ticket.suspect]))
            if status is SuspectStatus.FREE:
                return None
            self._open.setdefault(ticket.suspect, set()).add(ticket)
            if status is SuspectStatus.ON_TRIAL:
                return self._url
            self._waiting[ticket.suspect] += 1
            try:
                self._start_trials()
                with self._holding():
                    await self._changed.wait()
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

    def _forget_prompts(self, suspect: str) -> None:
        self._prompts = {digest: key for digest, key in self._prompts.items() if key != suspect}
        self._prompts_changed()

    def _prompts_changed(self) -> None:
        for on_change in self._followers:
            on_change()

    def _is_open(self, ticket: Ticket) -> bool:
        return ticket in self._open.get(ticket.suspect, ())

    def end(self, ticket: Ticket, completed: bool) -> None:
        """End a ticket. A completed generation clears its prompt."""
        if not self._is_open(ticket):
            return
        remaining = self._open[ticket.suspect]
        remaining.discard(ticket)
        if remaining:
            return
        del self._open[ticket.suspect]
        if completed:
            self._suspects.completed(ticket.suspect)
        else:
            self._suspects.withdraw(ticket.suspect)
        if self._suspects.status(ticket.suspect) is SuspectStatus.FREE:
            self._forget_prompts(ticket.suspect)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # Trials

    def _start_trials(self) -> None:
        if self._trials is None or self._trials.done():
            self._trials = asyncio.create_task(self._run_trials(), name="trials of suspects")

    async def _run_trials(self) -> None:
        # Wait for other prompts that were cut by the same death.
        await asyncio.sleep(self._verdict_seconds)
        while members := self._suspects.choose(self._waiting):
            try:
                place = await self._servers.isolate(self._suspects.avoid(members))
            except MegasyncError as error:
                log.warning("No server could be isolated for suspect prompts, retrying: %s", error)
                place = None
            if place is None:
                await asyncio.sleep(_SERVER_WAIT)
                continue
            slot, self._url = place
            try:
                # Some members may have ended while the server was being isolated.
                if members := [key for key in members if self._suspects.status(key) is SuspectStatus.QUARANTINED]:
                    log.warning("Server %d runs only %s: these prompts were in flight at server deaths", slot, members)
                    await self._run_trial(members, slot)
            finally:
                self._suspects.end_trial()
                self._servers.release(slot)
                self._notify()

    async def _run_trial(self, members: Sequence[str], slot: int) -> None:
        self._suspects.begin_trial(members, slot)
        self._notify()
        deadline = self._clock() + self._trial_seconds
        while self._suspects.members and (left := deadline - self._clock()) > 0:
            changed = self._changed
            await set_within(changed, left)
        for key in self._suspects.members:
            log.info("%s ran alone for %.0f s without killing its server: released", key, self._trial_seconds)
            self._suspects.completed(key)

    # Poison prompts

    def _condemn(self, key: str) -> None:
        evidence = self._suspects.evidence(key)
        tickets = self._open.get(key, set())
        request = next((ticket.body for ticket in tickets if ticket.body), {})
        now = time.time() - self._clock()
        deaths = {
            kind: [{"server": slot, "unix_time": round(now + when, 3)} for when, slot in times]
            for kind, times in evidence.items()
        }
        path = "" if self._folder is None else f"; see {report_path(self._folder, key)}"
        self._evidence[key] = (
            f"prompt {key} was in flight at {len(evidence['crowd'])} server deaths beside others, and alone at "
            f"{len(evidence['alone'])} more (servers {', '.join(str(slot) for _, slot in evidence['alone'])}){path}"
        )
        # Prompts under this key that have completed are not poison.
        self._forget_prompts(key)
        self._prompts |= {prompt_digest(ticket.prompt): key for ticket in tickets}
        self._prompts_changed()
        self._reports[key] = {
            "uid": key,
            "reason": "kills_servers",
            "deaths": deaths,
            "prompt_ids": [list(ids) for ids in {tuple(ticket.prompt) for ticket in tickets}],
            "input_ids": list(request.get("input_ids", [])),
            "sampling_params": request.get("sampling_params", {}),
        }
        log.error("Poison prompt, not sent again: %s", self._evidence[key])
        self.describe(key, {})

    def describe(self, key: str, row: Mapping[str, Any]) -> None:
        """Write the report of a poison prompt, with its dataset row. A write error is only logged."""
        if key in self._reports:
            write_report(self._folder, key, self._reports[key] | {"row": dict(row)})


def write_report(folder: Path | None, key: str, report: Mapping[str, Any]) -> None:
    """Writes the report of a poison prompt, unless `folder` is None. A write error is only logged."""
    if folder is None:
        return
    path = report_path(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(report, indent=1, default=repr))
    except OSError as error:
        log.error("The report of a poison prompt could not be written to %s: %s", path, error)


def report_path(folder: Path, key: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '-', key)}.json"


@asynccontextmanager
async def open_ticket(key: str, prompt: Sequence[int], end: Callable[[Ticket, bool], None]) -> AsyncIterator[Ticket]:
    """A ticket for which `end(ticket, completed)` is called when the context exits."""
    ticket = Ticket(key, prompt, key)
    try:
        yield ticket
    except BaseException:
        end(ticket, False)
        raise
    end(ticket, True)


def prompt_digest(prompt: Sequence[int]) -> bytes:
    return sha256(repr(list(prompt)).encode()).digest()
