"""The groups of a run in the order of their admission, and how many ended how. The rules are in `state`.

Invariant: ``admitted == trained + dropped + live`` after each method. Every change goes through `_move`, which reports
it to ``changed`` and keeps each open group in the index of its state. So every query takes time logarithmic in the
number of open groups, apart from those that list groups; a change also moves a part of two lists of numbers.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megasync.buffer.payload import Body, GroupHeader, LeasedGroup


class GroupState(StrEnum):
    """The first four states are live. A published group only keeps its place in the order of admission."""

    GENERATING = "generating"
    RETURNED = "returned"
    FINISHED = "finished"
    LEASED = "leased"
    UNPUBLISHED = "unpublished"
    PUBLISHED = "published"
    DROPPED = "dropped"


LIVE = (GroupState.GENERATING, GroupState.RETURNED, GroupState.FINISHED, GroupState.LEASED)
UNFINISHED = (GroupState.GENERATING, GroupState.RETURNED)
TRAINED = (GroupState.UNPUBLISHED, GroupState.PUBLISHED)

# Reasons of drops as earlier ledgers and checkpoints name them, and their names now.
RENAMED_REASONS = {"over_age": "stale"}

# Reasons of drops that tell the mean reward: those of `rollout.selection` for groups with nothing to learn.
SCORES = {"all_solved": 1.0, "all_failed": 0.0}

# Loads a recorded response on demand: the buffer keeps no tokens that the ledger has.
StoredPartial = Callable[[], bytes]
# Unfinished responses by (sample, turn), encoded.
Partials = dict[tuple[int, int], bytes | StoredPartial]


@dataclass(slots=True)
class GroupEntry:
    """One group in the buffer. ``number`` is its place in the order of admission, over the whole life of a run."""

    uid: str
    number: int
    state: GroupState
    # When the current generation began, on the injected clock.
    since: float
    # The step that leased or trained it; for a dropped group, the step that was to be trained next.
    step: int = 0
    # Why it was dropped.
    reason: str = ""
    # Held while finished or leased.
    group: LeasedGroup | None = None
    # Version of the group's oldest trained token, also after it was trained.
    oldest_version: int = 0
    # The mean reward of its responses; None until it is known.
    score: float | None = None
    # Who reclaimed it. The same claimant gets it again when it asks again.
    claimant: str = ""
    partials: Partials = field(default_factory=Partials)

    @property
    def held(self) -> LeasedGroup:
        """The group while it is finished or leased. Raises ValueError otherwise."""
        if self.group is None:
            raise ValueError(f"group {self.uid} is {self.state} and has no responses")
        return self.group


class GroupIndex:
    """``open`` holds all groups from the oldest unpublished one on, ``ended`` what was trained or dropped since the
    oldest kept checkpoint. ``changed`` is called with each changed entry. ``inherited`` holds the counters of an
    earlier run that left no entries.
    """

    def __init__(self, changed: Callable[[GroupEntry], None], inherited: dict[str, Any]) -> None:
        self.changed = changed
        self.open: dict[str, GroupEntry] = {}
        self.ended: dict[str, GroupEntry] = {}
        self.dropped: Counter[str] = Counter()
        self._count_dropped(inherited.get("dropped", {}))
        self.trained: int = inherited.get("trained", 0)
        self.admitted = self.trained + self.dropped.total()
        # Open groups by number, their numbers, and the numbers in each state.
        self._by_number: dict[int, GroupEntry] = {}
        self._order = Numbers()
        self._in = {state: Numbers() for state in GroupState if state is not GroupState.DROPPED}
        # The group that each claimant generates.
        self._claims: dict[str, GroupEntry] = {}

    # Queries

    def find(self, uid: str) -> GroupEntry | None:
        return self.open.get(uid) or self.ended.get(uid)

    def among(self, *states: GroupState) -> list[GroupEntry]:
        """Open groups in these states, oldest first."""
        return [self._by_number[number] for number in sorted(n for state in states for n in self._in[state])]

    def oldest(self, *states: GroupState) -> GroupEntry | None:
        """The oldest open group in one of these states."""
        first = min((self._in[state][0] for state in states if self._in[state]), default=None)
        return None if first is None else self._by_number[first]

    def claimed(self, claimant: str) -> GroupEntry | None:
        """The group that this claimant is generating."""
        return self._claims.get(claimant)

    def slots(self) -> dict[GroupState, int]:
        return {state: len(numbers) for state, numbers in self._in.items()}

    def live(self) -> int:
        return sum(len(self._in[state]) for state in LIVE)

    def ready(self, window: int) -> int:
        """How many finished groups may be leased now; see `config.pacing` for the window."""
        return bisect_right(self._in[GroupState.FINISHED], self._last_in(window))

    def batch(self, groups: int) -> list[GroupEntry]:
        """The oldest finished groups. At least this many must be `ready`."""
        return [self._by_number[number] for number in self._in[GroupState.FINISHED][:groups]]

    def _last_in(self, window: int) -> int:
        """The number of the last open group within the window, whose first is the oldest unfinished group."""
        if (oldest := self.oldest(*UNFINISHED)) is None:
            return sys.maxsize
        last = bisect_left(self._order, oldest.number) + window - 1
        return self._order[last] if last < len(self._order) else sys.maxsize

    def trained_after(self, step: int) -> list[GroupEntry]:
        """Groups that later steps trained on, oldest first."""
        later = (entry for entry in self.ended.values() if entry.state in TRAINED and entry.step > step)
        return sorted(later, key=lambda entry: entry.number)

    # Changes

    def admit(self, uid: str, now: float) -> None:
        entry = GroupEntry(uid, self.admitted, GroupState.GENERATING, now)
        self.admitted += 1
        self._enter(entry)
        self.changed(entry)

    def generate(self, entry: GroupEntry, now: float, claimant: str) -> None:
        entry.since, entry.claimant = now, claimant
        self._move(entry, GroupState.GENERATING)

    def give_back(self, entry: GroupEntry, now: float) -> None:
        """Queues the group for another generation, which may continue from its partials."""
        self._unclaim(entry)
        entry.since, entry.claimant, entry.group = now, "", None
        self._move(entry, GroupState.RETURNED)

    def finish(self, entry: GroupEntry, header: GroupHeader, body: Body) -> None:
        entry.group, entry.oldest_version = LeasedGroup(header, body), header.oldest_version or 0
        self._move(entry, GroupState.FINISHED)

    def lease(self, entry: GroupEntry, step: int) -> None:
        entry.step = step
        self._move(entry, GroupState.LEASED)

    def put_back(self, entry: GroupEntry) -> None:
        """Makes a leased group finished again."""
        self._move(entry, GroupState.FINISHED)

    def train(self, entry: GroupEntry) -> None:
        entry.group = None
        self.ended[entry.uid] = entry
        self.trained += 1
        self._move(entry, GroupState.UNPUBLISHED)

    def publish(self) -> None:
        for entry in self.among(GroupState.UNPUBLISHED):
            self._move(entry, GroupState.PUBLISHED)
        self._forget_published()

    def drop(self, entry: GroupEntry, reason: str, step: int) -> None:
        self._leave(entry)
        entry.reason, entry.step, entry.group = reason, step, None
        entry.partials.clear()
        self.ended[entry.uid] = entry
        self.dropped[reason] += 1
        entry.state = GroupState.DROPPED
        self.changed(entry)
        self._forget_published()

    def reopen(self, entries: Iterable[GroupEntry], groups: Mapping[str, LeasedGroup], now: float) -> None:
        """Makes trained groups finished again, in their old places; returned where it is gone."""
        for entry in entries:
            del self.ended[entry.uid]
            self.trained -= 1
            if entry.uid not in self.open:
                self._enter(entry)
            entry.since, entry.group = now, groups.get(entry.uid)
            self._move(entry, GroupState.RETURNED if entry.group is None else GroupState.FINISHED)
        # Trained groups behind the oldest reopened one count in its window again.
        first = self._order[0] if self._order else sys.maxsize
        for entry in self.ended.values():
            if entry.state in TRAINED and entry.number > first and entry.uid not in self.open:
                self._enter(entry)

    def forget(self, step: int) -> None:
        """Removes groups that ended at a step up to this one, unless they are behind one that may be reopened."""
        later = (e.number for e in self.ended.values() if e.state in TRAINED and e.step > step)
        first = min(later, default=sys.maxsize)
        for entry in [e for e in self.ended.values() if e.step <= step and e.number < first and e.uid not in self.open]:
            del self.ended[entry.uid]

    def load(self, entries: Iterable[GroupEntry], admitted: int, trained: int, dropped: dict[str, int]) -> None:
        """Takes over recorded entries, in any order, with the counts of all groups ever recorded."""
        self.admitted += admitted
        self.trained += trained
        self._count_dropped(dropped)
        for entry in entries:
            if entry.state not in LIVE:
                self.ended[entry.uid] = entry
            if entry.state is not GroupState.DROPPED:
                self._enter(entry)
        self._forget_published()

    def _count_dropped(self, dropped: Mapping[str, int]) -> None:
        for reason, number in dropped.items():
            self.dropped[RENAMED_REASONS.get(reason, reason)] += number

    def _enter(self, entry: GroupEntry) -> None:
        self.open[entry.uid] = self._by_number[entry.number] = entry
        self._order.add(entry.number)
        self._in[entry.state].add(entry.number)
        self._claim(entry)

    def _leave(self, entry: GroupEntry) -> None:
        del self.open[entry.uid], self._by_number[entry.number]
        self._order.discard(entry.number)
        self._in[entry.state].discard(entry.number)
        self._unclaim(entry)

    def _move(self, entry: GroupEntry, state: GroupState) -> None:
        self._in[entry.state].discard(entry.number)
        self._in[state].add(entry.number)
        entry.state = state
        if state is GroupState.GENERATING:
            self._claim(entry)
        else:
            self._unclaim(entry)
        self.changed(entry)

    def _claim(self, entry: GroupEntry) -> None:
        if entry.claimant and entry.state is GroupState.GENERATING:
            self._claims[entry.claimant] = entry

    def _unclaim(self, entry: GroupEntry) -> None:
        if self._claims.get(entry.claimant) is entry:
            del self._claims[entry.claimant]

    def _forget_published(self) -> None:
        """Removes the oldest entries while they are published. Later ones still count in the window of a straggler."""
        while self._order and (first := self._by_number[self._order[0]]).state is GroupState.PUBLISHED:
            self._leave(first)


class Numbers(list[int]):
    """Ascending numbers without repetition.

    A change moves the numbers behind it. Up to 10,000 of them that takes about a microsecond, less than a tree of
    counts in Python would.
    """

    def add(self, number: int) -> None:
        at = bisect_left(self, number)
        if at == len(self) or self[at] != number:
            self.insert(at, number)

    def discard(self, number: int) -> None:
        at = bisect_left(self, number)
        if at < len(self) and self[at] == number:
            del self[at]
