"""The groups of a run in the order of their admission, and how many ended how. Rules are in `state`.

Invariant: ``admitted == trained + dropped + live`` after each method; every change goes through `_move`, which tells
``changed`` about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megasync.buffer.entry import LIVE, TRAINED, UNFINISHED, Entry, State
from megasync.buffer.trajectory import Group


class Book:
    """``open`` holds the groups from the oldest one that is not yet published; ``ended`` what was trained or dropped
    since the oldest kept checkpoint. ``changed`` is called with each entry that changed. ``inherited`` are the counters
    of an earlier run that left no entries.
    """

    def __init__(self, changed: Callable[[Entry], None], inherited: dict[str, Any]) -> None:
        self._changed = changed
        self.open: dict[str, Entry] = {}
        self.ended: dict[str, Entry] = {}
        self.dropped = Counter(inherited.get("dropped", {}))
        self.trained: int = inherited.get("trained", 0)
        self.admitted = self.trained + self.dropped.total()

    # What is there

    def find(self, uid: str) -> Entry | None:
        return self.open.get(uid) or self.ended.get(uid)

    def among(self, *states: State) -> list[Entry]:
        """Open groups in these states, oldest first."""
        return [entry for entry in self.open.values() if entry.state in states]

    def slots(self) -> Counter[State]:
        return Counter(entry.state for entry in self.open.values())

    def oldest_unfinished(self) -> Entry | None:
        return next((entry for entry in self.open.values() if entry.state in UNFINISHED), None)

    def eligible(self, window: int) -> Iterator[Entry]:
        """Finished groups that may be leased now, oldest first; see `pacing` for the window."""
        ahead = None
        for entry in self.open.values():
            if ahead is not None:
                ahead += 1
                if ahead >= window:
                    return
            elif entry.state in UNFINISHED:
                ahead = 0
            if entry.state is State.FINISHED:
                yield entry

    def trained_after(self, step: int) -> list[Entry]:
        """Groups that later steps were trained on, oldest first."""
        found = (entry for entry in self.ended.values() if entry.state in TRAINED and entry.step > step)
        return sorted(found, key=lambda entry: entry.number)

    # What happens to it

    def admit(self, uid: str, now: float) -> None:
        self.open[uid] = Entry(uid, self.admitted, State.GENERATING, now)
        self.admitted += 1
        self._changed(self.open[uid])

    def generate(self, entry: Entry, now: float, claimant: str) -> None:
        entry.since, entry.claimant = now, claimant
        self._move(entry, State.GENERATING)

    def give_back(self, entry: Entry, now: float) -> None:
        """Its generation has to begin again, or to go on from its partials."""
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
        entry.reason, entry.step, entry.group = reason, step, None
        entry.partials.clear()
        del self.open[entry.uid]
        self.ended[entry.uid] = entry
        self.dropped[reason] += 1
        self._move(entry, State.DROPPED)
        self._forget_published()

    def reopen(self, entries: Iterable[Entry]) -> None:
        """Trained groups are returned, in their old places."""
        for entry in entries:
            del self.ended[entry.uid]
            self.open[entry.uid] = entry
            self.trained -= 1
            self._move(entry, State.RETURNED)
        self.open = dict(sorted(self.open.items(), key=lambda item: item[1].number))

    def forget(self, step: int) -> None:
        """Groups that ended at a step up to this one will not be asked about again."""
        for entry in [entry for entry in self.ended.values() if entry.step <= step and entry.uid not in self.open]:
            del self.ended[entry.uid]

    def load(self, entries: Iterable[Entry], admitted: int, trained: int, dropped: dict[str, int]) -> None:
        """Takes over recorded entries, in any order, with the numbers of all groups ever recorded."""
        self.admitted += admitted
        self.trained += trained
        self.dropped.update(dropped)
        for entry in sorted(entries, key=lambda entry: entry.number):
            if entry.state not in LIVE:
                self.ended[entry.uid] = entry
            if entry.state is not State.DROPPED:
                self.open[entry.uid] = entry
        self._forget_published()

    def _move(self, entry: Entry, state: State) -> None:
        entry.state = state
        self._changed(entry)

    def _forget_published(self) -> None:
        """Drops the oldest entries that are published; later ones still count in the window of a straggler."""
        for entry in list(self.open.values()):
            if entry.state is not State.PUBLISHED:
                return
            del self.open[entry.uid]
