"""The groups of a run in the order of their admission, and how many ended how. Rules are in `state`.

Invariant: ``admitted == trained + dropped + live`` after each method; every change goes through `_move`, which tells
``changed`` about it and keeps each open group in the index of its state. So no question costs more than the logarithm of
the number of open groups, apart from those that list groups.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megasync.buffer.entry import LIVE, RENAMED_REASONS, TRAINED, UNFINISHED, Entry, State, Stored
from megasync.buffer.numbers import NumberSet
from megasync.trajectory import Group


class Book:
    """``open`` holds the groups from the oldest one that is not yet published; ``ended`` what was trained or dropped
    since the oldest kept checkpoint. ``changed`` is called with each entry that changed. ``inherited`` are the counters
    of an earlier run that left no entries.
    """

    def __init__(self, changed: Callable[[Entry], None], inherited: dict[str, Any]) -> None:
        self._changed = changed
        self.open: dict[str, Entry] = {}
        self.ended: dict[str, Entry] = {}
        self.dropped: Counter[str] = Counter()
        self._count_dropped(inherited.get("dropped", {}))
        self.trained: int = inherited.get("trained", 0)
        self.admitted = self.trained + self.dropped.total()
        # Open groups by number, their numbers, and those of each state.
        self._by_number: dict[int, Entry] = {}
        self._order = NumberSet()
        self._in = {state: NumberSet() for state in State if state is not State.DROPPED}
        # What each claimant generates.
        self._claims: dict[str, Entry] = {}

    # What is there

    def find(self, uid: str) -> Entry | None:
        return self.open.get(uid) or self.ended.get(uid)

    def among(self, *states: State) -> list[Entry]:
        """Open groups in these states, oldest first."""
        return [self._by_number[number] for number in sorted(n for state in states for n in self._in[state])]

    def oldest(self, *states: State) -> Entry | None:
        """The oldest open group in one of these states."""
        first = min((self._in[state].nth(0) for state in states if self._in[state]), default=None)
        return None if first is None else self._by_number[first]

    def claimed(self, claimant: str) -> Entry | None:
        """What this claimant is generating."""
        return self._claims.get(claimant)

    def slots(self) -> dict[State, int]:
        return {state: len(numbers) for state, numbers in self._in.items()}

    def live(self) -> int:
        return sum(len(self._in[state]) for state in LIVE)

    def oldest_unfinished(self) -> Entry | None:
        return self.oldest(*UNFINISHED)

    def ready(self, window: int) -> int:
        """How many finished groups may be leased now; see `pacing` for the window."""
        return self._in[State.FINISHED].rank(self._last_in(window))

    def batch(self, groups: int) -> list[Entry]:
        """The oldest finished groups; so many must be `ready`."""
        return [self._by_number[self._in[State.FINISHED].nth(index)] for index in range(groups)]

    def _last_in(self, window: int) -> int:
        """The number of the last open group within the window."""
        oldest = self.oldest_unfinished()
        if oldest is None:
            return sys.maxsize
        # The oldest unfinished group is the window's first.
        last = self._order.rank(oldest.number) - 1 + window - 1
        return self._order.nth(last) if last < len(self._order) else sys.maxsize

    def trained_after(self, step: int) -> list[Entry]:
        """Groups that later steps were trained on, oldest first."""
        found = (entry for entry in self.ended.values() if entry.state in TRAINED and entry.step > step)
        return sorted(found, key=lambda entry: entry.number)

    # What happens to it

    def admit(self, uid: str, now: float) -> None:
        entry = Entry(uid, self.admitted, State.GENERATING, now)
        self.admitted += 1
        self._enter(entry)
        self._changed(entry)

    def generate(self, entry: Entry, now: float, claimant: str) -> None:
        entry.since, entry.claimant = now, claimant
        self._move(entry, State.GENERATING)

    def give_back(self, entry: Entry, now: float) -> None:
        """Its generation has to begin again, or to go on from its partials."""
        self._unclaim(entry)
        entry.since, entry.claimant, entry.group = now, "", None
        self._move(entry, State.RETURNED)

    def finish(self, entry: Entry, group: Group) -> None:
        entry.group, entry.oldest_version = group, group.oldest_version or 0
        self._move(entry, State.FINISHED)

    def lease(self, entry: Entry, step: int) -> None:
        entry.step = step
        self._move(entry, State.LEASED)

    def put_back(self, entry: Entry) -> None:
        """From leased to finished."""
        self._move(entry, State.FINISHED)

    def train(self, entry: Entry) -> None:
        entry.group = None
        self.ended[entry.uid] = entry
        self.trained += 1
        self._move(entry, State.UNPUBLISHED)

    def note(self, entry: Entry) -> None:
        """Something about the group changed that is not its state."""
        self._changed(entry)

    def publish(self) -> None:
        for entry in self.among(State.UNPUBLISHED):
            self._move(entry, State.PUBLISHED)
        self._forget_published()

    def drop(self, entry: Entry, reason: str, step: int) -> None:
        self._leave(entry)
        entry.reason, entry.step, entry.group = reason, step, None
        entry.partials.clear()
        self.ended[entry.uid] = entry
        self.dropped[reason] += 1
        entry.state = State.DROPPED
        self._changed(entry)
        self._forget_published()

    def reopen(self, entries: Iterable[Entry], payloads: Mapping[str, Group | Stored], now: float) -> None:
        """Trained groups are finished again, in their old places; returned, where their payload is gone."""
        for entry in entries:
            del self.ended[entry.uid]
            self.trained -= 1
            if entry.uid not in self.open:
                self._enter(entry)
            entry.since, entry.group = now, payloads.get(entry.uid)
            self._move(entry, State.RETURNED if entry.group is None else State.FINISHED)

    def forget(self, step: int) -> None:
        """Groups that ended at a step up to this one will not be asked about again."""
        for entry in [entry for entry in self.ended.values() if entry.step <= step and entry.uid not in self.open]:
            del self.ended[entry.uid]

    def load(self, entries: Iterable[Entry], admitted: int, trained: int, dropped: dict[str, int]) -> None:
        """Takes over recorded entries, in any order, with the numbers of all groups ever recorded."""
        self.admitted += admitted
        self.trained += trained
        self._count_dropped(dropped)
        for entry in entries:
            if entry.state not in LIVE:
                self.ended[entry.uid] = entry
            if entry.state is not State.DROPPED:
                self._enter(entry)
        self._forget_published()

    # Inside

    def _count_dropped(self, dropped: Mapping[str, int]) -> None:
        for reason, number in dropped.items():
            self.dropped[RENAMED_REASONS.get(reason, reason)] += number

    def _enter(self, entry: Entry) -> None:
        """Into the open groups."""
        self.open[entry.uid] = self._by_number[entry.number] = entry
        self._order.add(entry.number)
        self._in[entry.state].add(entry.number)
        self._claim(entry)

    def _leave(self, entry: Entry) -> None:
        del self.open[entry.uid], self._by_number[entry.number]
        self._order.discard(entry.number)
        self._in[entry.state].discard(entry.number)
        self._unclaim(entry)

    def _move(self, entry: Entry, state: State) -> None:
        self._in[entry.state].discard(entry.number)
        self._in[state].add(entry.number)
        entry.state = state
        if state is State.GENERATING:
            self._claim(entry)
        else:
            self._unclaim(entry)
        self._changed(entry)

    def _claim(self, entry: Entry) -> None:
        if entry.claimant and entry.state is State.GENERATING:
            self._claims[entry.claimant] = entry

    def _unclaim(self, entry: Entry) -> None:
        if self._claims.get(entry.claimant) is entry:
            del self._claims[entry.claimant]

    def _forget_published(self) -> None:
        """Drops the oldest entries that are published; later ones still count in the window of a straggler."""
        while self._order and (first := self._by_number[self._order.nth(0)]).state is State.PUBLISHED:
            self._leave(first)
