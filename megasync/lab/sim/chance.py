"""The random decisions of a seed: how long each operation takes, and which faults strike when.

Each decision is a hash of the seed, its subject and the number of earlier draws for that subject. There is no shared
random stream, so a decision does not depend on the order in which tasks run at one moment, and a seed reproduces in
another process.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter

# Faults at a step of a protocol, each with the maximum probability of striking at one opportunity.
FAULTS = {
    "rank dies in a step": 0.15,
    "rank hangs in a step": 0.05,
    "step raises": 0.02,
    "rank dies in a sync": 0.1,
    "rank dies before a save": 0.1,
    "rank dies after a save": 0.1,
    "rank dies while it starts": 0.2,
    "server dies in a sync": 0.1,
    "server dies in its commit": 0.1,
    "server hangs in a sync": 0.05,
    "link breaks in a sync": 0.05,
    "server dies while it starts": 0.2,
    "driver dies": 0.01,
    "reward fails": 0.03,
    "parsing fails": 0.1,
    "slow": 0.05,
    "node is lost": 0.2,
    "node is back": 0.3,
}

# The same, of schedules whose ranks and servers share devices.
OF_TURNS = {"server dies as its memory changes": 0.1}


class Chance:
    """The durations and faults of one schedule.

    The seed draws a probability for each kind of fault; about half of them are zero. The fault named by `likely` has
    its maximum probability.
    """

    def __init__(self, seed: int, likely: str = "") -> None:
        self.seed = seed
        self._asked: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        drawn, of_turns = random.Random(f"{seed}"), random.Random(f"{seed} turns")
        self.rates = {
            kind: most * source.random() if source.random() < 0.5 else 0.0
            for source, faults in ((drawn, FAULTS), (of_turns, OF_TURNS))
            for kind, most in faults.items()
        }
        if likely in self.rates:
            self.rates[likely] = {**FAULTS, **OF_TURNS}[likely]
        self.speed = {kind: drawn.uniform(0.2, 3.0) for kind in ("generate", "train", "sync", "call")}
        self.choice = drawn

    def happens(self, kind: str, about: str = "") -> bool:
        """Return whether the fault strikes now. Every call is a new draw."""
        if not self.rates[kind]:
            return False
        strikes = self._draw(f"{kind} {about}") < self.rates[kind]
        self.met[kind] += strikes
        return strikes

    def always(self, kind: str, about: str) -> bool:
        """Return whether the fault is a fixed property of `about`, such as a group. The result never changes."""
        strikes = _number(f"{self.seed} {kind} {about}") < self.rates[kind]
        self.met[kind] += strikes
        return strikes

    def seconds(self, kind: str, mean: float, about: str = "") -> float:
        """Draw a duration in seconds around `mean`. If the fault "slow" strikes, it is 20 times as long."""
        slow = 20.0 if self.happens("slow", f"{kind} {about}") else 1.0
        return mean * self.speed.get(kind, 1.0) * slow * (0.05 + 2 * self._draw(f"seconds {kind} {about}"))

    def share(self, about: str) -> float:
        """Draw a number in [0, 1)."""
        return self._draw(f"share {about}")

    def _draw(self, key: str) -> float:
        self._asked[key] += 1
        return _number(f"{self.seed} {key} {self._asked[key]}")


def _number(text: str) -> float:
    """Hash the text to a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48
