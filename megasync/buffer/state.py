"""The buffer as a pure state machine: who may be generated, who is trained next, and what became of everybody.

Two life cycles that are easily taken for one:

    a group   admit ─▶ generating ─commit─▶ finished ─lease─▶ leased ─ack─▶ trained     (the end of the group)
                           ▲                   │ over-age
                           └─reclaim─ returned ◀┘               any of these but leased ─▶ dropped(reason)
    a slot    taken by admit ─────────────────────────────────────────────▶ freed by publish, or by a drop

A trained group is gone, but its slot stays taken (``unpublished``) until the servers have the weights that it produced:
that is what keeps new groups from being born stale (``pacing`` derives the bound).

Invariants, after every call: ``admitted == trained + dropped + live``; slots taken <= capacity; every finished group is
within the staleness bound of the published version, which ``_check_age`` guarantees wherever group or version changes.

    >>> buffer = TrajectoryBuffer(Pacing(groups_per_step=1, max_staleness=1))
    >>> buffer.admit("0:0"), buffer.admit("0:1"), buffer.admit("0:2")   # 2 generating: capacity is (1 + 1) * 1 * 1
    (True, True, False)
    >>> answer = Trajectory([1], [2], loss_mask=[1], logprobs=[-0.5], versions=[0], reward=1.0)
    >>> buffer.commit(Group("0:0", [answer, answer]))                   # 1 generating, 1 finished
    True
    >>> [group.uid for group in buffer.lease(step=1, version=0)]        # 1 generating, 1 leased
    ['0:0']
    >>> buffer.ack(1); buffer.admit("0:2")                              # trained 1, live 1, but 2 slots taken
    False
    >>> buffer.publish(1); buffer.admit("0:2")                          # trained 1, live 2, 2 slots taken
    True
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from megasync.buffer.errors import BufferClosed, BufferStateError
from megasync.buffer.pacing import Pacing
from megasync.buffer.trajectory import Group, Trajectory

# A relative advantage compares a group's responses, so a lone survivor would be trained on nothing but its raw reward.
MIN_SURVIVORS = 2
OVER_AGE = ("mask", "regenerate", "drop")


class State(StrEnum):
    """Where a group's slot stands. The first four are live; a published group only marks its place in the order."""

    GENERATING = "generating"
    RETURNED = "returned"
    FINISHED = "finished"
    LEASED = "leased"
    UNPUBLISHED = "unpublished"
    PUBLISHED = "published"


LIVE = (State.GENERATING, State.RETURNED, State.FINISHED, State.LEASED)
UNFINISHED = (State.GENERATING, State.RETURNED)


@dataclass(slots=True)
class _Entry:
    uid: str
    state: State
    # When the current generation began, on the injected clock.
    since: float
    group: Group | None = None
    # Version of the group's oldest trained token; kept because looking through all tokens at every check is slow.
    oldest_version: int = 0


