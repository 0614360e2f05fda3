"""The buffer with waits. The suite's own timeout ends a test whose wait nobody ends."""

import asyncio
import pickle

import pytest
from local_buffer import kill

from megasync.buffer import AsyncBuffer, BufferClosed, BufferStateError
from megasync.buffer.segments import load, segments_of
from megasync.config.schema import ScheduleConfig
from megasync.errors import LedgerError


def schedule(groups_per_step=2, max_staleness=1, **options):
    return ScheduleConfig(groups_per_step=groups_per_step, max_staleness=max_staleness, **options)


async def settle():
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def fill(buffer, *uids):
    for uid in uids:
        await buffer.admit(uid)


async def filled(*uids, **options):
    """A buffer with one group a step and no staleness, unless told otherwise, and these groups."""
    buffer = AsyncBuffer(schedule(**({"groups_per_step": 1, "max_staleness": 0} | options)))
    await fill(buffer, *uids)
    return buffer


async def blocked(*calls):
    """Their tasks, which wait."""
    tasks = [asyncio.create_task(call) for call in calls]
    await settle()
    assert not any(task.done() for task in tasks)
    return tasks


async def train(buffer, *groups, step=1, version=0):
    for group in groups:
        await buffer.commit(group)
    await buffer.lease(step, version)
    await buffer.ack(step)


async def pending(buffer):
    return (await buffer.before_checkpoint(0))["pending"]


# Waits and who ends them


async def publish_a(buffer, group):
    await train(buffer, group("a"))
    await settle()
    assert await pending(buffer) == [], "only a publication frees the slot"
    await buffer.publish(1)


@pytest.mark.parametrize(
    "free",
    [
        publish_a,
        lambda buffer, group: buffer.drop("a", "failed"),
        # With one response it is refused.
        lambda buffer, group: buffer.commit(group("a", 0)),
    ],
    ids=["publication", "drop", "refused commit"],
)
async def test_admit_blocks_until_a_slot_is_free(group, free):
    buffer = await filled("a")
    (waiting,) = await blocked(buffer.admit("b"))
    await free(buffer, group)
    await waiting
    assert await pending(buffer) == ["b"]


@pytest.mark.parametrize("batch", ["ab", "bc"], ids=["commit", "drop"])
async def test_lease_blocks_until_its_batch_is_complete_or_a_drop_advances_the_window(group, batch):
    buffer = await filled("a", "b", "c", groups_per_step=2, max_staleness=1, window_fraction=None)
    (waiting,) = await blocked(buffer.lease(1, 0))
    for uid in "bc":
        await buffer.commit(group(uid))
    await settle()
    assert not waiting.done()
    await (buffer.commit(group("a")) if "a" in batch else buffer.drop("a", "failed"))
    assert [g.uid for g in await waiting] == [*batch]


async def test_reclaim_blocks_until_a_finished_group_becomes_stale_or_a_rollback_returns_one(group):
    buffer = await filled()
    (waiting,) = await blocked(buffer.reclaim())
    await fill(buffer, "a")
    await buffer.commit(group("a"))
    await settle()
    assert not waiting.done()
    await buffer.publish(1)
    assert await waiting == "a"
    await train(buffer, group("a", 1, 1), version=1)
    (waiting,) = await blocked(buffer.reclaim())
    await buffer.rollback(0, 1)
    assert await waiting == "a"


async def test_close_fails_all_pending_calls_with_the_close_reason():
    buffer = await filled("a")
    waits = await blocked(buffer.admit("b"), buffer.admit("c"), buffer.lease(1, 0), buffer.reclaim())
    await buffer.close("a server died")
    for result in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(result, BufferClosed) and result.reason == "a server died"
    assert await buffer.waiting() == {}
    for late in (buffer.admit("d"), buffer.lease(1, 0), buffer.reclaim()):
        with pytest.raises(BufferClosed, match="a server died"):
            await late


async def test_a_call_that_will_never_be_possible_raises_instead_of_blocking(group):
    buffer = await filled("a", max_staleness=1)
    await buffer.drop("a", "failed")
    for call in (buffer.admit("a"), buffer.lease(1, 5)):
        with pytest.raises(BufferStateError):
            await call
    # Also once it waits.
    (waiting,) = await blocked(buffer.lease(1, 0))
    await buffer.publish(1)
    with pytest.raises(BufferStateError, match="at version 0, but 1 is published"):
        await waiting


