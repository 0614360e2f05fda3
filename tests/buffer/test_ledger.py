"""The ledger agrees with the buffer after every call, and a buffer that starts from it goes on as if nothing had
happened."""

import asyncio
import os
import random
import sqlite3
from dataclasses import asdict

import numpy
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from local_buffer import LocalBuffer

from megasync.buffer import AsyncBuffer
from megasync.buffer import ledger as ledger_module
from megasync.buffer.groups import LIVE, GroupState
from megasync.buffer.ledger import SCHEMA_VERSION, Ledger
from megasync.buffer.payload import decode, encode, encode_partial
from megasync.buffer.segments import SegmentWriter, load, segments_of
from megasync.buffer.state import BufferStatus
from megasync.config.schema import ScheduleConfig
from megasync.errors import DataError, LedgerError
from megasync.trajectory import Group, Partial, Trajectory


def schedule(groups_per_step=2, max_staleness=1, **options):
    return ScheduleConfig(groups_per_step=groups_per_step, max_staleness=max_staleness, **options)


ONE_BY_ONE = schedule(1, 2, window_fraction=None)


def open_buffer(path, config=None, total_groups=None):
    return LocalBuffer(config or ONE_BY_ONE, total_groups, clock=lambda: 0.0, ledger=path)


def load_encoded(group):
    return decode(group.header, group.body)


def do(buffer, method, *arguments):
    return buffer.change(lambda state: getattr(state, method)(*arguments))


def crash(buffer, config=None):
    """Another buffer on the same file; the first one is gone without a farewell."""
    buffer.die()
    return open_buffer(buffer.ledger.path, config)


def picture(buffer):
    """Everything about a buffer that decides what it does next."""
    book = buffer.state._groups
    entries = {
        e.uid: (
            *(e.number, e.state, e.group and load(e.group), e.group and e.group.header, e.claimant),
            *(buffer.partials(e.uid), e.step * (e.state in STEPPED)),
        )
        for e in book.among(*(state for state in GroupState if state is not GroupState.DROPPED))
    }
    assert entries.keys() == book.open.keys()
    lease = buffer.state._lease and (buffer.state._lease[0], [e.uid for e in buffer.state._lease[1]])
    return entries, list(entries), lease, asdict(buffer.state.status), buffer.state.counts()


STEPPED = (GroupState.LEASED, GroupState.UNPUBLISHED, GroupState.PUBLISHED)


def answers(rng, version, samples=2):
    n = rng.randint(1, 4)
    return [
        Trajectory([1, 2], list(range(n)), [1] * n, [-rng.random()] * n, [version] * n, text="é", reward=rng.random())
        for _ in range(samples)
    ]


