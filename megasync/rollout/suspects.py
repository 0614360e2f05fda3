"""Which prompt kills servers: found among all that were in flight when servers died. A pure state machine; the clock is
passed in.

              in flight at CROWD_DEATHS                       the only one at ALONE_DEATHS
    free ──────────────────────────────▶ quarantined ⇄ on trial ──────────────────────────▶ guilty: final
      ▲                                                   │
      └──── what was cut has been completed, there or on trial

A *cut* is a request whose connection broke before its answer was whole. Which server it was at is the router's secret, so
cuts and deaths are matched by time: a death belongs to every prompt with a request that was sent before it and cut within
`MATCH_SECONDS` of it. Prompts that are quarantined are asked only in *trials*: a few of them, alone at one server. A trial
whose server dies has at least one killer in it, so its members are tried again in halves, down to one; whatever completes
is free. With `n` quarantined prompts and `k` killers among them that is at most k * (log2(n) + ALONE_DEATHS) deaths.

Invariant: only a server that died with one suspect alone counts towards guilt, and it does so `ALONE_DEATHS` times. So
bystanders, however many deaths they were near, are never guilty, and neither is whoever met one chance death in a trial.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

# Deaths beside others before a prompt is quarantined. After one death everything that the server ran would have to be tried,
# and most deaths are no prompt's doing; two in a row that hit the same prompt are rare unless it caused them.
CROWD_DEATHS = 2
# Deaths of a server that ran nothing else before a prompt is guilty. One may be chance: a pre-empted machine, a fault
# injected by hand. Two chance deaths within two runs of one prompt, after two in the crowd, are not to be expected.
ALONE_DEATHS = 2
# Seconds between a cut and the death that explains it. A crash cuts connections up to a few seconds before the process is
# seen to be gone; a server that hangs is declared dead first, and its connections last until its process has been killed.
MATCH_SECONDS = 15.0
# Seconds after which a death is held against nobody any more who was near it.
REMEMBER_SECONDS = 3600.0


class Standing(StrEnum):
    FREE = "free"
    QUARANTINED = "quarantined"
    ON_TRIAL = "on trial"
    GUILTY = "guilty"


@dataclass(slots=True)
class _Record:
    # (clock reading, slot) of each death beside others, and of each alone.
    crowd: list[tuple[float, int]] = field(default_factory=list)
    alone: list[tuple[float, int]] = field(default_factory=list)
    standing: Standing = Standing.FREE
    # Largest trial that it may be part of; 0 before its first.
    limit: int = 0
    # Slots where it was tried in vain, or alone at a death.
    avoid: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Death:
    when: float
    slot: int
    to_blame: bool
    near: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a death means: prompts that are guilty now, and slots whose deaths a prompt explains, once for each death."""

    guilty: tuple[str, ...] = ()
    excused: tuple[int, ...] = ()


