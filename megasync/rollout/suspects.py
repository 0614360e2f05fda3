"""Finds the prompts that kill servers, or workers, among all that were in flight at a death. A pure state machine.

             near CROWD_DEATHS deaths                alone at ALONE_DEATHS deaths
    free ─────────────────────────────▶ suspected ────────────────────────────────▶ poison: final
      ▲                                     │
      └────────────── completed ────────────┘

Suspects run only in *trials*, on a server that runs nothing else. Their first trial is a common one, because most are
bystanders; what completes is free. If its server dies, they run one at a time. So `k` poison prompts among `n` suspects
cost at most CROWD_DEATHS + 1 + k * ALONE_DEATHS deaths and n + k trials.

Invariant: a prompt is poison only after `ALONE_DEATHS` deaths of a server that ran it alone (`trial_failed`). So a
bystander is never condemned, however many deaths it was near, and neither is a prompt that met one unrelated death.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

# A prompt is suspected after this many deaths of servers that also ran other prompts. After one, every prompt of the
# server would need a trial, and most deaths have other causes.
CROWD_DEATHS = 2
# A prompt is poison after this many deaths of servers that ran nothing else. One may be unrelated, such as a pre-empted
# machine or an injected fault.
ALONE_DEATHS = 2
# Seconds after which a prompt that is not suspected is no longer blamed for the deaths that it was near.
REMEMBER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Death:
    """The clock reading of a death, and the number of the server or worker."""

    when: float
    slot: int


@dataclass(slots=True)
class _Evidence:
    # Deaths of servers that also ran other prompts, and of servers that ran only this one.
    crowd: list[Death] = field(default_factory=list[Death])
    alone: list[Death] = field(default_factory=list[Death])
    # How many of the former came one after the other, and the clock reading at which the last of these cut a request.
    independent: int = 0
    cut: float = 0.0
    # Whether the server of one of its trials has died.
    tried: bool = False


class Suspects:
    """The evidence against each prompt, by its key. `refund(slot)` returns the restart after a death in a trial, or one
    that a poison prompt explains, to a server's budget.
    """

    def __init__(self, refund: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._refund = refund
        self._clock = clock
        self._evidence: dict[str, _Evidence] = {}
        # Deaths in a crowd that a poison prompt explains.
        self._explained: set[Death] = set()

    def suspected(self, key: str) -> bool:
        """Whether the prompt may only run in a trial; true of a poison prompt."""
        return key in self._evidence and self._evidence[key].independent >= CROWD_DEATHS

    def poison(self, key: str) -> bool:
        return key in self._evidence and len(self._evidence[key].alone) >= ALONE_DEATHS

    def keys(self) -> list[str]:
        """The prompts that were near a death and have not completed since, and the poison ones."""
        return list(self._evidence)

    def deaths(self, key: str, place: str) -> dict[str, list[dict[str, Any]]]:
        """The deaths that count against a prompt, for its report; `place` is the name of what died."""
        offset, evidence = time.time() - self._clock(), self._evidence[key]
        return {
            kind: [{place: death.slot, "unix_time": round(offset + death.when, 3)} for death in deaths]
            for kind, deaths in (("crowd", evidence.crowd), ("alone", evidence.alone))
        }

    def near(self, key: str, death: Death, sent: float, cut: float) -> None:
        """A death has cut a request of this prompt, which ran beside others; `sent` and `cut` are clock readings.

        Deaths count only if they come one after the other: a lost node, with requests for one prompt on several of its
        servers, is one cause.
        """
        oldest = self._clock() - REMEMBER_SECONDS
        for old in [key for key, each in self._evidence.items() if each.cut < oldest and not self.suspected(key)]:
            del self._evidence[old]
        evidence = self._evidence.setdefault(key, _Evidence())
        evidence.crowd.append(death)
        if not evidence.independent or sent >= evidence.cut:
            evidence.independent += 1
            evidence.cut = cut

    def completed(self, key: str) -> None:
        """All requests of the prompt that were cut have completed: it kills nothing."""
        if not self.poison(key):
            self._evidence.pop(key, None)

    def next_trial(self, waiting: Iterable[str]) -> tuple[str, ...]:
        """The prompts of the next trial, among suspects that wait: all that were in none, or else a single one."""
        suspects = [key for key in waiting if self.suspected(key) and not self.poison(key)]
        waiting = sorted(suspects, key=lambda key: -len(self._evidence[key].alone))
        untried = [key for key in waiting if not self._evidence[key].tried]
        return tuple(untried or waiting[:1])

    def avoid(self, keys: Collection[str]) -> set[int]:
        """The slots on which one of these prompts was alone at a death: another one shows if the slot was the cause."""
        return {death.slot for key in keys for death in self._evidence[key].alone}

    def trial_failed(self, keys: Collection[str], slot: int) -> str | None:
        """The server of a slot has died while it ran only these prompts. Returns the one that is poison, if any."""
        for key in keys:
            self._evidence[key].tried = True
        if keys:
            self._refund(slot)
        if len(keys) != 1:
            return None
        (key,) = keys
        evidence = self._evidence[key]
        evidence.alone.append(Death(self._clock(), slot))
        if not self.poison(key):
            return None
        for death in evidence.crowd:
            if death not in self._explained:
                self._explained.add(death)
                self._refund(death.slot)
        return key