class Life:
    """Random calls on a buffer with a ledger; whoever works on a group is remembered outside, as the rollouter
    would."""

    def __init__(self, path, seed):
        self.random = r = random.Random(seed)
        self.config = schedule(
            r.randint(1, 3),
            r.randint(0, 2),
            weight_sync_steps=r.randint(1, 2),
            window_fraction=r.choice([None, 0.3, 1.0]),
            stale=r.choice(["mask", "regenerate", "drop"]),
        )
        self.buffer = open_buffer(path, self.config)
        self.admitted, self.working, self.step, self.version = 0, [], 0, 0
        self.batch = None
        # step -> uids, of the history that training stands on.
        self.trained = {}
        self.checkpoints = [0]

    @property
    def state(self):
        return self.buffer.state

    def again(self, call):
        """Some answers get lost with the process, after the change was recorded or before; the call is made again."""
        if self.random.random() < 0.15:
            lost = self.unrecorded(call)
            assert call() == lost
            return lost
        result = call()
        if self.random.random() < 0.15:
            self.crash()
            assert call() == result
        return result

    def unrecorded(self, call):
        self.buffer.buffer._records._work = lambda jobs: lambda: [job.read and job.read() for job in jobs]
        result = call()
        self.buffer = crash(self.buffer, self.config)
        return result

    def crash(self):
        before = picture(self.buffer)
        self.buffer = crash(self.buffer, self.config)
        assert picture(self.buffer) == before

    def admit(self):
        uid = f"0:{self.admitted}"
        if self.again(lambda: self.buffer.change(lambda state: state.admit(uid))):
            self.admitted += 1
            self.working.append(uid)

    def reclaim(self):
        claimant = str(self.random.random())
        uid = self.again(lambda: self.buffer.change(lambda state: state.reclaim(claimant)))
        if uid is not None:
            assert uid not in self.working
            self.working.append(uid)

    def partial(self):
        if self.working:
            uid = self.random.choice(self.working)
            partial = encode_partial(Partial("digest", [1, 2, 3], [-0.1] * 3, [self.version] * 3))
            key = self.random.randint(0, 1), self.random.randint(0, 1)
            self.again(lambda: self.buffer.change(lambda state: state.save_partials({(uid, *key): partial})))
            assert self.buffer.partials(uid)[key] == partial.data

    def commit(self):
        if self.working:
            uid = self.working.pop(self.random.randrange(len(self.working)))
            lag = self.random.choice([0, 0, 0, 3])
            responses = answers(self.random, max(0, self.version - lag), self.random.choice([1, 2, 2, 2]))
            group = encode(Group(uid, responses))
            self.again(lambda: self.buffer.commit(group))
            assert not self.buffer.partials(uid)

    def drop(self):
        if self.working:
            uid = self.working.pop(self.random.randrange(len(self.working)))
            assert self.buffer.change(lambda state: state.drop(uid, "failed"))

    def lease(self):
        if self.batch is None and self.state.version == self.version:
            self.batch = self.again(lambda: self.buffer.change(lambda state: state.lease(self.step + 1, self.version)))

    def train(self):
        if self.batch is not None:
            self.step += 1
            self.trained[self.step] = [group.uid for group in self.batch]
            self.batch = None
            self.again(lambda: self.buffer.change(lambda state: state.ack(self.step)))

    def publish(self):
        if self.batch is None:
            self.version += 1
            self.again(lambda: self.buffer.change(lambda state: state.publish(self.version)))

    def checkpoint(self):
        if self.batch is None and self.step > self.checkpoints[-1]:
            self.checkpoints = [*self.checkpoints, self.step][-2:]
            self.again(lambda: self.buffer.checkpointed(self.step, self.checkpoints[0]))

    def rollback(self):
        self.step, self.batch = self.random.choice(self.checkpoints), None
        self.checkpoints = [step for step in self.checkpoints if step <= self.step]
        self.trained = {step: uids for step, uids in self.trained.items() if step <= self.step}
        self.again(lambda: self.buffer.rollback(self.step, self.version))
        self.publish()

    def check(self):
        counts = self.state.counts()
        assert counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["live"]
        assert counts["admitted"] == self.admitted
        uids = [uid for batch in self.trained.values() for uid in batch]
        assert len(uids) == len(set(uids)) == counts["trained"]
        assert not set(uids) & set(self.state.live_uids())
        assert self.state.status.last_step == self.step
        least = self.version - self.state.pacing.staleness_bound
        for entry in self.state._groups.among(GroupState.FINISHED):
            assert entry.oldest_version >= least
        rows = dict(self.buffer.ledger._db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
        assert sum(rows.get(state, 0) for state in LIVE) == counts["live"]
        assert rows.get("unpublished", 0) + rows.get("published", 0) == counts["trained"]
        assert rows.get("dropped", 0) == sum(counts["dropped"].values())

    def play(self, events):
        calls = [*[self.admit] * 4, *[self.commit] * 4, self.drop, self.reclaim, self.partial]
        calls += [*[self.lease] * 3, *[self.train] * 2, self.publish, self.checkpoint, self.rollback, self.crash]
        for _ in range(events):
            self.random.choice(calls)()
            self.check()


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
# A rollback that reopens a group before one that was trained, published and forgotten.
@example(seed=126639)
def test_random_crashes_preserve_the_buffer_state_and_no_group_is_trained_twice(tmp_path_factory, seed):
    life = Life(tmp_path_factory.mktemp("ledger") / "ledger.db", seed)
    try:
        life.play(80)
    finally:
        life.buffer.die()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def buffer(path):
    made = open_buffer(path)
    yield made
    made.die()


def train(buffer, group, *uids):
    """One step a group, each published."""
    state = buffer.state
    for uid in uids:
        step = state.status.last_step + 1
        do(buffer, "admit", uid)
        buffer.commit(group(uid, state.version, state.version))
        do(buffer, "lease", step, state.version)
        do(buffer, "ack", step)
        do(buffer, "publish", state.version + 1)


def payloads(buffer):
    rows = buffer.ledger._db.execute("SELECT uid FROM payloads JOIN groups USING (number) ORDER BY number")
    return [uid for (uid,) in rows]


# Size


def test_payloads_are_pruned_once_every_kept_checkpoint_covers_them_or_they_are_stale(buffer, group):
    train(buffer, group, "a", "b")
    assert payloads(buffer) == ["a", "b"]
    buffer.checkpointed(2, 1)
    assert payloads(buffer) == ["b"]
    train(buffer, group, "c", "d", "e")
    assert buffer.state.version == 5 and payloads(buffer) == ["d", "e"], "b and c are older than version 5 - 2"


def test_groups_that_ended_before_the_oldest_checkpoint_are_counted_but_evicted_from_memory(buffer, group):
    train(buffer, group, "a", "b", "c")
    do(buffer, "admit", "d")
    do(buffer, "drop", "d", "failed")
    train(buffer, group, "e")
    buffer.checkpointed(4, 3)
    again = crash(buffer)
    for one in (buffer, again):
        assert list(one.state._groups.ended) == ["d", "e"]
        assert one.state.counts()["trained"] == 4 and one.state.counts()["dropped"] == {"failed": 1}
    with pytest.raises(LedgerError, match="already has this group"):
        do(again, "admit", "a")
    again.die()


# What goes wrong


def test_a_renamed_drop_reason_is_counted_under_its_current_name(path, buffer, group):
    for uid in "abc":
        do(buffer, "admit", uid)
        do(buffer, "drop", uid, "over_age" if uid == "a" else "stale")
    assert do(crash(buffer), "counts")["dropped"] == {"stale": 3}
    inherited = LocalBuffer(ONE_BY_ONE, counters={"trained": 1, "dropped": {"over_age": 2}})
    assert do(inherited, "counts")["dropped"] == {"stale": 2} and do(inherited, "counts")["admitted"] == 3


def test_a_full_disk_closes_the_buffer_without_losing_recorded_state(path, buffer, group):
    for uid in "ab":
        do(buffer, "admit", uid)
    assert buffer.commit(group("a", 0, 0))
    pages = buffer.ledger._db.execute("PRAGMA page_count").fetchone()[0]
    buffer.ledger._db.execute(f"PRAGMA max_page_count={pages}")
    rng = random.Random(0)
    metrics = {rng.randbytes(25_000).hex(): 1.0}
    large = encode(Group("b", [Trajectory([1], [1], [1], [-0.1], [0], metrics=metrics, reward=1.0)] * 2))
    with pytest.raises(
        LedgerError, match=r"ledger.db cannot be written: database or disk is full.*megasync resume"
    ) as error:
        buffer.commit(large)
    assert buffer.state.closed == str(error.value)
    with pytest.raises(LedgerError, match="disk is full"):
        do(buffer, "drop", "b", "why")

    again = crash(buffer)
    assert [(e.uid, e.state.value) for e in again.state._groups.open.values()] == [
        ("a", "finished"),
        ("b", "generating"),
    ]
    assert again.state.closed is None and again.commit(large)
    again.die()


def test_a_file_that_is_not_a_ledger_is_rejected_and_not_modified(path):
    path.write_bytes(b"something else entirely, longer than a header of SQLite" * 50)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="ledger.db is damaged or not a ledger.*move it away"):
        Ledger(path)
    assert path.read_bytes() == before

    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE groups (x)")
    other.close()
    with pytest.raises(LedgerError, match="is a database, but not a ledger; move it away"):
        Ledger(path)