def test_buffer_closed_error_survives_pickling():
    error = pickle.loads(pickle.dumps(BufferClosed("done")))
    assert error.reason == "done" and str(error) == "done"


async def test_a_lease_pending_at_rollback_fails_without_consuming_groups(group):
    buffer = await filled("a", "b", groups_per_step=2)
    await buffer.commit(group("a"))
    (forgotten,) = await blocked(buffer.lease(1, 0))
    await buffer.rollback(0, 0)
    with pytest.raises(BufferStateError, match="the wait for step 1 ended: training went back"):
        await forgotten
    await buffer.commit(group("b"))
    assert [g.uid for g in await buffer.lease(1, 0)] == ["a", "b"]


# Cancelling


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_admit_does_not_consume_a_slot():
    buffer = await filled("a")
    (waiting,) = await blocked(buffer.admit("b"))
    await buffer.drop("a", "failed")  # b is woken, and cancelled before it runs
    await cancelled(waiting)
    assert await pending(buffer) == [] and await buffer.waiting() == {}
    await buffer.admit("b")


async def test_a_cancelled_lease_leaves_the_batch_for_the_next_lease_which_may_be_repeated(group):
    buffer = await filled("a", "b", groups_per_step=2)
    (waiting,) = await blocked(buffer.lease(1, 0))
    await buffer.commit(group("a"))
    await buffer.commit(group("b"))  # the batch is there, and its only customer cancelled before it runs
    await cancelled(waiting)
    lost = await buffer.lease(1, 0)
    assert [g.uid for g in lost] == ["a", "b"] and await buffer.lease(1, 0) == lost


async def test_a_cancelled_reclaim_leaves_the_group_for_the_next_reclaim(group):
    buffer = await filled("a")
    (first,) = await blocked(buffer.reclaim())
    await buffer.commit(group("a"))
    await buffer.publish(1)
    await cancelled(first)
    assert await buffer.reclaim() == "a"


# Who is woken


async def test_a_lease_that_returns_its_batch_wakes_a_pending_reclaim(group):
    buffer = await filled("a")
    await buffer.commit(group("a", 0, 0))
    await buffer.lease(1, 0)
    (waiting,) = await blocked(buffer.reclaim())
    await buffer.publish(1)
    await settle()
    lease = asyncio.create_task(buffer.lease(1, 1))
    assert await waiting == "a", "it was too old for the batch, which the lease gave up"
    await cancelled(lease)


async def test_a_state_change_wakes_only_calls_that_can_proceed(group, monkeypatch):
    """100 prompts wait for slots; each commit and each drop concerns one of them at most."""
    attempts = []
    attempt = AsyncBuffer._attempt
    monkeypatch.setattr(
        AsyncBuffer, "_attempt", lambda self, key, call: attempts.append(key) or attempt(self, key, call)
    )
    buffer = await filled(*"abcd", groups_per_step=4)
    waits = await blocked(*(call(f"{n}") for call in (buffer.admit, buffer.reclaim) for n in range(100)))
    (lease,) = await blocked(buffer.lease(1, 0))
    attempts.clear()
    for uid in "abc":
        await buffer.commit(group(uid))
    await settle()
    assert attempts == []
    await buffer.drop("d", "failed")
    await settle()
    assert attempts == [("admit", "0")]
    attempts.clear()
    await buffer.commit(group("0"))
    assert [g.uid for g in await lease] == ["a", "b", "c", "0"] and attempts == [("lease", 1)]
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


@pytest.mark.parametrize("second", ["b", "c"])
async def test_a_waiter_cancelled_during_wakeup_passes_the_wakeup_to_the_next(group, second):
    buffer = await filled("a")
    first, next_one = await blocked(buffer.admit("b"), buffer.admit(second))
    await buffer.drop("a", "failed")
    first.cancel()
    await next_one
    assert await pending(buffer) == [second]


