"""The buffer as a pure state machine: which group is generated, which is trained next, and how each one ended.

Two life cycles that are easily confused:

    a group   admit ─▶ generating ─commit─▶ finished ─lease─▶ leased ─ack─▶ trained     (the end of the group)
                           ▲                   │ stale
                           └─reclaim─ returned ◀┘               any of these but leased ─▶ dropped(reason)
    a slot    taken by admit ─────────────────────────────────────────────▶ freed by publish, or by a drop

A trained group has ended, but its slot stays taken (``unpublished``) until the servers hold the weights that it
produced: that keeps new groups from being born stale (`config.pacing` derives the bound). ``rollback`` takes groups
back to a checkpoint: what was trained after it is finished again, or returned where its payload is gone.

Answers get lost between processes, so every call is idempotent: an admission of an admitted group, the commit or drop
of an ended one, the lease and ack of a step, the publication of a version change nothing and answer the same.

Invariants, after every call: ``admitted == trained + dropped + live``; no group is admitted beyond the capacity (only a
rollback can bring back more); every finished group is within the staleness bound of the published version, which
``_check_age`` guarantees wherever group or version changes.

    >>> from megasync.buffer.payload import encode
    >>> from megasync.trajectory import Group, Trajectory
    >>> buffer = TrajectoryBuffer(Pacing(groups_per_step=1, max_staleness=1))
    >>> buffer.admit("0:0"), buffer.admit("0:1"), buffer.admit("0:2")   # 2 generating: capacity is (1 + 1) * 1 * 1
    (True, True, False)
    >>> answer = Trajectory([1], [2], loss_mask=[1], logprobs=[-0.5], versions=[0], reward=1.0)
    >>> buffer.commit(encode(Group("0:0", [answer, answer])))           # 1 generating, 1 finished
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from megasync.buffer.groups import LIVE, SCORES, TRAINED, UNFINISHED, GroupEntry, GroupIndex, GroupState, Partials
from megasync.buffer.payload import Body, EncodedGroup, EncodedPartial, GroupHeader, LeasedGroup, TrajectoryHeader
from megasync.concurrency.first_use import prepared
from megasync.config.pacing import Pacing
from megasync.errors import MegasyncError
from megasync.trajectory import by_sample

# The reason for drops of groups whose steps kept raising errors.
FAILED_STEP = "failed_step"
# What `schedule.stale` may say.
STALE_POLICIES = ("mask", "regenerate", "drop")


class BufferClosed(MegasyncError):
    """The buffer was closed; ``reason`` says why. Ends every wait."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BufferStateError(MegasyncError):
    """The state of the group or batch does not allow the call: names the uid or step, and the state."""


class BufferCounters(TypedDict):
    """The counters that a checkpoint keeps of the buffer, for a run whose ledger gets lost."""

    trained: int
    # By reason.
    dropped: dict[str, int]
    regenerated: int
    # Finished groups whose recorded body could not be read.
    damaged: int
    masked_tokens: int
    removed_trajectories: int


class CheckpointedBuffer(TypedDict):
    """The buffer in a checkpoint: the uids of live groups, in the order of their admission, and counters."""

    pending: list[str]
    buffer: BufferCounters