@pytest.mark.parametrize("version", [7, 99])
def test_a_ledger_with_an_unsupported_format_version_is_rejected(path, version):
    ledger = Ledger(path)
    ledger._db.execute(f"PRAGMA user_version={version}")
    ledger.close()
    reads = f"has format {version}, but this version of megasync reads {SCHEMA_VERSION}; resume with the version that"
    with pytest.raises(LedgerError, match=reads):
        Ledger(path)


DAMAGES = {
    "flipped": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "cut short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "missing": lambda file: file.unlink(),
}


def segments(buffer):
    # Waits for the thread that removes them.
    buffer.before_checkpoint(0)
    return sorted(segments_of(buffer.ledger.path).glob("*.seg"))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_group_whose_segment_is_damaged_is_counted_and_generated_again(buffer, group, caplog, damage):
    do(buffer, "admit", "a")
    buffer.commit(group("a", 0, 0))
    (segment,) = segments(buffer)
    again = crash(buffer)
    damage(segment)
    assert again.lease(1, 0) is None and "Group a is generated again" in caplog.text
    assert again.state.counts()["damaged"] == 1 and again.state.reclaimable() == ["a"]
    do(again, "reclaim")
    assert again.commit(group("a", 0, 0))
    (leased,) = again.lease(1, 0)
    assert load(leased) == load_encoded(group("a", 0, 0)) and len(segments(again)) == 1 + (
        damage is not DAMAGES["missing"]
    )
    again.die()