async def test_duplicate_pending_calls_get_the_same_result(group):
    """The first was given up by its caller, or its answer was lost; nothing more can go on after it."""
    buffer = await filled("a")
    admits = await blocked(*(buffer.admit("b") for _ in range(2)))
    leases = await blocked(*(buffer.lease(1, 0) for _ in range(2)))
    await buffer.commit(group("a"))
    assert len({id(batch[0]) for batch in await asyncio.gather(*leases)}) == 1
    reclaims = await blocked(*(buffer.reclaim("somebody") for _ in range(2)))
    await buffer.ack(1)
    await buffer.publish(1)
    await asyncio.gather(*admits)
    assert not await buffer.commit(group("b", 0, 0)), "stale"
    assert await asyncio.gather(*reclaims) == ["b", "b"]


async def test_slots_freed_by_one_publication_go_to_as_many_pending_admits(group):
    buffer = await filled(*"abc", groups_per_step=3)
    waits = await blocked(*map(buffer.admit, "defgh"))
    await train(buffer, *map(group, "abc"))
    await buffer.publish(1)
    await asyncio.gather(*waits[:3])
    assert await pending(buffer) == ["d", "e", "f"] and not any(wait.done() for wait in waits[3:])
    for wait in waits[3:]:
        await cancelled(wait)


# The ledger's thread


class Gate:
    """Runs what the buffer hands to its threads, one by one, when the test says so."""

    def __init__(self):
        self.waiting, self.error = [], None

    async def __call__(self, call):
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        await turn
        if self.error is not None:
            raise self.error
        return call()

    async def open(self):
        await settle()
        (turn,), self.waiting = self.waiting, []
        turn.set_result(None)
        await settle()


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def gated(tmp_path, gate):
    made = AsyncBuffer(schedule(groups_per_step=2, max_staleness=1), ledger=tmp_path / "ledger.db", run=gate)
    yield made
    kill(made)


def rows(buffer):
    return dict(buffer._ledger._db.execute("SELECT uid, state FROM groups"))


async def test_answers_that_must_last_wait_for_their_record_and_share_a_transaction(gated, gate):
    await fill(gated, "a", "b", "c")
    assert rows(gated) == {} and not gate.waiting
    first, other = [asyncio.create_task(gated.drop(uid, "failed")) for uid in "ab"]
    await settle()
    late = asyncio.create_task(gated.unfinished(["a", "b", "c", "d"]))
    await settle()
    assert rows(gated) == {} and not any(task.done() for task in (first, other, late))
    await gate.open()
    assert rows(gated) == {"a": "dropped", "b": "dropped", "c": "generating"} and first.done() and other.done()
    assert not late.done(), "what it saw was not recorded when it was asked"
    await gate.open()
    assert late.result() == ["c"] and not gate.waiting


async def test_a_batch_is_leased_once_its_groups_are_recorded_and_a_step_needs_no_other_transaction(gated, gate, group):
    await fill(gated, "a", "b", "c")
    commits = [asyncio.create_task(gated.commit(group(uid))) for uid in "ab"]
    await settle()
    lease = asyncio.create_task(gated.lease(1, 0))
    await gate.open()
    assert all(task.result() for task in commits) and not lease.done()
    await gate.open()
    assert [load(leased).uid for leased in lease.result()] == ["a", "b"]
    await gated.ack(1)
    await gated.publish(1)
    assert set(rows(gated).values()) == {"leased", "generating"} and not gate.waiting
    late = asyncio.create_task(gated.drop("c", "failed"))
    await gate.open()
    assert late.result() and rows(gated) == {"a": "published", "b": "published", "c": "dropped"}


async def test_a_refused_group_takes_no_space_on_disk(gated, gate, group):
    await fill(gated, "a", "b")
    commits = [asyncio.create_task(gated.commit(each)) for each in (group("a", 0), group("b"), group("b"))]
    await gate.open()
    assert [task.result() for task in commits] == [False, True, True]
    (segment,) = segments_of(gated._ledger.path).iterdir()
    body = group("b").body
    assert segment.read_bytes() == bytes(len(group("a", 0).body)) + body


