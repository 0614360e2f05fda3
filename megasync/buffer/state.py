"""The buffer as a pure state machine: who may be generated, who is trained next, and what became of everybody.

Two life cycles that are easily taken for one:

    a group   admit ─▶ generating ─commit─▶ finished ─lease─▶ leased ─ack─▶ trained     (the end of the group)
                           ▲                   │ stale
                           └─reclaim─ returned ◀┘               any of these but leased ─▶ dropped(reason)
    a slot    taken by admit ─────────────────────────────────────────────▶ freed by publish, or by a drop

A trained group has ended, but its slot stays taken (``unpublished``) until the servers have the weights that it produced:
that is what keeps new groups from being born stale (``pacing`` derives the bound). ``rollback`` takes the life of groups
back to a checkpoint: what was trained after it is finished again, or returned where its payload is gone.

Answers get lost between processes, so a call that is made again does nothing more and answers the same: an admission of
an admitted group, the commit or drop of an ended one, the lease and ack of a step, the publication of a version.

Invariants, after every call: ``admitted == trained + dropped + live``; nobody is admitted beyond the capacity (only a
rollback can bring back more); every finished group is within the staleness bound of the published version, which
``_check_age`` guarantees wherever group or version changes.

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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megasync.buffer import blockers
from megasync.buffer.book import Book
from megasync.buffer.entry import LIVE, TRAINED, UNFINISHED, Entry, State, Stored
from megasync.buffer.errors import BufferClosed, BufferStateError
from megasync.buffer.record import Record, Standing
from megasync.config.pacing import Pacing
from megasync.trajectory import Group, Partial, Trajectory

# A relative advantage compares a group's responses, so a lone survivor would be trained on nothing but its raw reward.
MIN_SURVIVORS = 2
# Why groups are dropped on which steps raised an error again and again.
FAILED_STEP = "failed_step"
# What `schedule.stale` may say.
STALE_POLICIES = ("mask", "regenerate", "drop")


class TrajectoryBuffer:
    """Nothing here waits: what cannot be done now returns False or None, what must not be done raises.

    ``stale`` says what happens to a finished group older than the bound: "mask" its stale tokens, "regenerate" it,
    or "drop" it. ``total_groups`` is how many groups the run trains in all its steps at this pacing (a multiple of
    ``groups_per_step``; None is unbounded): what remains is ``groups_per_step`` for each step that is not trained yet,
    also where earlier steps had batches of another size. ``version`` is the one that the servers have now; ``counters`` are those of an earlier run that goes on
    without its groups, ``record`` is everything that an earlier buffer knew and comes instead of both. ``clock`` returns
    seconds. ``changed`` is called with each entry that changed.
    """

    def __init__(
        self,
        pacing: Pacing,
        *,
        stale: str = "regenerate",
        total_groups: int | None = None,
        version: int = 0,
        counters: dict[str, Any] | None = None,
        record: Record | None = None,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        if stale not in STALE_POLICIES:
            raise ValueError(f"stale={stale!r} must be one of {', '.join(STALE_POLICIES)}")
        if total_groups is not None and total_groups % pacing.groups_per_step:
            raise ValueError(
                f"total_groups={total_groups} must be a multiple of groups_per_step={pacing.groups_per_step}: the last "
                f"batch would wait for groups that are never admitted"
            )
        self.pacing = pacing
        self.standing = record.standing if record else Standing.first(0, version, counters or {})
        self._stale = stale
        self._total_steps = None if total_groups is None else total_groups // pacing.groups_per_step
        self._clock = clock
        self._book = Book(changed, self.standing.inherited)
        # The batch that is out for training: its step, and its groups in the order of admission.
        self._lease: tuple[int, list[Entry]] | None = None
        if record is not None:
            self._book.load(record.entries, record.admitted, record.trained, record.dropped)
            if leased := self._book.among(State.LEASED):
                self._lease = leased[0].step, leased

    @property
    def version(self) -> int:
        return self.standing.version

    @property
    def closed(self) -> str | None:
        return self.standing.closed

    @property
    def least_version(self) -> int:
        """The oldest version that a trained token may have now."""
        return self.version - self.pacing.staleness_bound

    # Rollout side

    def admit(self, uid: str) -> bool:
        """Takes a slot for a new prompt; False when there is none now. Raises BufferClosed, BufferStateError."""
        self._refuse_when_closed()
        entry = self._book.find(uid)
        if entry is not None and entry.state in UNFINISHED:
            return True
        if entry is not None:
            raise BufferStateError(f"group {uid} was admitted before and is {_describe(entry)}; uids must be unique")
        if not self.has_room():
            return False
        self._book.admit(uid, self._clock())
        return True

    def commit(self, group: Group) -> bool:
        """Hands in a generated, scored group; True when it is finished now or was committed before.

        False, changing nothing, when the buffer is closed, when the group was dropped meanwhile, or when it waits to be
        generated again and these responses are too old or too few. False also when too few trajectories survive (those
        without a reward or a trained token do not): the group is dropped and counted. And False when it is stale
        already and therefore dropped or returned. Raises BufferStateError for a group that was never admitted.
        """
        entry = self._book.find(group.uid)
        if self.closed is not None or (entry is not None and entry.state is State.DROPPED):
            return False
        if entry is None:
            raise BufferStateError(f"group {group.uid} cannot be committed: it is unknown, not generating")
        if entry.state not in UNFINISHED:
            return True
        survivors = [t for t in group.trajectories if t.reward is not None and t.oldest_version is not None]
        if entry.state is State.RETURNED:
            oldest = Group(group.uid, survivors).oldest_version
            if len(survivors) < MIN_SURVIVORS or oldest < self.least_version:
                return False
        self._saw(max(t.versions) for t in survivors)
        entry.partials.clear()
        return self._keep(entry, group, survivors) and self._check_age(entry)

    def drop(self, uid: str, reason: str) -> bool:
        """Ends a group that will not be trained, and frees its slot.

        False when it was dropped before, or when the buffer is closed: what is live then stays live, for the checkpoint.
        Raises BufferStateError for an unknown, leased or trained group.
        """
        entry = self._book.find(uid)
        if self.closed is not None or (entry is not None and entry.state is State.DROPPED):
            return False
        if entry is None or entry.state not in (*UNFINISHED, State.FINISHED):
            allowed = "generating or returned or finished"
            raise BufferStateError(f"group {uid} cannot be dropped: it is {_describe(entry)}, not {allowed}")
        self._drop(entry, reason)
        return True

    def reclaimable(self) -> list[str]:
        """Uids of groups that wait to be generated again, oldest first."""
        return [entry.uid for entry in self._book.among(State.RETURNED)]

    def reclaim(self, claimant: str = "") -> str | None:
        """The oldest of them, which counts as generating from now on. Raises BufferClosed.

        A claimant that asks again before its group is finished gets the same one again.
        """
        self._refuse_when_closed()
        if (held := self._book.claimed(claimant)) is not None:
            return held.uid
        if (entry := self._book.oldest(State.RETURNED)) is None:
            return None
        self._book.generate(entry, self._clock(), claimant)
        return entry.uid

    def save_partials(self, partials: Mapping[tuple[str, int, int], Partial]) -> None:
        """Keeps unfinished responses by (uid, sample, turn); those of groups that nobody generates are left out."""
        for (uid, sample, turn), partial in partials.items():
            entry = self._book.find(uid)
            if entry is not None and entry.state in UNFINISHED:
                entry.partials[sample, turn] = partial
                self._saw(partial.versions)
                self._book.note(entry)

    def partials(self, uid: str) -> dict[tuple[int, int], Partial]:
        """What was saved of a group since it was admitted or returned, by (sample, turn). Goes with commit and drop."""
        entry = self._book.find(uid)
        if entry is None:
            return {}
        return {key: partial() if callable(partial) else partial for key, partial in entry.partials.items()}

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
            leased_step, batch = self._lease
            if step != leased_step:
                raise BufferStateError(f"step {step} asks for a batch while step {leased_step} has one; ack that first")
            if version == self.standing.leased_version:
                return [entry.loaded() for entry in batch]
            self._put_back()
        elif step <= self.standing.last_step:
            raise BufferStateError(
                f"step {step} asks for a batch, but step {self.standing.last_step} is trained already"
            )
        if not self.has_batch():
            return None
        batch = self._book.batch(self.pacing.groups_per_step)
        groups = [entry.loaded() for entry in batch]
        for entry in batch:
            self._book.lease(entry, step)
        self._lease, self.standing.leased_version = (step, batch), version
        return groups

    def ack(self, step: int) -> None:
        """The step is trained; its groups keep their slots until `publish`. Raises BufferStateError if not leased."""
        if self._lease is None or self._lease[0] != step:
            if step <= self.standing.last_step:
                return
            held = "no step has one" if self._lease is None else f"step {self._lease[0]} has one"
            raise BufferStateError(f"step {step} cannot be acknowledged: it has no batch ({held})")
        for entry in self._lease[1]:
            self._book.train(entry)
            self._forget_attempts(entry.uid)
        self.standing.last_step, self._lease = step, None
        if step >= self.standing.failed_step.get("step", 0):
            self.standing.set_aside_in_a_row = 0

    def step_failed(self, step: int, attempts: int, most_in_a_row: int) -> dict[str, Any]:
        """The step raised an error: its batch is put back, and counted. Groups with so many `attempts` are dropped.

        At most `most_in_a_row` times until a step that got as far is trained: a fault that is not the batch's must not
        use up the data set. Returns ``attempt`` (the most of any group), ``set_aside`` (uids) and ``in_a_row``. Asked
        again before the next lease, it answers the same. Raises BufferStateError for a step that has no batch.
        """
        standing = self.standing
        if self._lease is None or self._lease[0] != step:
            if standing.failed_step.get("step") == step:
                return standing.failed_step
            raise BufferStateError(f"step {step} cannot have failed: it has no batch")
        batch, failed = self._lease[1], standing.failed_attempts
        self._put_back()
        failed = failed | {entry.uid: failed.get(entry.uid, 0) + 1 for entry in batch}
        standing.failed_attempts = failed
        attempt = max(failed[entry.uid] for entry in batch)
        worn = [entry for entry in batch if failed[entry.uid] >= attempts and entry.state is not State.DROPPED]
        if standing.set_aside_in_a_row >= most_in_a_row:
            worn = []
        for entry in worn:
            self._drop(entry, FAILED_STEP)
        standing.set_aside_in_a_row += bool(worn)
        standing.failed_step = {
            "step": step,
            "attempt": attempt,
            "set_aside": [entry.uid for entry in worn],
            "in_a_row": standing.set_aside_in_a_row,
        }
        return standing.failed_step

    def publish(self, version: int) -> None:
        """The servers have these weights: frees the slots of all that is trained, checks ages. Raises BufferStateError."""
        if version == self.version:
            return
        if version < self.version:
            raise BufferStateError(f"version {version} cannot be published after version {self.version}")
        self.standing.version = version
        self._saw([version])
        self._book.publish()
        self._check_ages()

    def trained_after(self, step: int) -> list[str]:
        """Uids of the groups that a rollback to this step would bring back, oldest first."""
        return [entry.uid for entry in self._book.trained_after(step)]

    def rollback(self, step: int, version: int, payloads: Mapping[str, Group | Stored] | None = None) -> None:
        """Training goes on from the checkpoint of ``step``, and the next version is greater than ``version``.

        What was leased, and what was trained after ``step``, is finished again; a trained group whose group is not among
        ``payloads`` is returned. A batch that is out for a step which the checkpoint contains is trained. Works on a
        closed buffer too, and leaves it closed. Raises BufferStateError when ``step`` was never trained, or is older than
        all checkpoints.
        """
        if self._lease is not None and self._lease[0] <= step:
            self.ack(self._lease[0])
        if step > self.standing.last_step:
            raise BufferStateError(
                f"the checkpoint is of step {step}, but the buffer knows of no step after {self.standing.last_step}"
            )
        if step < self.standing.oldest_kept:
            raise BufferStateError(
                f"step {step} is older than the oldest checkpoint that was kept, of step {self.standing.oldest_kept}"
            )
        self.standing.version = max(self.version, version)
        self._saw([version])
        self._put_back()
        self._book.reopen(self._book.trained_after(step), payloads or {}, self._clock())
        self.standing.last_step = step
        self._check_ages()

    def take_over(self) -> None:
        """For a new run on an old record: it is open again, and what was being generated is returned."""
        self.standing.closed = None
        for entry in self._book.among(State.GENERATING):
            self._book.give_back(entry, self._clock())

    def checkpointed(self, step: int, oldest_kept: int) -> None:
        """There is a checkpoint of ``step``, and none older than ``oldest_kept`` is left: no rollback goes further."""
        if not oldest_kept <= step <= self.standing.last_step:
            raise BufferStateError(
                f"a checkpoint of step {step} with oldest_kept={oldest_kept} does not fit the last trained step, "
                f"{self.standing.last_step}"
            )
        self.standing.oldest_kept = max(self.standing.oldest_kept, oldest_kept)
        self._book.forget(self.standing.oldest_kept)

    # Both sides

    def close(self, reason: str) -> None:
        """No admission, lease or commit from now on; `ack`, `publish` and the counts still work. The first reason stays."""
        if self.closed is None:
            self.standing.closed = reason

    def counts(self) -> dict[str, Any]:
        """``admitted == trained + sum(dropped.values()) + live``; ``slots`` splits what is taken of ``capacity`` by state."""
        slots = self._book.slots()
        return {
            "admitted": self._book.admitted,
            "live": self._book.live(),
            "slots": {state.value: slots[state] for state in (*LIVE, State.UNPUBLISHED)},
            "capacity": self.pacing.capacity,
            **self.counters(),
        }

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps, together with `live_uids`, for a run whose ledger gets lost."""
        return {
            "trained": self._book.trained,
            "dropped": dict(self._book.dropped),
            "regenerated": self.standing.regenerated,
            "masked_tokens": self.standing.masked_tokens,
            "removed_trajectories": self.standing.removed_trajectories,
        }

    def live_uids(self) -> list[str]:
        """Admitted, neither trained nor dropped; in admission order."""
        return [entry.uid for entry in self._book.among(*LIVE)]

    def admission_blocker(self) -> str | None:
        """Why no prompt can be admitted now; None when one can."""
        remaining = None
        if self._total_steps is not None:
            remaining = (self._total_steps - self.standing.last_step) * self.pacing.groups_per_step
        return blockers.of_admission(self._book, self.pacing, remaining)

    def lease_blocker(self) -> str | None:
        """Why no batch can be leased now; None when one can."""
        return blockers.of_lease(self._book, self.pacing, self._clock())

    def has_room(self) -> bool:
        """Whether a prompt can be admitted now."""
        return self.admission_blocker() is None

    def has_batch(self) -> bool:
        """Whether a batch is complete."""
        return self._book.ready(self.pacing.window) >= self.pacing.groups_per_step

    def has_returned(self) -> bool:
        """Whether a group waits to be generated again."""
        return self._book.oldest(State.RETURNED) is not None

    # Inside

    def _refuse_when_closed(self) -> None:
        if self.closed is not None:
            raise BufferClosed(self.closed)

    def _saw(self, versions: Iterable[int]) -> None:
        self.standing.newest_version = max(self.standing.newest_version, max(versions, default=0))

    def _keep(self, entry: Entry, group: Group, survivors: list[Trajectory]) -> bool:
        """Makes the group finished with its survivors, or drops it when they are too few. Returns whether it was kept."""
        self.standing.removed_trajectories += len(group.trajectories) - len(survivors)
        if len(survivors) < MIN_SURVIVORS:
            self._drop(entry, "lone_survivor" if survivors else "no_survivor")
            return False
        self._book.finish(entry, Group(entry.uid, survivors))
        return True

    def _check_ages(self) -> None:
        for entry in self._book.among(State.FINISHED):
            self._check_age(entry)

    def _check_age(self, entry: Entry) -> bool:
        """A finished group older than the bound is masked, returned or dropped, and counted. Whether it is still finished."""
        least = self.least_version
        if entry.oldest_version >= least:
            return True
        if self._stale == "regenerate":
            self._book.give_back(entry, self._clock())
            self.standing.regenerated += 1
            return False
        if self._stale == "drop":
            self._drop(entry, "stale")
            return False
        group = entry.loaded()
        masked = [t.masked(least) for t in group.trajectories]
        self.standing.masked_tokens += sum(sum(t.loss_mask) for t in group.trajectories)
        self.standing.masked_tokens -= sum(sum(t.loss_mask) for t in masked)
        return self._keep(entry, group, [t for t in masked if t.oldest_version is not None])

    def _drop(self, entry: Entry, reason: str) -> None:
        self._forget_attempts(entry.uid)
        self._book.drop(entry, reason, self.standing.last_step + 1)

    def _forget_attempts(self, uid: str) -> None:
        failed = self.standing.failed_attempts
        if uid in failed:
            self.standing.failed_attempts = {other: times for other, times in failed.items() if other != uid}

    def _put_back(self) -> None:
        """The batch that is out is finished as before, or, where it has grown too old, treated as stale."""
        batch = self._lease[1] if self._lease is not None else []
        self._lease = None
        for entry in batch:
            self._book.put_back(entry)
            self._check_age(entry)


def _describe(entry: Entry | None) -> str:
    if entry is None:
        return "unknown"
    if entry.state in TRAINED:
        return "trained"
    return f"dropped ({entry.reason})" if entry.state is State.DROPPED else entry.state.value