class TrajectoryBuffer:
    """Nothing here waits: what cannot be done now returns False or None, what must not be done raises.

    ``over_age`` says what happens to a finished group older than the bound: "mask" its over-age tokens, "regenerate" it,
    or "drop" it. ``total_groups`` is how many groups the run trains in all (a multiple of ``groups_per_step``; None is
    unbounded). ``version`` is the one that the servers have now; ``counters`` are those of an earlier run that goes on.
    ``clock`` returns seconds.
    """

    def __init__(
        self,
        pacing: Pacing,
        *,
        over_age: str = "regenerate",
        total_groups: int | None = None,
        version: int = 0,
        counters: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if over_age not in OVER_AGE:
            raise ValueError(f"over_age={over_age!r} must be one of {', '.join(OVER_AGE)}")
        if total_groups is not None and total_groups % pacing.groups_per_step:
            raise ValueError(
                f"total_groups={total_groups} must be a multiple of groups_per_step={pacing.groups_per_step}: the last "
                f"batch would wait for groups that are never admitted"
            )
        counters = counters or {}
        self.pacing = pacing
        self.version = version
        self.closed: str | None = None
        self._over_age = over_age
        self._total_groups = total_groups
        self._clock = clock
        # In admission order, from the oldest group that is not yet published.
        self._entries: dict[str, _Entry] = {}
        # How each group that is no longer live ended: the reason of its drop, or None when it was trained.
        self._outcomes: dict[str, str | None] = {}
        self._dropped = Counter(counters.get("dropped", {}))
        self._trained: int = counters.get("trained", 0)
        self._admitted = self._trained + self._dropped.total()
        self._regenerated: int = counters.get("regenerated", 0)
        self._masked_tokens: int = counters.get("masked_tokens", 0)
        self._removed_trajectories: int = counters.get("removed_trajectories", 0)
        self._last_step = 0
        # The batch that is out for training: its step, the version it was checked against, its groups' uids.
        self._lease: tuple[int, int, list[str]] | None = None

    # Rollout side

    def admit(self, uid: str) -> bool:
        """Takes a slot for a new prompt; False when there is none now. Raises BufferClosed, BufferStateError."""
        self._refuse_when_closed()
        if uid in self._entries or uid in self._outcomes:
            raise BufferStateError(f"group {uid} was admitted before and is {self._describe(uid)}; uids must be unique")
        if self.admission_blocker() is not None:
            return False
        self._entries[uid] = _Entry(uid, State.GENERATING, self._clock())
        self._admitted += 1
        return True

    def commit(self, group: Group) -> bool:
        """Hands in a generated, scored group; True when it is now finished.

        False, changing nothing, when the buffer is closed or the group was dropped meanwhile. False also when too few
        trajectories survive (those without a reward or a trained token do not): the group is dropped and counted. And
        False when it is over-age already and therefore dropped or returned. Raises BufferStateError for a group that is
        not being generated.
        """
        if self.closed is not None or self._was_dropped(group.uid):
            return False
        entry = self._require(group.uid, State.GENERATING, action="committed")
        survivors = [t for t in group.trajectories if t.reward is not None and t.oldest_version is not None]
        return self._keep(entry, group, survivors) and self._check_age(entry)

    def drop(self, uid: str, reason: str) -> bool:
        """Ends a group that will not be trained, and frees its slot.

        False when it was dropped before, or when the buffer is closed: what is live then stays live, for the checkpoint.
        Raises BufferStateError for an unknown, leased or trained group.
        """
        if self.closed is not None or self._was_dropped(uid):
            return False
        self._drop(self._require(uid, *UNFINISHED, State.FINISHED, action="dropped"), reason)
        return True

    def reclaimable(self) -> list[str]:
        """Uids of over-age groups that wait to be generated again, oldest first."""
        return [entry.uid for entry in self._entries.values() if entry.state is State.RETURNED]

    def reclaim(self) -> str | None:
        """The oldest of them, which counts as generating from now on. Raises BufferClosed."""
        self._refuse_when_closed()
        for uid in self.reclaimable():
            self._entries[uid].state = State.GENERATING
            self._entries[uid].since = self._clock()
            return uid
        return None

    # Training side

    def lease(self, step: int, version: int) -> list[Group] | None:
        """The batch of a step, ``groups_per_step`` groups in admission order; None when it is not complete yet.

        ``version`` must be the published one: every group was checked against it. Asked again for the same step before
        its ``ack`` (an answer that was lost on its way), it gives the same batch, or a freshly checked one when a version
        was published meanwhile. Raises BufferClosed, and BufferStateError for steps out of order.
        """
        self._refuse_when_closed()
        if version != self.version:
            raise BufferStateError(
                f"step {step} asks for a batch at version {version}, but {self.version} is published"
            )
        if self._lease is not None:
            leased_step, leased_version, uids = self._lease
            if step != leased_step:
                raise BufferStateError(f"step {step} asks for a batch while step {leased_step} has one; ack that first")
            if version == leased_version:
                return [self._entries[uid].group for uid in uids]
            self._put_back(uids)
        elif step <= self._last_step:
            raise BufferStateError(f"step {step} asks for a batch, but step {self._last_step} is trained already")
        batch = list(islice(self._eligible(), self.pacing.groups_per_step))
        if len(batch) < self.pacing.groups_per_step:
            return None
        for entry in batch:
            entry.state = State.LEASED
        self._lease = (step, version, [entry.uid for entry in batch])
        return [entry.group for entry in batch]

    def ack(self, step: int) -> None:
        """The step is trained; its groups keep their slots until `publish`. Raises BufferStateError if not leased."""
        if self._lease is None or self._lease[0] != step:
            held = "no step has one" if self._lease is None else f"step {self._lease[0]} has one"
            raise BufferStateError(f"step {step} cannot be acknowledged: it has no batch ({held})")
        for uid in self._lease[2]:
            entry = self._entries[uid]
            entry.state, entry.group = State.UNPUBLISHED, None
            self._outcomes[uid] = None
        self._trained += len(self._lease[2])
        self._last_step, self._lease = step, None

    def publish(self, version: int) -> None:
        """The servers have these weights: frees the slots of everything trained, and checks ages. Raises BufferStateError."""
        if version <= self.version:
            raise BufferStateError(f"version {version} cannot be published after version {self.version}")
        self.version = version
        for entry in list(self._entries.values()):
            if entry.state is State.UNPUBLISHED:
                entry.state = State.PUBLISHED
            elif entry.state is State.FINISHED:
                self._check_age(entry)
        self._forget_published()

    # Both sides

    def close(self, reason: str) -> None:
        """No admission, lease or commit from now on; `ack`, `publish` and the counts still work. The first reason stays."""
        if self.closed is None:
            self.closed = reason

    def counts(self) -> dict[str, Any]:
        """``admitted == trained + sum(dropped.values()) + live``; ``slots`` splits what is taken of ``capacity`` by state."""
        slots = self._slots()
        return {
            "admitted": self._admitted,
            "live": sum(slots[state] for state in LIVE),
            "slots": {state.value: slots[state] for state in (*LIVE, State.UNPUBLISHED)},
            "capacity": self.pacing.capacity,
            **self.counters(),
        }

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps, together with `live_uids`; goes back in through the constructor."""
        return {
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "regenerated": self._regenerated,
            "masked_tokens": self._masked_tokens,
            "removed_trajectories": self._removed_trajectories,
        }

    def live_uids(self) -> list[str]:
        """Admitted, neither trained nor dropped; in admission order. A resumed run generates these first."""
        return [entry.uid for entry in self._entries.values() if entry.state in LIVE]

    def admission_blocker(self) -> str | None:
        """Why no prompt can be admitted now; None when one can.

        Near the end of a run live groups never outnumber those still to be trained. Both are multiples of
        ``groups_per_step`` once nothing can be admitted, so the last batches are whole.
        """
        slots = self._slots()
        live = sum(slots[state] for state in LIVE)
        if live + slots[State.UNPUBLISHED] >= self.pacing.capacity:
            taken = ", ".join(f"{slots[state]} {state}" for state in (*LIVE, State.UNPUBLISHED) if slots[state])
            return f"a free slot: all {self.pacing.capacity} are taken ({taken})"
        if self._total_groups is not None and self._trained + live >= self._total_groups:
            return f"a drop: {self._trained} trained and {live} live groups are all that the run needs"
        return None

    def lease_blocker(self) -> str | None:
        """Why no batch can be leased now; None when one can."""
        need = self.pacing.groups_per_step
        ready = sum(1 for _ in islice(self._eligible(), need))
        if ready == need:
            return None
        slots, oldest = self._slots(), self._oldest_unfinished()
        text = f"{need} finished groups: {ready} ready"
        if oldest is not None:
            seconds = self._clock() - oldest.since
            outside = slots[State.FINISHED] - ready
            text += f", {outside} more behind the window of {self.pacing.window}" if outside else ""
            text += f", {oldest.uid} is the oldest and {oldest.state} for {seconds:.1f} s"
        return text

    # Inside

    def _refuse_when_closed(self) -> None:
        if self.closed is not None:
            raise BufferClosed(self.closed)

    def _was_dropped(self, uid: str) -> bool:
        return self._outcomes.get(uid) is not None

    def _describe(self, uid: str) -> str:
        if uid in self._outcomes:
            reason = self._outcomes[uid]
            return "trained" if reason is None else f"dropped ({reason})"
        return self._entries[uid].state.value if uid in self._entries else "unknown"

    def _require(self, uid: str, *states: State, action: str) -> _Entry:
        entry = self._entries.get(uid)
        if entry is None or entry.state not in states:
            allowed = " or ".join(states)
            raise BufferStateError(f"group {uid} cannot be {action}: it is {self._describe(uid)}, not {allowed}")
        return entry

    def _slots(self) -> Counter[State]:
        return Counter(entry.state for entry in self._entries.values())

    def _oldest_unfinished(self) -> _Entry | None:
        return next((entry for entry in self._entries.values() if entry.state in UNFINISHED), None)

    def _eligible(self) -> Iterator[_Entry]:
        """Finished groups that may be leased now, oldest first; see `pacing` for the window."""
        ahead = None
        for entry in self._entries.values():
            if ahead is not None:
                ahead += 1
                if ahead >= self.pacing.window:
                    return
            elif entry.state in UNFINISHED:
                ahead = 0
            if entry.state is State.FINISHED:
                yield entry

    def _keep(self, entry: _Entry, group: Group, survivors: list[Trajectory]) -> bool:
        """Makes the group finished with its survivors, or drops it when they are too few. Returns whether it was kept."""
        self._removed_trajectories += len(group.trajectories) - len(survivors)
        if len(survivors) < MIN_SURVIVORS:
            self._drop(entry, "lone_survivor" if survivors else "no_survivor")
            return False
        entry.state, entry.group = State.FINISHED, Group(entry.uid, survivors)
        entry.oldest_version = entry.group.oldest_version
        return True

    def _check_age(self, entry: _Entry) -> bool:
        """A finished group older than the bound is masked, returned or dropped, and counted. Whether it is still finished."""
        least = self.version - self.pacing.staleness_bound
        if entry.oldest_version >= least:
            return True
        if self._over_age == "regenerate":
            entry.state, entry.group = State.RETURNED, None
            entry.since = self._clock()
            self._regenerated += 1
            return False
        if self._over_age == "drop":
            self._drop(entry, "over_age")
            return False
        group = entry.group
        masked = [_masked(t, least) for t in group.trajectories]
        self._masked_tokens += sum(sum(t.loss_mask) for t in group.trajectories)
        self._masked_tokens -= sum(sum(t.loss_mask) for t in masked)
        return self._keep(entry, group, [t for t in masked if t.oldest_version is not None])

    def _drop(self, entry: _Entry, reason: str) -> None:
        del self._entries[entry.uid]
        self._outcomes[entry.uid] = reason
        self._dropped[reason] += 1
        self._forget_published()

    def _put_back(self, uids: list[str]) -> None:
        """A batch that was leased at an older version and asked for again: finished as before, if young enough."""
        self._lease = None
        for uid in uids:
            self._entries[uid].state = State.FINISHED
            self._check_age(self._entries[uid])

    def _forget_published(self) -> None:
        """Drops the oldest entries that are published; later ones still count in the window of a straggler."""
        for entry in list(self._entries.values()):
            if entry.state is not State.PUBLISHED:
                return
            del self._entries[entry.uid]


def _masked(trajectory: Trajectory, least: int) -> Trajectory:
    """The same trajectory with tokens older than version ``least`` left out of the loss."""
    if trajectory.oldest_version is None or trajectory.oldest_version >= least:
        return trajectory
    mask = [m if v >= least else 0 for m, v in zip(trajectory.loss_mask, trajectory.versions)]
    return replace(trajectory, loss_mask=mask)
