"""Hundreds of random runs: servers that finish in any order, stall, fail or lag; every law checked after every event.

The run keeps its own books (who was admitted, who is on a server, who was trained, who failed), so that they and the
buffer's can disagree; it asks the buffer only for the groups that the buffer itself dropped.
"""

import random
from collections import Counter

import pytest

from megasync.buffer import BufferClosed, BufferStateError, TrajectoryBuffer
from megasync.buffer.groups import LIVE, UNFINISHED, GroupState
from megasync.buffer.payload import encode
from megasync.buffer.segments import load
from megasync.buffer.state import STALE_POLICIES
from megasync.config.pacing import Pacing
from megasync.trajectory import Group, Trajectory


class Run:
    """One random run. ``lag`` is the chance that a token is older than the version its group was started at."""

    def __init__(self, seed, *, lag=0.0, failures=0.0, mischief=0.0):
        self.random = random.Random(seed)
        r = self.random
        self.pacing = Pacing(
            r.randint(1, 4), r.randint(0, 3), r.randint(1, 3), r.choice([None, 0.0, 0.3, r.random(), 1.0])
        )
        self.steps = r.randint(1, 6) * self.pacing.weight_sync_steps
        self.total = self.steps * self.pacing.groups_per_step
        self.buffer = TrajectoryBuffer(self.pacing, stale=r.choice(STALE_POLICIES), total_groups=self.total)
        self.lag, self.failures, self.mischief = lag, failures, mischief
        self.version = self.step = 0
        self.admitted = []
        self.started = {}  # uid -> version at which its generation started, while on a server
        self.stalled = set()  # uids that finish only when nothing else can happen
        self.trained, self.dropped, self.batch = [], Counter(), None
        self.staleness = [0]
        self.overtakers = Counter()
        self.events = Counter()

    # What can happen

    def admit(self):
        uid = str(len(self.admitted))
        if not self.buffer.admit(uid):
            return False
        self.admitted.append(uid)
        self.start(uid)
        return True

    def reclaim(self):
        uid = self.buffer.reclaim(self.random.choice(["", f"{self.random.random()}"]))
        if uid is not None:
            assert uid not in self.started and uid in self.admitted and uid not in self.trained
            self.start(uid)
        return uid is not None

    def start(self, uid):
        self.started[uid] = self.version
        if self.random.random() < 0.15:
            self.stalled.add(uid)

    def finish(self, patient=True):
        ready = [uid for uid in self.started if not (patient and uid in self.stalled)]
        if not ready:
            return False
        uid = self.random.choice(ready)
        self.stalled.discard(uid)
        born = self.started.pop(uid)
        if self.random.random() < self.failures:
            reason = self.random.choice(["failed", "uniform"])
            assert self.buffer.drop(uid, reason)
            self.dropped[reason] += 1
            return True
        before = self.buffer.counts()["dropped"]
        self.buffer.commit(encode(Group(uid, [self.answer(born) for _ in range(self.random.randint(2, 3))])))
        self.dropped += Counter(self.buffer.counts()["dropped"]) - Counter(before)
        return True

    def answer(self, born):
        """A trajectory begun at ``born`` and continued under each later version; some tokens are not the policy's."""
        n = self.random.randint(1, 4)
        versions = sorted(self.random.randint(born, self.version) for _ in range(n))
        if self.random.random() < self.lag:
            versions[0] = max(0, born - self.random.randint(1, 4))
        mask = [int(self.random.random() > self.failures) for _ in range(n)]
        reward = None if self.random.random() < self.failures / 2 else 1.0
        return Trajectory([1], [0] * n, mask, [-1.0] * n, versions, reward=reward)

    def lease(self):
        if self.batch is not None or self.step == self.steps:
            return False
        blocker = self.buffer.lease_blocker()
        self.batch = self.buffer.lease(self.step + 1, self.version)
        assert (self.batch is None) == (blocker is not None)
        if self.batch is not None:
            self.check_batch()
        return self.batch is not None

    def train(self):
        if self.batch is None:
            return False
        if self.random.random() < self.failures / 2:
            self.fail()
            return True
        self.step += 1
        self.buffer.ack(self.step)
        self.trained += [group.uid for group in self.batch]
        self.batch = None
        if self.step % self.pacing.weight_sync_steps == 0:
            self.version += 1
            before = self.buffer.counts()["dropped"]
            self.buffer.publish(self.version)
            self.dropped += Counter(self.buffer.counts()["dropped"]) - Counter(before)
        return True

    def fail(self):
        """The step raises an error on its batch."""
        before = self.buffer.counts()["dropped"]
        failed = self.buffer.step_failed(self.step + 1, attempts=2, most_in_a_row=self.random.choice([1, 1000]))
        self.dropped += Counter(self.buffer.counts()["dropped"]) - Counter(before)
        assert {group.uid for group in self.batch} >= set(failed.set_aside)
        # These groups overtook nobody.
        self.overtakers = self.overtakers_before
        self.batch = None

    def misbehave(self):
        """Calls that must be refused and change nothing."""
        before = self.buffer.counts()
        nobody = encode(Group("nobody", []))
        wrong = [
            lambda: self.buffer.commit(nobody),
            lambda: self.buffer.drop("nobody", "why"),
            lambda: self.buffer.ack(self.step + 7),
            lambda: self.buffer.publish(self.version - 1),
            lambda: self.buffer.lease(self.step + 1, self.version + 1),
        ]
        wrong += [lambda: self.buffer.admit(self.trained[-1])] if self.trained else []
        wrong += [lambda: self.buffer.drop(self.batch[0].uid, "why")] if self.batch else []
        with pytest.raises(BufferStateError):
            self.random.choice(wrong)()
        assert self.buffer.counts() == before

    # What must hold

    def check(self):
        counts = self.buffer.counts()
        dropped = sum(counts["dropped"].values())
        assert counts["admitted"] == len(self.admitted) == counts["trained"] + dropped + counts["live"]
        assert counts["trained"] == len(self.trained) == len(set(self.trained))
        assert counts["dropped"] == dict(self.dropped)
        assert counts["slots"]["generating"] == len(self.started)
        assert counts["slots"]["leased"] == len(self.batch or [])
        assert counts["slots"]["unpublished"] == self.step % self.pacing.weight_sync_steps * self.pacing.groups_per_step
        assert sum(counts["slots"].values()) <= counts["capacity"] == self.pacing.capacity
        assert counts["trained"] + counts["live"] <= self.total
        live = self.buffer.live_uids()
        assert live == sorted(live, key=int) and len(live) == counts["live"]
        assert not set(live) & set(self.trained)
        # Which takes as long as all the rest together.
        if self.events.total() % 8 == 0:
            self.check_index()

    def check_index(self):
        """The book's indexes against the same questions asked of every open group in turn."""
        book, window = self.buffer._groups, self.pacing.window
        entries = sorted(book.open.values(), key=lambda entry: entry.number)
        slots = Counter(entry.state for entry in entries)
        assert {state: number for state, number in book.slots().items() if number} == slots
        assert book.live() == sum(slots[state] for state in LIVE)
        for states in (UNFINISHED, (GroupState.RETURNED,), (GroupState.FINISHED, GroupState.LEASED)):
            among = [entry for entry in entries if entry.state in states]
            assert book.among(*states) == among and book.oldest(*states) is next(iter(among), None)
        eligible, ahead = [], None
        for entry in entries:
            if ahead is not None:
                ahead += 1
                if ahead >= window:
                    break
            elif entry.state in UNFINISHED:
                ahead = 0
            if entry.state is GroupState.FINISHED:
                eligible.append(entry)
        assert book.ready(window) == len(eligible) and book.batch(len(eligible)) == eligible
        assert self.buffer.has_batch() == (len(eligible) >= self.pacing.groups_per_step)
        assert self.buffer.has_returned() == bool(slots[GroupState.RETURNED])
        claims = {e.claimant: e for e in entries if e.claimant and e.state is GroupState.GENERATING}
        assert book._claims == claims

    def check_batch(self):
        uids = [int(group.uid) for group in self.batch]
        assert uids == sorted(uids) and len(uids) == self.pacing.groups_per_step
        assert not {str(uid) for uid in uids} & set(self.trained)
        for group in self.batch:
            responses = load(group).trajectories
            assert len(responses) == len(group.header.trajectories) >= 2
            assert all(t.reward is not None and any(t.loss_mask) for t in responses)
            self.staleness += [self.version - t.oldest_version for t in responses]
            assert [t.oldest_version for t in responses] == [t.oldest_version for t in group.header.trajectories]
        assert max(self.staleness) <= self.pacing.staleness_bound
        self.overtakers_before = self.overtakers.copy()
        for uid in [*self.started, *self.buffer.reclaimable()]:
            self.overtakers[uid] += sum(int(uid) < other for other in uids)
            assert self.overtakers[uid] <= self.pacing.window - 1

    # The schedule

    def play(self):
        """Random events until the run is over. Nothing possible before that is a deadlock."""
        actions = [self.admit, self.reclaim, self.finish, self.lease, self.train]
        weights = [self.random.choice([1, 1, 5]) for _ in actions]
        for _ in range(100_000):
            if self.step == self.steps:
                assert self.buffer.counts()["trained"] == self.total and not self.buffer.admit("one more")
                return self
            if self.random.random() < self.mischief:
                self.misbehave()
            first = self.random.choices(actions, weights)[0]
            order = [first, *(a for a in actions if a != first), lambda: self.finish(patient=False)]
            happened = next((action for action in order if action()), None)
            assert happened is not None, f"deadlock: {self.buffer.counts()}, {self.buffer.lease_blocker()}"
            self.events[happened.__name__] += 1
            self.check()
        raise AssertionError(f"the run never ended: {self.buffer.counts()}")