def test_a_body_damaged_after_it_was_written_is_found_once_its_step_has_failed(buffer, group):
    do(buffer, "admit", "a")
    buffer.commit(group("a", 0, 0))
    DAMAGES["flipped"](*segments(buffer))
    (leased,) = buffer.lease(1, 0)
    with pytest.raises(DataError, match="group a cannot be read: .* does not match its checksum"):
        load(leased)
    buffer.step_failed(1, 3, 1)
    assert buffer.lease(1, 0) is None and buffer.state.reclaimable() == ["a"]


def test_a_segment_that_is_cut_short_costs_only_the_groups_that_lay_there(buffer, group):
    for uid in "ab":
        do(buffer, "admit", uid)
    buffer.commit(group("a", 0, 0))
    (segment,) = segments(buffer)
    os.truncate(segment, 0)
    buffer.commit(group("b", 0, 0))
    held = {leased.uid: leased for leased in (entry.held for entry in buffer.state._groups.open.values())}
    with pytest.raises(DataError, match="group a cannot be read"):
        load(held["a"])
    assert load(held["b"]) == load_encoded(group("b", 0, 0))


def test_a_restarted_buffer_reads_partials_and_bodies_only_when_they_are_needed(buffer, group, monkeypatch):
    for uid in "abc":
        do(buffer, "admit", uid)
    buffer.commit(group("a", 0, 0))
    buffer.commit(group("b", 0, 0))
    partial = encode_partial(Partial("digest", [7], [-0.1], [0]))
    do(buffer, "save_partials", {("c", 0, 0): partial})
    read = []
    monkeypatch.setattr(ledger_module, "load", lambda group: read.append(group.uid) or load(group))
    again = crash(buffer)
    assert again.state.counts()["slots"]["finished"] == 2 and not read
    (leased,) = again.lease(1, 0)
    assert load(leased) == load_encoded(group("a", 0, 0)) and read == ["a"]
    assert again.partials("c") == {(0, 0): partial.data}
    written = again.ledger._db.total_changes
    (same,) = again.lease(1, 0)
    assert same is leased and read == ["a"]
    assert again.ledger._db.total_changes == written, "a group that was only read is not written again"
    again.die()


async def test_bodies_of_one_transaction_lie_in_the_order_of_their_commits(path, monkeypatch):
    """The first two fit into a segment, the third does not; the rows have the order of the admissions."""
    responses = {uid: Trajectory([1], [n], [1], [-0.5], [0], reward=1.0) for n, uid in enumerate("abc")}
    groups = {uid: encode(Group(uid, [each, each])) for uid, each in responses.items()}
    body = len(groups["a"].body)
    monkeypatch.setattr(SegmentWriter.__init__, "__defaults__", ("driver", body + 1))
    buffer = AsyncBuffer(schedule(3), ledger=path)
    for uid in groups:
        await buffer.admit(uid)
    assert all(await asyncio.gather(*(buffer.commit(groups[uid]) for uid in "acb")))
    leased = await buffer.lease(1, 0)
    assert [load(each) for each in leased] == [load_encoded(each) for each in groups.values()]
    assert [each.body.offset for each in leased] == [0, 0, body]
    await buffer.release()


def test_pruning_reads_no_row_of_the_groups_that_have_no_payload(buffer):
    plan = buffer.ledger._db.execute(f"EXPLAIN QUERY PLAN {ledger_module.PRUNE}", (0, 0)).fetchall()
    assert [step for *_, step in plan if "groups" in step] == ["SEARCH groups USING INTEGER PRIMARY KEY (rowid=?)"]


