"""Protects the fleet from poison prompts, which kill servers: holds suspects back, and runs their trials.

    worker: QuarantineClient ──(requests that were cut, or whose prompt is watched)──▶ driver: Quarantine ◀── the fleet
                     ▲────────────(clearance for a request; which prompts are watched)───────┘

    task    consumes                    produces                      waits for
    ------  --------------------------  ----------------------------  -----------------------------------------------
    trials  suspects waiting in enter   exclusive use of one server   completed requests, the server's exit, the clock

A *cut* is a request whose connection broke before its answer was complete. The router does not report which server
handled a request, so cuts and deaths are matched by time. The driver decides what follows, from the evidence of all
workers (`placement.Suspects`); a request that no death is near costs it nothing.

A request that was cut is not sent again until the fleet has had time to detect a death. Otherwise a prompt that kills
immediately would kill the next server meanwhile. Time spent in `enter` does not count against the request's deadline.

Prompts with the same tokens, such as two epochs of a small dataset in flight together, are one suspect. Once a prompt
is poison, all requests of its group are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import MegasyncError, PoisonPrompt
from megasync.rollout.inflight import Attempt, prompt_digest
from megasync.rollout.placement import Death, Suspects, report_path, write_report
from megasync.rollout.selection import KILLS_SERVERS

log = logging.getLogger(__name__)

# Seconds after a cut before the request is sent again. The end of a process is reported at once, but a killed server
# takes a moment to exit.
VERDICT_SECONDS = 3.0
# Maximum seconds between a cut and the death that explains it. A crash cuts connections up to a few seconds before the
# exit of the process is detected. A hung server is declared dead first, and its connections last until its process has
# been killed.
MATCH_SECONDS = 15.0
# Seconds after which a trial acquits what still runs. The time that the fleet needs to detect a hung server is added,
# because a prompt may also make a server hang.
TRIAL_SECONDS = 120.0
# Seconds between two attempts to isolate a server for a trial.
_SERVER_WAIT = 1.0


class TrialServers(Protocol):
    """The part of the fleet that the quarantine uses."""

    async def isolate(self, avoid: Collection[int]) -> tuple[int, str] | None:
        """Take a serving server, preferably not one to avoid, out of the router and drain it. Returns its slot and URL,
        or None if no server could be isolated.
        """

    def release(self, slot: int) -> None:
        """Return an isolated server to the router."""

    def refund_restart(self, slot: int) -> None:
        """Remove a death caused by a prompt from the restart budget of this server."""


@dataclass(eq=False, slots=True)
class _Trial:
    slot: int
    url: str
    # Digests of the prompts that have not completed.
    prompts: set[str]


@dataclass(eq=False, slots=True)
class _Cut:
    prompt: str
    sent: float
    when: float


@dataclass(frozen=True, slots=True)
class _RecentDeath:
    death: Death
    by_requests: bool
    # Prompts with a request that it has cut. After a trial these are all.
    near: set[str]
    alone: bool = False


class Quarantine:
    """Holds suspects back, runs their trials, and rejects poison prompts. Prompts are known by their digests.

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
        self._suspects = Suspects(servers.refund_restart, clock)
        # The latest attempt of each generation that was cut or held back and has not ended, by prompt; and its prompt.
        self._attempts: dict[str, dict[tuple[Hashable, int], Attempt]] = {}
        self._prompts: dict[tuple[Hashable, int], str] = {}
        # Of the last MATCH_SECONDS: deaths, and cuts that no death explains yet.
        self._deaths: list[_RecentDeath] = []
        self._cuts: list[_Cut] = []
        # The calls of `enter` that have not returned, by prompt, and how often one has waited so far.
        self._held: Counter[str] = Counter()
        self.holds = 0
        self._trial: _Trial | None = None
        self._trials: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        # Why a prompt is never sent again, by its digest, and by the keys of its groups.
        self._poison: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._reports: dict[str, dict[str, Any]] = {}
        self._followers: list[Callable[[frozenset[str]], None]] = []
        self._watched = frozenset[str]()
        self._telling: asyncio.Handle | None = None

    def follow(self, on_watched: Callable[[frozenset[str]], None]) -> None:
        """Call `on_watched` with what `QuarantineClient.watch` needs to know, whenever it has changed."""
        self._followers.append(on_watched)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/suspect_prompts": float(len(self._suspects.keys()) - len(self._poison)),
            "rollout/poison_prompts": float(len(self._refusals)),
        }

    @property
    def busy(self) -> bool:
        """Whether any request is held back or on trial and may therefore take longer than usual."""
        return bool(self._held or self._trial)

    async def close(self) -> None:
        if self._trials is not None:
            await cancel_and_wait(self._trials)

    # Called by clients

    async def enter(self, client: Hashable, number: int, attempt: Attempt) -> str | None:
        """Wait until this attempt of a client's ticket may be sent; see `QuarantineClient.enter`."""
        prompt = self._prompts[client, number] = prompt_digest(attempt.prompt)
        self._attempts.setdefault(prompt, {})[client, number] = attempt
        self._held[prompt] += 1
        try:
            if attempt.cut is not None:
                await self._verdict(_Cut(prompt, *(self._clock() - age for age in attempt.cut)))
            while not (evidence := self._poison.get(prompt) or self._refusals.get(attempt.key)):
                if not self._suspects.suspected(prompt):
                    return None
                if self._trial is not None and prompt in self._trial.prompts:
                    return self._trial.url
                if self._trials is None or self._trials.done():
                    self._trials = asyncio.create_task(self._run_trials(), name="trials of suspects")
                self.holds += 1
                await self._changed.wait()
            self._refusals[attempt.key] = evidence
            raise PoisonPrompt(evidence)
        finally:
            self._held -= Counter([prompt])

    def end(self, client: Hashable, number: int, completed: bool) -> None:
        """End a client's ticket. A prompt is cleared when all its requests that were cut have completed."""
        prompt = self._prompts.pop((client, number), "")
        attempts = self._attempts.get(prompt, {})
        if attempts.pop((client, number), None) is None or attempts:
            return
        del self._attempts[prompt]
        self._leave_trial(prompt, completed)

    def lost(self, client: Hashable) -> None:
        """End all tickets of a client: its process is gone, so none of them completes."""
        for owner, number in [ticket for ticket in self._prompts if ticket[0] == client]:
            self.end(owner, number, completed=False)

    # Called by the fleet

    def left(self, slot: int, died: bool, by_requests: bool) -> None:
        """Report that a server stopped serving. `by_requests` is whether requests may have killed it."""
        now, near, alone = self._clock(), set[str](), False
        if self._trial is not None and self._trial.slot == slot:
            near, alone, self._trial = self._trial.prompts, True, None
            if died and by_requests and near:
                log.warning("Server %d died while running only %s", slot, self._keys(near))
                if (poison := self._suspects.trial_failed(near, slot)) is not None:
                    self._mark_poison(poison)
        if died:
            self._deaths = [each for each in self._deaths if now - each.death.when <= MATCH_SECONDS]
            self._deaths.append(_RecentDeath(Death(now, slot), by_requests, near, alone))
            # Those whose prompts have completed meanwhile explain nothing.
            cuts = [cut for cut in self._cuts if now - cut.when <= MATCH_SECONDS and cut.prompt in self._attempts]
            self._cuts = [cut for cut in cuts if not self._explains(cut)]
        self._notify()

    # Cuts and deaths

    async def _verdict(self, cut: _Cut) -> None:
        """Wait until the death that explains a cut is known, or none is to be expected anymore."""
        if self._explains(cut):
            self._notify()
            return
        self._cuts.append(cut)
        self.holds += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(cut.when + self._verdict_seconds - self._clock()):
                while cut in self._cuts:
                    await self._changed.wait()

    def _explains(self, cut: _Cut) -> bool:
        """Whether a recent death explains a cut. The first that was not near its prompt before counts against it."""
        if self._trial is not None and cut.prompt in self._trial.prompts:
            return False
        fitting = [
            each
            for each in self._deaths
            if cut.sent < each.death.when
            and abs(each.death.when - cut.when) <= MATCH_SECONDS
            and (cut.prompt in each.near or not each.alone)
        ]
        first = next((each for each in fitting if cut.prompt not in each.near), None)
        if first is not None:
            first.near.add(cut.prompt)
            if first.by_requests:
                self._suspects.near(cut.prompt, first.death, cut.sent, cut.when)
        return bool(fitting)

    # Trials

    async def _run_trials(self) -> None:
        # Wait for other prompts that were cut by the same death.
        await asyncio.sleep(self._verdict_seconds)
        while prompts := self._suspects.next_trial(self._held):
            try:
                place = await self._servers.isolate(self._suspects.avoid(prompts))
            except MegasyncError as error:
                log.warning("No server could be isolated for suspect prompts, retrying: %s", error)
                place = None
            if place is None:
                await asyncio.sleep(_SERVER_WAIT)
                continue
            try:
                # Some may have ended while the server was being isolated.
                await self._run_trial(_Trial(*place, {prompt for prompt in prompts if self._held[prompt]}))
            finally:
                self._trial = None
                self._servers.release(place[0])
                self._notify()

    async def _run_trial(self, trial: _Trial) -> None:
        log.warning("Server %d runs only %s, in flight at server deaths", trial.slot, self._keys(trial.prompts))
        self._trial = trial
        self._notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._trial_seconds):
                while self._trial is trial and trial.prompts:
                    await self._changed.wait()
        for prompt in sorted(trial.prompts) if self._trial is trial else ():
            seconds = self._trial_seconds
            log.info("%s ran alone for %.0f s and killed no server: released", self._keys([prompt]), seconds)
            self._leave_trial(prompt, cleared=True)

    def _leave_trial(self, prompt: str, cleared: bool) -> None:
        if self._trial is not None:
            self._trial.prompts.discard(prompt)
        if cleared:
            self._suspects.completed(prompt)
        self._notify()

    def _notify(self) -> None:
        """Wakes all waits, and tells followers of suspects that are new or free: once, however many there are."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_soon(self._tell_watched)

    def _tell_watched(self) -> None:
        self._telling = None
        watched = frozenset([*filter(self._suspects.suspected, self._suspects.keys()), *self._refusals])
        if watched != self._watched:
            self._watched = watched
            for on_watched in self._followers:
                on_watched(watched)

    def _keys(self, prompts: Collection[str]) -> str:
        return ", ".join(sorted({each.key for prompt in prompts for each in self._attempts.get(prompt, {}).values()}))

    # Poison prompts

    def _mark_poison(self, prompt: str) -> None:
        attempts = list(self._attempts[prompt].values())
        first, deaths = attempts[0], self._suspects.deaths(prompt, "server")
        path = "" if self._folder is None else f"; see {report_path(self._folder, first.key)}"
        self._poison[prompt] = evidence = (
            f"prompt {first.key} was in flight at {len(deaths['crowd'])} server deaths beside others, and alone at "
            f"{len(deaths['alone'])} more (servers {', '.join(str(each['server']) for each in deaths['alone'])}){path}"
        )
        self._refusals |= {each.key: evidence for each in attempts}
        self._reports[first.key] = {
            "uid": first.key,
            "reason": KILLS_SERVERS,
            "deaths": deaths,
            "prompt_ids": [list(first.prompt)],
            "input_ids": list(first.body.get("input_ids", [])),
            "sampling_params": first.body.get("sampling_params", {}),
        }
        log.error("Poison prompt, not sent again: %s", evidence)
        self.describe(first.key, {})

    def describe(self, key: str, row: Mapping[str, Any]) -> None:
        """Write the report of a poison prompt, with its dataset row. A write error is only logged."""
        if key in self._reports:
            write_report(self._folder, key, self._reports[key] | {"row": dict(row)})