async def test_a_call_cancelled_while_it_is_recorded_has_made_its_change(gated, gate):
    await fill(gated, "a")
    waiting = asyncio.create_task(gated.drop("a", "failed"))
    await settle()
    await cancelled(waiting)
    await gate.open()
    assert rows(gated) == {"a": "dropped"}
    again = asyncio.create_task(gated.drop("a", "failed"))
    await gate.open()
    assert again.done() and not gate.waiting and (await gated.counts())["dropped"] == {"failed": 1}


async def test_after_a_failed_transaction_nothing_is_written_and_every_call_fails(gated, gate):
    await fill(gated, "a", "b")
    calls = [asyncio.create_task(gated.drop("a", "failed"))]
    await settle()
    calls += [asyncio.create_task(call) for call in (gated.unfinished(["b"]), gated.lease(1, 0), gated.reclaim())]
    gated._ledger._db.execute("PRAGMA query_only=1")
    await gate.open()
    gated._ledger._db.execute("PRAGMA query_only=0")
    await gate.open()
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, LedgerError) and "readonly" in str(error)
    assert rows(gated) == {} and gated._state.closed is not None
    for call in (gated.ack(1), gated.admit("c"), gated.publish(1)):
        with pytest.raises(LedgerError, match="readonly"):
            await call
    # A run can still end in order.
    await gated.close("the run failed")
    await gated.checkpointed(0, 0)
    assert await pending(gated) == ["b"]


async def test_the_error_of_a_call_that_was_cancelled_still_closes_the_buffer(gated, gate):
    await fill(gated, "a")
    waiting, lease = asyncio.create_task(gated.drop("a", "failed")), asyncio.create_task(gated.lease(1, 0))
    await settle()
    await cancelled(waiting)
    gate.error = LedgerError("the disk is gone")
    await gate.open()
    with pytest.raises(LedgerError, match="the disk is gone"):
        await lease


async def test_a_checkpoint_knows_nothing_that_is_not_on_disk(gated, gate):
    await fill(gated, "a")
    checkpoint = asyncio.create_task(gated.before_checkpoint(0))
    await settle()
    await fill(gated, "b")
    await gate.open()
    assert checkpoint.result()["pending"] == ["a"], "the other was admitted after the flush had begun"
    assert rows(gated) == {"a": "generating"}


async def test_a_broken_ledger_allows_checkpoints_only_of_steps_that_it_has(gated, gate, group):
    await fill(gated, *"abcd")
    commits = [asyncio.create_task(gated.commit(group(uid))) for uid in "abcd"]
    await gate.open()
    await asyncio.gather(*commits)
    await gated.lease(1, 0)
    await gated.ack(1)
    checkpoint = asyncio.create_task(gated.before_checkpoint(1))
    await gate.open()
    await checkpoint
    await gated.lease(2, 0)
    await gated.ack(2)
    gate.error = LedgerError("the disk is gone")
    closing = asyncio.create_task(gated.close("failed"))
    await gate.open()
    with pytest.raises(LedgerError, match="the disk is gone"):
        await closing
    await gated.before_checkpoint(1)
    with pytest.raises(LedgerError, match="the disk is gone"):
        await gated.before_checkpoint(2)


async def test_workers_may_only_commit_drop_and_keep_partial_responses():
    buffer = await filled("a")
    assert await buffer.of_worker("drop", "a", "failed")
    with pytest.raises(BufferStateError, match="must not call 'ack'"):
        await buffer.of_worker("ack", 1)


# What the display shows


async def test_waiting_reports_each_pending_call_its_blocker_and_its_duration():
    now = [100.0]
    buffer = AsyncBuffer(schedule(groups_per_step=1, max_staleness=0), clock=lambda: now[0])
    await fill(buffer, "a")
    waits = await blocked(buffer.admit("b"), buffer.lease(1, 0), buffer.reclaim())
    now[0] = 103.5
    waiting = await buffer.waiting()
    assert waiting["admit b"] == "a free slot: all 1 are taken (1 generating) (for 3.5 s)"
    assert waiting["lease 1"].startswith("1 finished groups: 0 ready, a is the oldest and generating for 3.5 s")
    assert waiting["reclaim"] == "a group to be generated again (for 3.5 s)"
    for wait in waits:
        await cancelled(wait)
    assert await buffer.waiting() == {}