def test_a_segment_stays_until_its_writer_has_ended_it(buffer, group):
    """The header of a body that a worker has written may still be on its way."""
    folder = segments_of(buffer.ledger.path)
    writer = SegmentWriter(folder, "worker-0", segment_bytes=1)
    ready = {uid: group(uid, 0, 0).stored(writer.append(group(uid, 0, 0).pieces)) for uid in "xy"}
    train(buffer, group, "a", "b")
    for uid in ready:
        do(buffer, "admit", uid)
    buffer.checkpointed(2, 2)
    assert [file.stem for file in segments(buffer)] == ["driver-00000001", "worker-0-00000001", "worker-0-00000002"]
    for uid in ready:
        assert buffer.commit(ready[uid])
    for step in (3, 4):
        (leased,) = buffer.lease(step, 2)
        assert load(leased) == load_encoded(group(leased.uid, 0, 0))
        do(buffer, "ack", step)
    buffer.checkpointed(4, 4)
    assert [file.stem for file in segments(buffer)] == ["driver-00000001", "worker-0-00000002"]
    assert SegmentWriter(folder, "worker-0").append([b"body"]).path.endswith("worker-0-00000003.seg"), "no name twice"
    again = crash(buffer)
    train(again, group, "c")
    again.checkpointed(5, 5)
    assert [file.stem for file in segments(again)] == ["driver-00000002", "worker-0-00000003"], "the others were ended"
    again.die()


def test_loading_a_large_ledger_reports_progress(buffer, monkeypatch):
    monkeypatch.setattr(ledger_module, "ROWS", 2)
    for uid in "abc":
        do(buffer, "admit", uid)
    said = []
    buffer.die()
    ledger = Ledger(buffer.ledger.path)
    ledger.read(report=said.append)
    ledger.close()
    assert said == ["2 groups"]


def test_a_ledger_held_by_another_process_cannot_be_opened(path, buffer):
    with pytest.raises(LedgerError, match="locked; another process holds it: is the run still alive"):
        Ledger(path, lock_seconds=0.1)


# What comes back


def test_trajectory_values_survive_a_ledger_round_trip(buffer):
    one = Trajectory(
        [1],
        numpy.array([1, 2]).tolist(),
        [True, False],
        [numpy.float32(-0.1), -1e-300],
        [0, 0],
        reward=numpy.float64(0.1),
        metrics={"n": numpy.int64(3), "ok": True, "none": None},
    )
    do(buffer, "admit", "a")
    buffer.commit(encode(Group("a", [one, one])))
    again = crash(buffer)
    (leased,) = do(again, "lease", 1, 0)
    assert load(leased).trajectories == [one, one] and load(leased).trajectories[0].loss_mask == [True, False]
    header = leased.header.trajectories[0]
    assert {type(header.reward), type(header.metrics["n"])} == {float, int}
    again.die()


def test_calls_that_change_no_state_write_nothing_to_the_ledger(buffer):
    before = buffer.ledger._db.total_changes
    for call in (lambda s: s.lease(1, 0), lambda s: s.reclaim("x"), lambda s: s.publish(0), lambda s: s.ack(0)):
        buffer.change(call)
    written = buffer.ledger._db.total_changes
    do(buffer, "admit", "a")
    assert buffer.ledger._db.total_changes > written >= before


def test_in_place_changes_to_status_values_are_recorded(tmp_path):
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    status = BufferStatus.initial(3, 2, {})
    ledger.write(status)
    status.failed_attempts["0:1"] = 1
    ledger.write(status)
    status.failed_attempts["0:1"] += 1
    status.failed_step.set_aside.append("0:1")
    ledger.write(status)
    ledger.close()
    ledger = Ledger(path)
    found = ledger.read().status
    assert (found.failed_attempts, found.failed_step.set_aside) == ({"0:1": 2}, ["0:1"])
    # So is a value that was read.
    found.failed_attempts["0:2"] = 1
    ledger.write(found)
    ledger.close()
    ledger = Ledger(path)
    assert ledger.read().status.failed_attempts == {"0:1": 2, "0:2": 1}
    ledger.close()


def test_inherited_status_is_never_compared_when_the_ledger_is_written(tmp_path):
    class Long(dict):
        def __eq__(self, other):
            raise AssertionError("it is long")

    ledger = Ledger(tmp_path / "ledger.db")
    status = BufferStatus.initial(0, 0, {})
    status.inherited = Long(origin=[1, 2, 3])
    for version in range(3):
        status.version = version
        ledger.write(status)
    assert ledger.read().status.inherited == {"origin": [1, 2, 3]}
    ledger.close()