class Suspects:
    """Prompts by key, servers by slot. Deaths that were `not to_blame` on requests, such as in a weight sync, explain
    cuts and count for nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._deaths: deque[_Death] = deque()
        # Latest cut that no death has explained yet, as (sent, cut).
        self._cuts: dict[str, tuple[float, float]] = {}
        self._trial: set[str] = set()
        self._trial_slot: int | None = None
        # Deaths in the crowd that a guilty prompt explains.
        self._excused: set[tuple[float, int]] = set()

    def standing(self, key: str) -> Standing:
        record = self._records.get(key)
        return Standing.FREE if record is None else record.standing

    def count(self, standing: Standing) -> int:
        """Prompts of this standing; free ones count when they were near a death."""
        return sum(record.standing is standing for record in self._records.values())

    @property
    def members(self) -> frozenset[str]:
        """Who is on trial."""
        return frozenset(self._trial)

    @property
    def trial_slot(self) -> int | None:
        """Where the trial is held; None between two."""
        return self._trial_slot

    def evidence(self, key: str) -> dict[str, list[tuple[float, int]]]:
        """(clock reading, slot) of the deaths that this prompt was near, and of those that it was alone at."""
        record = self._records[key]
        return {"crowd": list(record.crowd), "alone": list(record.alone)}

    # What happens

    def cut(self, key: str, sent: float) -> bool:
        """A request sent at `sent` broke off. True when a death that is known already explains it."""
        if (standing := self.standing(key)) is not Standing.FREE:
            # On trial it is the death of the trial's server that counts, which may not have been seen yet.
            return standing is not Standing.ON_TRIAL
        now = self._clock()
        explained = False
        for death in self._deaths:
            if death.when > sent and now - death.when <= MATCH_SECONDS:
                explained = True
                if key not in death.near:
                    self._hold(key, death)
                    return True
        if not explained:
            self._cuts[key] = (sent, now)
        return explained

    def died(self, slot: int, to_blame: bool = True) -> Ruling:
        """The server of a slot is gone."""
        now = self._clock()
        self._forget_old()
        if slot == self._trial_slot:
            return self._trial_failed(slot, to_blame)
        death = _Death(now, slot, to_blame)
        self._deaths.append(death)
        for key, (sent, when) in list(self._cuts.items()):
            if sent <= now and now - when <= MATCH_SECONDS:
                del self._cuts[key]
                self._hold(key, death)
        return Ruling()

    def completed(self, key: str) -> None:
        """Everything of this prompt that was cut has been completed: it kills nobody."""
        if self.standing(key) is not Standing.GUILTY:
            self._records.pop(key, None)
            self._cuts.pop(key, None)
            self._trial.discard(key)

    # Trials, one at a time

    def choose(self, waiting: Iterable[str]) -> tuple[str, ...]:
        """Whom of those that wait to try next; empty when nobody is quarantined."""
        suspects = [key for key in waiting if self.standing(key) is Standing.QUARANTINED]
        tried = sorted((key for key in suspects if self._records[key].limit), key=lambda key: self._records[key].limit)
        if tried:
            return tuple(tried[: self._records[tried[0]].limit])
        # Known is that one of them all is a killer.
        half = (len(suspects) + 1) // 2
        return tuple(suspects[:half])

    def avoid(self, members: Collection[str]) -> set[int]:
        """Slots where one of these was alone at a death, or did not complete: another one shows whether the slot was the
        cause."""
        return {slot for key in members for slot in self._records[key].avoid}

    def begin_trial(self, members: Iterable[str], slot: int) -> None:
        self._trial, self._trial_slot = set(members), slot
        for key in self._trial:
            self._records[key].standing = Standing.ON_TRIAL

    def end_trial(self) -> None:
        """Without a verdict on whoever is left in it; they stay quarantined."""
        for key in self._trial:
            self._records[key].standing = Standing.QUARANTINED
        self._trial, self._trial_slot = set(), None

    def withdraw(self, key: str) -> None:
        """Nothing of it is running any more, and nothing was proven."""
        if key in self._trial:
            self._trial.discard(key)
            self._records[key].standing = Standing.QUARANTINED
            self._records[key].avoid.add(self._trial_slot)

    # Insides

    def _hold(self, key: str, death: _Death) -> None:
        death.near.add(key)
        if not death.to_blame:
            return
        record = self._records.setdefault(key, _Record())
        record.crowd.append((death.when, death.slot))
        if len(record.crowd) >= CROWD_DEATHS:
            record.standing = Standing.QUARANTINED

    def _trial_failed(self, slot: int, to_blame: bool) -> Ruling:
        members = self._trial
        self.end_trial()
        if not to_blame or not members:
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
        record.standing = Standing.GUILTY
        explained = [at for at in record.crowd if at not in self._excused]
        self._excused.update(explained)
        return Ruling(guilty=(key,), excused=(slot, *(where for _, where in explained)))

    def _forget_old(self) -> None:
        now = self._clock()
        while self._deaths and now - self._deaths[0].when > MATCH_SECONDS:
            self._deaths.popleft()
        self._cuts = {key: at for key, at in self._cuts.items() if now - at[1] <= MATCH_SECONDS}
        for key, record in list(self._records.items()):
            if record.standing is Standing.FREE:
                record.crowd = [at for at in record.crowd if now - at[0] <= REMEMBER_SECONDS]
                if not record.crowd:
                    del self._records[key]