@pytest.mark.parametrize("block", range(2))
def test_a_run_completes_under_random_stalls_failures_and_stale_tokens(block):
    seen = Counter()
    for seed in range(block * 400, (block + 1) * 400):
        run = Run(seed, lag=0.2, failures=0.2, mischief=0.1).play()
        counts = run.buffer.counts()
        seen += Counter(counts["dropped"]) + Counter(regenerated=counts["regenerated"], masked=counts["masked_tokens"])
    assert all(
        seen[thing]
        for thing in ("stale", "no_survivor", "lone_survivor", "failed", "failed_step", "regenerated", "masked")
    )


@pytest.mark.parametrize("block", range(2))
def test_pacing_alone_keeps_every_group_within_the_staleness_bound(block):
    """Servers that serve what is published never produce a stale group, so the check finds nothing to do."""
    reached = Counter()
    for seed in range(block * 400, (block + 1) * 400):
        run = Run(seed, failures=0.1 * (seed % 2)).play()
        counts = run.buffer.counts()
        assert counts["regenerated"] == counts["masked_tokens"] == counts["dropped"].get("stale", 0) == 0
        if run.pacing.window == 1:
            assert max(run.staleness) <= run.pacing.max_staleness
        reached[max(run.staleness) > run.pacing.max_staleness] += 1
    assert reached[True] and reached[False]


def test_synchronous_batches_are_independent_of_timing():
    """Law 15: with max_staleness=0 the batches depend on the prompts and on who fails, not on any timing."""
    for sync_steps in (1, 2):
        batches = set()
        for seed in range(100):
            run = Run(seed)
            run.pacing, run.steps, run.total = Pacing(3, 0, sync_steps, 0.5), 4, 12
            run.buffer = TrajectoryBuffer(run.pacing, total_groups=12)
            run.play()
            batches.add(tuple(run.trained))
        assert batches == {tuple(str(uid) for uid in range(12))}


def test_closing_at_any_time_keeps_the_group_counts_consistent():
    for seed in range(200):
        run = Run(seed, lag=0.2, failures=0.2)
        stop_after = run.random.randint(0, 40)
        for _ in range(stop_after):
            run.random.choice([run.admit, run.reclaim, run.finish, run.lease, run.train])()
        run.buffer.close("over")
        for uid in list(run.started):
            assert not run.buffer.commit(encode(Group(uid, []))) and not run.buffer.drop(uid, "late")
        with pytest.raises(BufferClosed):
            run.buffer.lease(run.step + 1, run.version)
        run.train()
        run.check()
