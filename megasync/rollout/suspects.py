"""Finds the poison prompts, which kill servers, among all prompts that were in flight when servers died.

A pure state machine; the clock is passed in.

              in flight at CROWD_DEATHS                       the only one at ALONE_DEATHS
    free ──────────────────────────────▶ quarantined ⇄ on trial ──────────────────────────▶ poison: final
      ▲                                                   │
      └──── its cut requests completed, there or on trial

A *cut* is a request whose connection broke before its answer was complete. The router does not say which server a
request went to, so cuts and deaths are matched by time: a death is held against every prompt with a request that was
sent before the death and cut within `MATCH_SECONDS` of it. Quarantined prompts are sent only in *trials*: a few of
them, alone on one server. If that server dies, at least one member of the trial is poison, so the members are tried
again in halves, down to one; whatever completes is free. With `n` quarantined prompts and `k` poison ones among them,
this costs at most k * (log2(n) + ALONE_DEATHS) deaths.

Invariant: a prompt is poison only after `ALONE_DEATHS` deaths of a server that ran it alone. So bystanders are never
condemned, however many deaths they were near, and neither is a prompt that met one chance death in a trial.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

# Deaths in flight beside others before a prompt is quarantined. After a single death everything that the server ran
# would have to be tried, and most deaths have other causes; two that hit the same prompt are rare unless it caused
# them.
CROWD_DEATHS = 2
# Deaths of a server that ran nothing else before a prompt is poison. One may be chance: a pre-empted machine, an
# injected fault. Two chance deaths in two trials of one prompt, after two in the crowd, are not to be expected.
ALONE_DEATHS = 2
# Seconds between a cut and the death that explains it. A crash cuts connections up to a few seconds before the exit of
# the process is noticed. A hanging server is declared dead first, and its connections last until its process has been
# killed.
MATCH_SECONDS = 15.0
# Seconds after which a death is no longer held against free prompts that were near it.
REMEMBER_SECONDS = 3600.0


class SuspectStatus(StrEnum):
    """Where a prompt is in the life cycle above."""

    FREE = "free"
    QUARANTINED = "quarantined"
    ON_TRIAL = "on trial"
    POISON = "poison"


@dataclass(slots=True)
class _Record:
    # (clock reading, slot) of each death beside others, and of each death alone.
    crowd: list[tuple[float, int]] = field(default_factory=list)
    alone: list[tuple[float, int]] = field(default_factory=list)
    status: SuspectStatus = SuspectStatus.FREE
    # Size of the largest trial that it may join; 0 before its first.
    limit: int = 0
    # Slots where a trial was inconclusive, or where it was alone at a death.
    avoid: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Death:
    when: float
    slot: int
    by_requests: bool
    near: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a death implies: prompts now known as poison, and slots whose deaths a prompt explains, once per death."""

    poison: tuple[str, ...] = ()
    excused: tuple[int, ...] = ()