class BufferCounts(BufferCounters):
    """``admitted == trained + sum(dropped.values()) + live``; ``slots`` are those of ``capacity`` in use, by state."""

    admitted: int
    live: int
    slots: dict[str, int]
    capacity: int


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The latest step that raised an error on its batch. ``step`` is 0 when none did."""

    step: int = 0
    # The most failed attempts of any group in the batch.
    attempt: int = 0
    # Uids of groups that were dropped for it.
    set_aside: list[str] = field(default_factory=list[str])
    # Batches set aside since a step that got as far was trained.
    in_a_row: int = 0


@prepared
@dataclass(slots=True)
class BufferStatus:
    """The state of the buffer apart from its groups. The ledger keeps each field by its name."""

    # The published version.
    version: int = 0
    # The newest version ever seen, on a token or published: it must not name other weights.
    newest_version: int = 0
    # The last trained step, and the version at which the current batch was leased.
    last_step: int = 0
    leased_version: int = 0
    # Every kept checkpoint contains the groups trained up to this step; -1 without a checkpoint.
    oldest_kept: int = -1
    # Why the buffer is closed.
    closed: str | None = None
    regenerated: int = 0
    damaged: int = 0
    masked_tokens: int = 0
    removed_trajectories: int = 0
    # Failed attempts by uid, and the latest failed step.
    failed_attempts: dict[str, int] = field(default_factory=dict[str, int])
    failed_step: FailedStep = field(default_factory=FailedStep)
    # Batches set aside since a step that got as far was trained.
    set_aside_in_a_row: int = 0
    # Counters (trained, dropped) of an earlier run whose groups are not in the record, and what a run began with. It is
    # complete with the first record: the ledger writes it once.
    inherited: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def initial(cls, step: int, version: int, counters: Mapping[str, Any]) -> BufferStatus:
        """The status of a buffer without groups. ``counters`` are the `TrajectoryBuffer.counters` of an earlier run."""
        ended = ("trained", "dropped")
        return cls(
            version=version,
            newest_version=version,
            last_step=step,
            **{key: value for key, value in counters.items() if key not in ended},
            inherited={key: counters[key] for key in ended if key in counters},
        )


@dataclass(slots=True)
class BufferSnapshot:
    """Everything that a buffer knows. ``entries`` are those that still matter; the counts are of all groups ever."""

    status: BufferStatus
    entries: list[GroupEntry]
    admitted: int
    trained: int
    dropped: dict[str, int]


class TrajectoryBuffer:
    """No call waits: what cannot be done now returns False or None, what must not be done raises.

    ``stale`` says what happens to a finished group older than the bound: "mask" its stale tokens, "regenerate" it, or
    "drop" it. ``total_groups`` is the number of groups that the whole run trains at this pacing (a multiple of
    ``groups_per_step``; None is unbounded). What remains is ``groups_per_step`` for each untrained step, also where
    earlier steps had batches of another size.

    ``version`` is the one that the servers hold now; ``counters`` are those of an earlier run that continues without
    its groups. ``snapshot``, everything that an earlier buffer knew, replaces both. ``clock`` returns seconds.
    ``changed`` is called with each changed entry.
    """

    def __init__(
        self,
        pacing: Pacing,
        *,
        stale: str = "regenerate",
        total_groups: int | None = None,
        version: int = 0,
        counters: Mapping[str, Any] | None = None,
        snapshot: BufferSnapshot | None = None,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[GroupEntry], None] = lambda entry: None,
    ) -> None:
        if stale not in STALE_POLICIES:
            raise ValueError(f"stale={stale!r} must be one of {', '.join(STALE_POLICIES)}")
        if total_groups is not None and total_groups % pacing.groups_per_step:
            raise ValueError(
                f"total_groups={total_groups} must be a multiple of groups_per_step={pacing.groups_per_step}: the last "
                f"batch would wait for groups that are never admitted"
            )
        self.pacing = pacing
        self.status = snapshot.status if snapshot else BufferStatus.initial(0, version, counters or {})
        self._stale = stale
        self._total_steps = None if total_groups is None else total_groups // pacing.groups_per_step
        self._clock = clock
        self._groups = GroupIndex(changed, self.status.inherited)
        # The leased batch: its step, and its groups in the order of admission.
        self._lease: tuple[int, list[GroupEntry]] | None = None
        if snapshot is not None:
            self._groups.load(snapshot.entries, snapshot.admitted, snapshot.trained, snapshot.dropped)
            if leased := self._groups.among(GroupState.LEASED):
                self._lease = leased[0].step, leased

    @property
    def version(self) -> int:
        return self.status.version

    @property
    def closed(self) -> str | None:
        return self.status.closed

    @property
    def least_version(self) -> int:
        """The oldest version that a trained token may have now: the published one minus the staleness bound."""
        return self.version - self.pacing.staleness_bound

    # Rollout side

    def admit(self, uid: str) -> bool:
        """Takes a slot for a new prompt; False when none is free. Raises BufferClosed, BufferStateError."""
        self._refuse_when_closed()
        entry = self._groups.find(uid)
        if entry is not None and entry.state in UNFINISHED:
            return True
        if entry is not None:
            raise BufferStateError(f"group {uid} was admitted before and is {_describe(entry)}; uids must be unique")
        if not self.has_room():
            return False
        self._groups.admit(uid, self._clock())
        return True

    def commit(self, encoded: EncodedGroup) -> bool:
        """Takes a generated, scored group, whose body is opaque here.

        True when it is finished now, or was committed before. Returns False, and changes nothing, when the buffer is
        closed, when the group was dropped meanwhile, or when it waits for another generation and these responses are
        too old or too few. Also returns False when too few trajectories survive (those without a reward or a trained
        token do not), which drops the group, and when it is already stale, which drops or returns it. Raises
        BufferStateError for a group that was never admitted.
        """
        group = encoded.header
        entry = self._groups.find(group.uid)
        if self.closed is not None or (entry is not None and entry.state is GroupState.DROPPED):
            return False
        if entry is None:
            raise BufferStateError(f"group {group.uid} cannot be committed: it is unknown, not generating")
        if entry.state not in UNFINISHED:
            return True
        survivors = [t for t in group.trajectories if t.reward is not None and t.oldest_version is not None]
        if entry.state is GroupState.RETURNED:
            oldest = group.of(survivors).oldest_version
            if oldest is None or len(by_sample(survivors)) < group.least or oldest < self.least_version:
                return False
        if survivors:
            self._saw([group.newest_version])
        entry.partials.clear()
        entry.score = group.mean_reward
        return self._keep(entry, group, survivors, encoded.body) and self._check_age(entry)

    def drop(self, uid: str, reason: str) -> bool:
        """Ends a group that will not be trained, and frees its slot.

        Returns False when it was dropped before, and when the buffer is closed: live groups then stay live, for the
        checkpoint. Raises BufferStateError for an unknown, leased or trained group.
        """
        entry = self._groups.find(uid)
        if self.closed is not None or (entry is not None and entry.state is GroupState.DROPPED):
            return False
        if entry is None or entry.state not in (*UNFINISHED, GroupState.FINISHED):
            raise BufferStateError(
                f"group {uid} cannot be dropped: it is {_describe(entry)}, not generating, returned or finished"
            )
        entry.score = SCORES.get(reason, entry.score)
        self._drop(entry, reason)
        return True

    def damaged(self, uid: str) -> None:
        """Returns a finished group whose recorded body cannot be read, to be generated again."""
        entry = self._groups.find(uid)
        if entry is not None and entry.state is GroupState.FINISHED:
            self._groups.give_back(entry, self._clock())
            self.status.damaged += 1

    def leased_uids(self) -> list[str]:
        """Uids of the leased batch."""
        return [entry.uid for entry in self._lease[1]] if self._lease is not None else []

    def next_batch(self) -> list[LeasedGroup]:
        """The groups that `lease` would take now; empty while the batch is incomplete."""
        if not self.has_batch():
            return []
        return [entry.held for entry in self._groups.batch(self.pacing.groups_per_step)]

    def reclaimable(self) -> list[str]:
        """Uids of the returned groups, oldest first."""
        return [entry.uid for entry in self._groups.among(GroupState.RETURNED)]

    def reclaim(self, claimant: str = "") -> str | None:
        """Takes the oldest returned group for another generation; its uid, or None. Raises BufferClosed.

        A claimant that asks again before its group is finished gets the same group.
        """
        self._refuse_when_closed()
        if (held := self._groups.claimed(claimant)) is not None:
            return held.uid
        if (entry := self._groups.oldest(GroupState.RETURNED)) is None:
            return None
        self._groups.generate(entry, self._clock(), claimant)
        return entry.uid

    def save_partials(self, partials: Mapping[tuple[str, int, int], EncodedPartial]) -> None:
        """Keeps unfinished responses by (uid, sample, turn), of groups that are unfinished; ignores others."""
        for (uid, sample, turn), partial in partials.items():
            entry = self._groups.find(uid)
            if entry is not None and entry.state in UNFINISHED:
                entry.partials[sample, turn] = partial.data
                self._saw([partial.newest_version])
                self._groups.changed(entry)

    def partials(self, uid: str) -> Partials:
        """A group's unfinished responses, or what loads them, by (sample, turn). A commit or drop removes them."""
        entry = self._groups.find(uid)
        return {} if entry is None else dict(entry.partials)

    # Training side

    def lease(self, step: int, version: int) -> list[LeasedGroup] | None:
        """Leases the batch of a step: ``groups_per_step`` groups in admission order, or None while it is incomplete.

        ``version`` must be the published one, against which every group was checked. Called again for the same step
        before its ``ack`` (the answer was lost), it returns the same batch, or a newly checked one when a version was
        published meanwhile. Raises BufferClosed, and BufferStateError for steps out of order.
        """
        self._refuse_when_closed()
        if version != self.version:
            raise BufferStateError(
                f"step {step} asks for a batch at version {version}, but {self.version} is published"
            )
        if self._lease is not None:
            leased_step, batch = self._lease
            if step != leased_step:
                raise BufferStateError(f"step {step} asks for a batch while step {leased_step} has one; ack that first")
            if version == self.status.leased_version:
                return [entry.held for entry in batch]
            self._put_back()
        elif step <= self.status.last_step:
            raise BufferStateError(f"step {step} asks for a batch, but step {self.status.last_step} is trained already")
        if not self.has_batch():
            return None
        batch = self._groups.batch(self.pacing.groups_per_step)
        groups = [entry.held for entry in batch]
        for entry in batch:
            self._groups.lease(entry, step)
        self._lease, self.status.leased_version = (step, batch), version
        return groups

    def ack(self, step: int) -> None:
        """Marks the step's groups as trained. They keep their slots until `publish`. Raises BufferStateError."""
        if self._lease is None or self._lease[0] != step:
            if step <= self.status.last_step:
                return
            held = "no step has one" if self._lease is None else f"step {self._lease[0]} has one"
            raise BufferStateError(f"step {step} cannot be acknowledged: it has no batch ({held})")
        for entry in self._lease[1]:
            self._groups.train(entry)
            self._forget_attempts(entry.uid)
        self.status.last_step, self._lease = step, None
        if step >= self.status.failed_step.step:
            self.status.set_aside_in_a_row = 0

    def step_failed(self, step: int, attempts: int, most_in_a_row: int) -> FailedStep:
        """Puts back the batch of a step that raised an error, and drops groups with this many failed `attempts`.

        Drops at most `most_in_a_row` batches until a step that got as far is trained: a fault that the batch did not
        cause must not use up the data set. Called again before the next lease, it answers the same. Raises
        BufferStateError for a step that has no batch.
        """
        status = self.status
        if self._lease is None or self._lease[0] != step:
            if status.failed_step.step == step:
                return status.failed_step
            raise BufferStateError(f"step {step} cannot have failed: it has no batch")
        batch, failed = self._lease[1], status.failed_attempts
        self._put_back()
        failed = failed | {entry.uid: failed.get(entry.uid, 0) + 1 for entry in batch}
        status.failed_attempts = failed
        exhausted = [e for e in batch if failed[e.uid] >= attempts and e.state is not GroupState.DROPPED]
        if status.set_aside_in_a_row >= most_in_a_row:
            exhausted = []
        for entry in exhausted:
            self._drop(entry, FAILED_STEP)
        status.set_aside_in_a_row += bool(exhausted)
        status.failed_step = FailedStep(
            step=step,
            attempt=max(failed[entry.uid] for entry in batch),
            set_aside=[entry.uid for entry in exhausted],
            in_a_row=status.set_aside_in_a_row,
        )
        return status.failed_step

    def publish(self, version: int) -> None:
        """The servers hold this version: frees the slots of trained groups, checks ages. Raises BufferStateError."""
        if version == self.version:
            return
        if version < self.version:
            raise BufferStateError(f"version {version} cannot be published after version {self.version}")
        self.status.version = version
        self._saw([version])
        self._groups.publish()
        self._check_ages()

    def trained_after(self, step: int) -> list[str]:
        """Uids of the groups that a rollback to this step brings back, oldest first."""
        return [entry.uid for entry in self._groups.trained_after(step)]

    def rollback(self, step: int, version: int, groups: Mapping[str, LeasedGroup] | None = None) -> None:
        """Takes training back to the checkpoint of ``step``. The next version is greater than ``version``.

        Groups that were leased, or trained after ``step``, are finished again; a trained group without an entry in
        ``groups`` is returned. A leased batch of a step that the checkpoint contains counts as trained. A closed
        buffer stays closed. Raises BufferStateError when ``step`` was never trained, or is older than all checkpoints.
        """
        if self._lease is not None and self._lease[0] <= step:
            self.ack(self._lease[0])
        if step > self.status.last_step:
            raise BufferStateError(
                f"the checkpoint is of step {step}, but the buffer knows of no step after {self.status.last_step}"
            )
        if step < self.status.oldest_kept:
            raise BufferStateError(
                f"step {step} is older than the oldest checkpoint that was kept, of step {self.status.oldest_kept}"
            )
        self.status.version = max(self.version, version)
        self._saw([version])
        self._put_back()
        self._groups.reopen(self._groups.trained_after(step), groups or {}, self._clock())
        self.status.last_step = step
        self._check_ages()

    def take_over(self) -> None:
        """Reopens the buffer for a resumed run, and returns the groups that were being generated."""
        self.status.closed = None
        for entry in self._groups.among(GroupState.GENERATING):
            self._groups.give_back(entry, self._clock())

    def checkpointed(self, step: int, oldest_kept: int) -> None:
        """A checkpoint of ``step`` exists, and none older than ``oldest_kept``: no rollback goes further back."""
        if not oldest_kept <= step <= self.status.last_step:
            raise BufferStateError(
                f"a checkpoint of step {step} with oldest_kept={oldest_kept} does not fit the last trained step, "
                f"{self.status.last_step}"
            )
        self.status.oldest_kept = max(self.status.oldest_kept, oldest_kept)
        self._groups.forget(self.status.oldest_kept)

    # Both sides

    def close(self, reason: str) -> None:
        """Refuses admissions, leases and commits; `ack` and `publish` still work. Only the first reason is kept."""
        if self.closed is None:
            self.status.closed = reason

    def counts(self) -> BufferCounts:
        slots = self._groups.slots()
        return {
            "admitted": self._groups.admitted,
            "live": self._groups.live(),
            "slots": {state.value: slots[state] for state in (*LIVE, GroupState.UNPUBLISHED)},
            "capacity": self.pacing.capacity,
            **self.counters(),
        }

    def counters(self) -> BufferCounters:
        return {
            "trained": self._groups.trained,
            "dropped": dict(self._groups.dropped),
            "regenerated": self.status.regenerated,
            "damaged": self.status.damaged,
            "masked_tokens": self.status.masked_tokens,
            "removed_trajectories": self.status.removed_trajectories,
        }

    def unfinished(self, uids: Iterable[str]) -> list[str]:
        """The uids of the groups that are still to be generated."""
        entries = ((uid, self._groups.find(uid)) for uid in uids)
        return [uid for uid, entry in entries if entry is not None and entry.state in UNFINISHED]

    def live_uids(self) -> list[str]:
        """Admitted, neither trained nor dropped; in admission order."""
        return [entry.uid for entry in self._groups.among(*LIVE)]

    def admission_blocker(self) -> str | None:
        """Why no prompt can be admitted now, for a reader; None when one can.

        Near the end of a run, live groups never outnumber those that remain to be trained, which are whole batches.
        They can only where a run was resumed with smaller batches.
        """
        groups, pacing = self._groups, self.pacing
        live, slots = groups.live(), groups.slots()
        if live + slots[GroupState.UNPUBLISHED] >= pacing.capacity:
            taken = ", ".join(f"{slots[state]} {state}" for state in (*LIVE, GroupState.UNPUBLISHED) if slots[state])
            return f"a free slot: all {pacing.capacity} are taken ({taken})"
        if self._total_steps is None:
            return None
        if live >= (self._total_steps - self.status.last_step) * pacing.groups_per_step:
            return f"a drop: {groups.trained} trained and {live} live groups are all that the run needs"
        return None

    def lease_blocker(self) -> str | None:
        """Why no batch can be leased now, for a reader; None when one can."""
        groups, need, window = self._groups, self.pacing.groups_per_step, self.pacing.window
        ready = groups.ready(window)
        if ready >= need:
            return None
        text = f"{need} finished groups: {ready} ready"
        if (oldest := groups.oldest(*UNFINISHED)) is not None:
            outside = groups.slots()[GroupState.FINISHED] - ready
            text += f", {outside} more behind the window of {window}" if outside else ""
            text += f", {oldest.uid} is the oldest and {oldest.state} for {self._clock() - oldest.since:.1f} s"
        return text

    def has_room(self) -> bool:
        """Whether a prompt can be admitted now."""
        return self.admission_blocker() is None

    def has_batch(self) -> bool:
        """Whether a batch is complete."""
        return self._groups.ready(self.pacing.window) >= self.pacing.groups_per_step

    def has_returned(self) -> bool:
        """Whether a group waits to be generated again."""
        return self._groups.oldest(GroupState.RETURNED) is not None

    # Inside

    def _refuse_when_closed(self) -> None:
        if self.closed is not None:
            raise BufferClosed(self.closed)

    def _saw(self, versions: Iterable[int]) -> None:
        self.status.newest_version = max(self.status.newest_version, max(versions, default=0))

    def _keep(self, entry: GroupEntry, group: GroupHeader, survivors: Sequence[TrajectoryHeader], body: Body) -> bool:
        """Finishes the group with its survivors, or drops it when they are too few. Returns whether it was kept.

        A relative advantage compares samples: a lone one would be trained on nothing but its raw reward.
        """
        self.status.removed_trajectories += len(group.trajectories) - len(survivors)
        if len(by_sample(survivors)) < max(1, group.least):
            self._drop(entry, "lone_survivor" if survivors else "no_survivor")
            return False
        self._groups.finish(entry, group.of(survivors), body)
        return True

    def _check_ages(self) -> None:
        for entry in self._groups.among(GroupState.FINISHED):
            self._check_age(entry)

    def _check_age(self, entry: GroupEntry) -> bool:
        """Masks, returns or drops a finished group older than the bound. Returns whether it is still finished."""
        least = self.least_version
        if entry.oldest_version >= least:
            return True
        if self._stale == "regenerate":
            self._groups.give_back(entry, self._clock())
            self.status.regenerated += 1
            return False
        if self._stale == "drop":
            self._drop(entry, "stale")
            return False
        group = entry.held
        masked = group.header.of(trajectory.masked(least) for trajectory in group.header.trajectories)
        self.status.masked_tokens += group.header.trained_tokens - masked.trained_tokens
        return self._keep(entry, masked, [t for t in masked.trajectories if t.trained], group.body)

    def _drop(self, entry: GroupEntry, reason: str) -> None:
        self._forget_attempts(entry.uid)
        self._groups.drop(entry, reason, self.status.last_step + 1)

    def _forget_attempts(self, uid: str) -> None:
        failed = self.status.failed_attempts
        if uid in failed:
            self.status.failed_attempts = {other: times for other, times in failed.items() if other != uid}

    def _put_back(self) -> None:
        """Makes the groups of the leased batch finished again; those that grew too old are handled as stale."""
        batch = self._lease[1] if self._lease is not None else []
        self._lease = None
        for entry in batch:
            self._groups.put_back(entry)
            self._check_age(entry)


def _describe(entry: GroupEntry | None) -> str:
    if entry is None:
        return "unknown"
    if entry.state in TRAINED:
        return "trained"
    return f"dropped ({entry.reason})" if entry.state is GroupState.DROPPED else entry.state.value
