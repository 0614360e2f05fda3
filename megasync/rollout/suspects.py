"""Finds the poison prompts, which kill servers, among all prompts that were in flight when servers died.

A pure state machine; the clock is passed in.

              in flight at CROWD_DEATHS                       the only one at ALONE_DEATHS
    free ──────────────────────────────▶ quarantined ⇄ on trial ──────────────────────────▶ poison: final
      ▲                                                   │
      └──── its cut requests completed, there or on trial

A *cut* is a request whose connection broke before its answer was complete. The router does not report which server
handled a request, so cuts and deaths are matched by time: a death counts against every prompt with a request that was
sent before the death and cut within `MATCH_SECONDS` of it. Quarantined prompts are sent only in *trials*: a few of them
run on a server that serves nothing else. If that server dies, at least one member of the trial is presumed poison, so
the members are bisected in further trials, down to one. Prompts that complete are free. With `n` quarantined prompts of
which `k` are poison, this costs at most k * (log2(n) + ALONE_DEATHS) deaths.

Invariant: a prompt is poison only after `ALONE_DEATHS` deaths of a server that ran it alone. So a bystander is never
condemned, however many deaths it was near. Neither is a prompt whose trial met one unrelated death.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

# A prompt is quarantined after this many deaths of servers that also ran other prompts. One would be too few: every
# prompt of the server would need a trial, and most deaths have other causes. Two deaths near the same prompt are rare
# unless it caused them.
CROWD_DEATHS = 2
# A prompt is poison after this many deaths of servers that ran nothing else. One may be unrelated, such as a pre-empted
# machine or an injected fault. Two unrelated deaths in two trials of one prompt, after CROWD_DEATHS, are improbable.
ALONE_DEATHS = 2
# Maximum seconds between a cut and the death that explains it. A crash cuts connections up to a few seconds before the
# exit of the process is detected. A hung server is declared dead first, and its connections last until its process has
# been killed.
MATCH_SECONDS = 15.0
# Seconds after which a death no longer counts against free prompts that were near it.
REMEMBER_SECONDS = 3600.0


class SuspectStatus(StrEnum):
    """The state of a prompt in the life cycle above."""

    FREE = "free"
    QUARANTINED = "quarantined"
    ON_TRIAL = "on trial"
    POISON = "poison"


@dataclass(slots=True)
class _Record:
    # (clock reading, slot) of each death of a server that also ran other prompts, and of one that ran only this prompt.
    crowd: list[tuple[float, int]] = field(default_factory=list)
    alone: list[tuple[float, int]] = field(default_factory=list)
    status: SuspectStatus = SuspectStatus.FREE
    # Size of the largest trial that it may join; 0 before its first.
    limit: int = 0
    # Slots on which a trial was inconclusive, or on which the server died while it ran only this prompt.
    avoid: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Death:
    when: float
    slot: int
    by_requests: bool
    near: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Ruling:
    """The consequence of a death: prompts now known to be poison, and one slot for each restart to refund."""

    poison: tuple[str, ...] = ()
    excused: tuple[int, ...] = ()


class Suspects:
    """Tracks suspect prompts. Prompts are identified by key, servers by slot.

    Deaths that requests cannot have caused (`by_requests=False`), such as in a weight sync, explain cuts but count
    against no prompt.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._deaths: deque[_Death] = deque()
        # The latest cut of each prompt that no death explains yet, as clock readings (sent, cut).
        self._cuts: dict[str, tuple[float, float]] = {}
        self._trial: set[str] = set()
        self._trial_slot: int | None = None
        # Deaths of servers with several prompts that a poison prompt explains.
        self._excused: set[tuple[float, int]] = set()

    def status(self, key: str) -> SuspectStatus:
        record = self._records.get(key)
        return SuspectStatus.FREE if record is None else record.status

    def count(self, status: SuspectStatus) -> int:
        """Count the prompts of this status. Free prompts count only if they were near a death."""
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
        """Return (clock reading, slot) of the deaths that count against a prompt.

        "crowd" lists deaths of servers that also ran other prompts, "alone" those of servers that ran only this one.
        """
        record = self._records[key]
        return {"crowd": list(record.crowd), "alone": list(record.alone)}

    # Events

    def cut(self, key: str, sent: float) -> bool:
        """Record that a request sent at the clock reading `sent` was cut. Returns whether a known death explains it."""
        if (status := self.status(key)) is not SuspectStatus.FREE:
            # On trial only the death of the trial's server counts, which may not have been detected yet.
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
        """Record the death of the server of a slot. `by_requests` is whether requests may have caused it."""
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
        """Clear a prompt whose cut requests have all completed: it kills no server."""
        if self.status(key) is not SuspectStatus.POISON:
            self._records.pop(key, None)
            self._cuts.pop(key, None)
            self._trial.discard(key)

    # Trials, one at a time

    def choose(self, waiting: Iterable[str]) -> tuple[str, ...]:
        """Choose the members of the next trial among waiting prompts. Empty if none of them is quarantined."""
        suspects = [key for key in waiting if self.status(key) is SuspectStatus.QUARANTINED]
        tried = sorted((key for key in suspects if self._records[key].limit), key=lambda key: self._records[key].limit)
        if tried:
            return tuple(tried[: self._records[tried[0]].limit])
        # No prompt was tried before. At least one of them is presumed poison, so the bisection starts here.
        half = (len(suspects) + 1) // 2
        return tuple(suspects[:half])

    def avoid(self, members: Collection[str]) -> set[int]:
        """Return the slots on which one of these prompts was alone at a death, or had an inconclusive trial.

        A trial on another slot shows whether the slot was the cause.
        """
        return {slot for key in members for slot in self._records[key].avoid}

    def begin_trial(self, members: Iterable[str], slot: int) -> None:
        self._trial, self._trial_slot = set(members), slot
        for key in self._trial:
            self._records[key].status = SuspectStatus.ON_TRIAL

    def end_trial(self) -> None:
        """End the trial. Its remaining members return to quarantine."""
        for key in self._trial:
            self._records[key].status = SuspectStatus.QUARANTINED
        self._trial, self._trial_slot = set(), None

    def withdraw(self, key: str) -> None:
        """Remove a prompt from an inconclusive trial because none of its requests is running anymore."""
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
