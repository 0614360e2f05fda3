"""What no schedule may break, asserted at the moment at which it would be broken.

trajectories  admitted == trained + dropped + live, after every event of the buffer; slots within the capacity
              what is trained is within the staleness bound, and was sampled by weights that its version names
              a killed buffer has afterwards what it had before
weights       a version names one set of weights for ever; published versions only grow
              a server that serves holds one whole version, the published one or the one that is being published
training      a group whose steps raise errors is set aside after its attempts, over all drivers together
              the final weights have seen `total_steps` batches, no group twice, and the buffer counts the same
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from megasync.buffer.pacing import Pacing
from megasync.buffer.trajectory import Group
from megasync.config.schema import TrainerConfig

# One set of weights is known by the groups that it was trained on, in order.
Weights = tuple[str, ...]
INITIAL: Weights = ()

# What changes the buffer's state machine.
EVENTS = ("admit", "commit", "drop", "reclaim", "lease", "ack", "step_failed", "publish", "rollback", "close")


class Broken(Exception):
    """A law was broken."""


class Laws:
    def __init__(self, pacing: Pacing, clock: Callable[[], float]) -> None:
        self._pacing = pacing
        self._clock = clock
        self._named: dict[int, Weights] = {0: INITIAL}
        # Versions of tokens that the buffer was given.
        self._sampled: set[int] = set()
        self.published = 0
        # The version that the buffer has heard of.
        self._recorded = 0
        self.publishing: int | None = None
        # Attempts of steps that raised an error, by the group that it came from; drivers so far.
        self._raised: Counter[str] = Counter()
        self._drivers = 0
        # What happened, for whoever looks into a failing seed.
        self.history: list[str] = []

    def note(self, text: str) -> None:
        self.history.append(f"{self._clock():10.3f}  {text}")

    def need(self, holds: bool, law: str) -> None:
        if not holds:
            self.note(f"BROKEN: {law}")
            raise Broken(law)

    def watch(self, state: Any) -> None:
        """Has every event of this state machine followed by a look at its counts."""
        for name in EVENTS:
            setattr(state, name, self._followed(state, name))

    def _followed(self, state: Any, name: str) -> Callable:
        method = getattr(state, name)

        def event(*args: Any) -> Any:
            answer = method(*args)
            if name == "commit":
                self._sampled.update(version for trajectory in args[0].trajectories for version in trajectory.versions)
            if name == "publish":
                self._recorded = args[0]
            if answer is not None or name in ("ack", "publish", "rollback", "close"):
                shown = ", ".join(a.uid if isinstance(a, Group) else str(a) for a in args)
                self.note(f"buffer {name}({shown}) -> {_shown(answer)}")
            self.balance(state.counts())
            return answer

        return event

    def survives(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """The buffer was killed and has started again: nothing is lost."""
        kept = {key: before[key] for key in ("admitted", "trained", "dropped", "live", "slots")}
        self.need(kept.items() <= after.items(), f"a killed buffer had {before} and has {after}")

    def balance(self, counts: dict[str, Any]) -> None:
        dropped = sum(counts["dropped"].values())
        self.need(
            counts["admitted"] == counts["trained"] + dropped + counts["live"],
            f"admitted == trained + dropped + live, but the counts are {counts}",
        )
        self.need(min(counts["slots"].values()) >= 0 and counts["live"] >= 0, f"no count is negative: {counts}")

    # Weights

    def driver_died(self) -> None:
        """All servers went with it: a number that the buffer has not heard of, and that is on no token, may be used again."""
        self._drivers += 1
        self.published = self._recorded
        known = {number for number in self._named if number <= self._recorded} | self._sampled
        self._named = {number: weights for number, weights in self._named.items() if number in known}
        self.publishing = None

    def names(self, version: int, weights: Weights) -> None:
        """Some server holds these weights under this number."""
        known = self._named.setdefault(version, weights)
        self.need(
            known == weights, f"version {version} names weights of {len(known)} groups and of {len(weights)} groups"
        )

    def publish_begins(self, version: int, weights: Weights) -> None:
        self.need(version >= self.published, f"version {version} is published after version {self.published}")
        self.names(version, weights)
        self.publishing = version

    def publish_ends(self, version: int | None) -> None:
        """With a version: all servers that it was for hold it."""
        self.publishing = None
        if version is not None:
            self.published = max(self.published, version)

    def serves(self, url: str, version: int, weights: Weights | None) -> None:
        """A server answers a request out of these weights; None is a mixture."""
        self.need(weights is not None, f"{url} answers from a mixture of versions")
        self.names(version, weights)
        allowed = {self.published, self.publishing}
        self.need(version in allowed, f"{url} answers from version {version}; {sorted(allowed, key=str)} may serve")

    # Training

    def trains(self, seen: Sequence[str], step: int, version: int, groups: Sequence[Group]) -> None:
        """The trainer, whose weights have seen these groups, is given a batch."""
        uids = [group.uid for group in groups]
        self.need(len(uids) == self._pacing.groups_per_step, f"step {step} trains {len(uids)} groups")
        self.need(
            not set(uids) & set(seen) and len(set(uids)) == len(uids), f"step {step} trains a group twice: {uids}"
        )
        self.need(len(seen) == (step - 1) * len(uids), f"step {step} trains weights that have seen {len(seen)} groups")
        self.need(
            version == self.published, f"step {step} trains at version {version}, but {self.published} is published"
        )
        for group in groups:
            for trajectory in group.trajectories:
                age = version - trajectory.oldest_version
                self.need(
                    age <= self._pacing.staleness_bound,
                    f"{group.uid} is trained {age} versions old, over the bound of {self._pacing.staleness_bound}",
                )

    def raises(self, uid: str) -> None:
        """A step raises an error because of this group. A driver that is killed at once counts it for nobody."""
        self._raised[uid] += 1
        most = TrainerConfig().step_attempts + self._drivers
        self.need(self._raised[uid] <= most, f"{uid} is set aside after its attempts, but failed step after step")

    def ends(self, steps: int, seen: Sequence[str], counts: dict[str, Any]) -> None:
        """The run ended as it should."""
        wanted = steps * self._pacing.groups_per_step
        self.need(len(seen) == len(set(seen)) == wanted, f"{len(seen)} groups were trained at the end, not {wanted}")
        self.need(counts["trained"] == wanted, f"the buffer counts {counts['trained']} trained groups, not {wanted}")
        self.balance(counts)


def _shown(answer: Any) -> str:
    return ", ".join(group.uid for group in answer) if isinstance(answer, list) else str(answer)