class Suspects:
    """Prompts by key, servers by slot.

    Deaths that requests cannot have caused (`by_requests=False`), such as in a weight sync, explain cuts but count
    against no prompt.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._deaths: deque[_Death] = deque()
        # Latest cut that no death explains yet, as clock readings (sent, cut).
        self._cuts: dict[str, tuple[float, float]] = {}
        self._trial: set[str] = set()
        self._trial_slot: int | None = None
        # Deaths in the crowd that a poison prompt explains.
        self._excused: set[tuple[float, int]] = set()

    def status(self, key: str) -> SuspectStatus:
        record = self._records.get(key)
        return SuspectStatus.FREE if record is None else record.status

    def count(self, status: SuspectStatus) -> int:
        """Number of prompts of this status; free ones count if they were near a death."""
        return sum(record.status is status for record in self._records.values())

    @property
    def members(self) -> frozenset[str]:
        """The prompts on trial."""
        return frozenset(self._trial)

    @property
    def trial_slot(self) -> int | None:
        """The server of the current trial; None between trials."""
        return self._trial_slot

    def evidence(self, key: str) -> dict[str, list[tuple[float, int]]]:
        """(clock reading, slot) of the deaths beside others ("crowd") and of those of a server it had alone ("alone")."""
        record = self._records[key]
        return {"crowd": list(record.crowd), "alone": list(record.alone)}

    # Events

    def cut(self, key: str, sent: float) -> bool:
        """A request sent at `sent` was cut. Returns whether a known death explains it."""
        if (status := self.status(key)) is not SuspectStatus.FREE:
            # On trial only the death of the trial's server counts, which may not have been noticed yet.
            return status is not SuspectStatus.ON_TRIAL
        now = self._clock()
        explained = False
        for death in self._deaths:
            if death.when > sent and now - death.when <= MATCH_SECONDS:
                explained = True
                if key not in death.near:
                    self._hold_against(key, death)
                    return True
        if not explained:
            self._cuts[key] = (sent, now)
        return explained

    def died(self, slot: int, by_requests: bool = True) -> Ruling:
        """The server of a slot died; `by_requests` says whether requests may have caused it."""
        now = self._clock()
        self._forget_old()
        if slot == self._trial_slot:
            return self._trial_failed(slot, by_requests)
        death = _Death(now, slot, by_requests)
        self._deaths.append(death)
        for key, (sent, when) in list(self._cuts.items()):
            if sent <= now and now - when <= MATCH_SECONDS:
                del self._cuts[key]
                self._hold_against(key, death)
        return Ruling()

    def completed(self, key: str) -> None:
        """All cut requests of this prompt have completed: it kills no server."""
        if self.status(key) is not SuspectStatus.POISON:
            self._records.pop(key, None)
            self._cuts.pop(key, None)
            self._trial.discard(key)

    # Trials, one at a time

    def choose(self, waiting: Iterable[str]) -> tuple[str, ...]:
        """The members of the next trial, among prompts that wait; empty when none of them is quarantined."""
        suspects = [key for key in waiting if self.status(key) is SuspectStatus.QUARANTINED]
        tried = sorted((key for key in suspects if self._records[key].limit), key=lambda key: self._records[key].limit)
        if tried:
            return tuple(tried[: self._records[tried[0]].limit])
        # None was tried before: at least one of them all is poison, so halving starts here.
        half = (len(suspects) + 1) // 2
        return tuple(suspects[:half])

    def avoid(self, members: Collection[str]) -> set[int]:
        """Slots where one of these was alone at a death, or did not complete.

        A trial on another slot shows whether the slot was the cause.
        """
        return {slot for key in members for slot in self._records[key].avoid}

    def begin_trial(self, members: Iterable[str], slot: int) -> None:
        self._trial, self._trial_slot = set(members), slot
        for key in self._trial:
            self._records[key].status = SuspectStatus.ON_TRIAL

    def end_trial(self) -> None:
        """Ends the trial. Remaining members stay quarantined."""
        for key in self._trial:
            self._records[key].status = SuspectStatus.QUARANTINED
        self._trial, self._trial_slot = set(), None

    def withdraw(self, key: str) -> None:
        """Takes a prompt out of the trial when none of its requests is running and nothing was proven."""
        if key in self._trial and self._trial_slot is not None:
            self._trial.discard(key)
            self._records[key].status = SuspectStatus.QUARANTINED
            self._records[key].avoid.add(self._trial_slot)

    def _hold_against(self, key: str, death: _Death) -> None:
        death.near.add(key)
        if not death.by_requests:
            return
        record = self._records.setdefault(key, _Record())
        record.crowd.append((death.when, death.slot))
        if len(record.crowd) >= CROWD_DEATHS:
            record.status = SuspectStatus.QUARANTINED

    def _trial_failed(self, slot: int, by_requests: bool) -> Ruling:
        members = self._trial
        self.end_trial()
        if not by_requests or not members:
            return Ruling()
        if len(members) > 1:
            for key in members:
                self._records[key].limit = (len(members) + 1) // 2
            return Ruling(excused=(slot,))
        (key,) = members
        record = self._records[key]
        record.limit = 1
        record.alone.append((self._clock(), slot))
        record.avoid.add(slot)
        if len(record.alone) < ALONE_DEATHS:
            return Ruling(excused=(slot,))
        record.status = SuspectStatus.POISON
        explained = [at for at in record.crowd if at not in self._excused]
        self._excused.update(explained)
        return Ruling(poison=(key,), excused=(slot, *(where for _, where in explained)))

    def _forget_old(self) -> None:
        now = self._clock()
        while self._deaths and now - self._deaths[0].when > MATCH_SECONDS:
            self._deaths.popleft()
        self._cuts = {key: at for key, at in self._cuts.items() if now - at[1] <= MATCH_SECONDS}
        for key, record in list(self._records.items()):
            if record.status is SuspectStatus.FREE:
                record.crowd = [at for at in record.crowd if now - at[0] <= REMEMBER_SECONDS]
                if not record.crowd:
                    del self._records[key]
