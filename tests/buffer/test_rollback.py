"""Calls that are made again, and training that goes back to a checkpoint: on the state machine alone."""

import pytest

from megasync.buffer import BufferStateError, TrajectoryBuffer
from megasync.buffer.payload import encode, encode_partial
from megasync.config.pacing import Pacing
from megasync.trajectory import Group, Partial


def buffer_of(groups_per_step=2, max_staleness=1, window=None, **options):
    return TrajectoryBuffer(Pacing(groups_per_step, max_staleness, window_fraction=window), **options)


def admit(buffer, *uids):
    return [buffer.admit(uid) for uid in uids]


def step(buffer, number, *groups):
    """Trains a step on these and publishes it."""
    admit(buffer, *(group.uid for group in groups))
    for group in groups:
        buffer.commit(group)
    uids = [group.uid for group in buffer.lease(number, buffer.version)]
    buffer.ack(number)
    buffer.publish(buffer.version + 1)
    return uids


def balanced(buffer):
    counts = buffer.counts()
    return counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["live"]


# Again


@pytest.mark.parametrize("returned", [False, True])
def test_readmitting_an_unfinished_group_takes_no_additional_slot(group, returned):
    buffer = buffer_of(max_staleness=0, version=1)
    admit(buffer, "a")
    if returned:
        buffer.commit(group("a", 0, 0))
    before = buffer.counts()
    assert buffer.admit("a") and buffer.counts() == before


@pytest.mark.parametrize("state", ["finished", "leased", "trained", "published"])
def test_committing_a_group_again_is_idempotent(group, state):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, "a")
    buffer.commit(group("a"))
    if state != "finished":
        buffer.lease(1, 0)
    if state in ("trained", "published"):
        buffer.ack(1)
    if state == "published":
        buffer.publish(1)
    before = buffer.counts()
    assert buffer.commit(group("a")) and buffer.commit(encode(Group("a", []))) and buffer.counts() == before


def test_a_returned_group_accepts_only_responses_within_the_staleness_bound(group, trajectory):
    buffer = buffer_of(max_staleness=0, version=1)
    admit(buffer, "a")
    assert not buffer.commit(group("a", 0, 0))
    before = buffer.counts()
    assert not buffer.commit(group("a", 0, 0)) and not buffer.commit(encode(Group("a", [trajectory([1])])))
    assert buffer.counts() == before
    assert buffer.commit(group("a", 1, 1)) and buffer.reclaimable() == []


def test_reclaim_returns_the_same_group_to_its_claimant_and_the_next_to_others(group):
    buffer = buffer_of(max_staleness=0, version=1)
    admit(buffer, "a", "b")
    for uid in "ab":
        buffer.commit(group(uid, 0, 0))
    assert [buffer.reclaim(name) for name in ("x", "x", "y", "x", "z")] == ["a", "a", "b", "a", None]
    buffer.commit(group("a", 1, 1))
    assert buffer.reclaim("x") is None


def test_repeated_ack_and_publish_are_idempotent(group):
    buffer = buffer_of()
    step(buffer, 1, group("a"), group("b"))
    before = buffer.counts()
    buffer.ack(1)
    buffer.publish(1)
    assert buffer.counts() == before


# Partial responses


def partial(*versions):
    return encode_partial(Partial("digest", [5] * len(versions), [-0.5] * len(versions), list(versions)))


def test_partials_are_kept_until_their_group_is_committed_or_dropped(group):
    buffer = buffer_of()
    admit(buffer, "a", "b")
    first, second, longer = partial(0), partial(0, 0), partial(0, 0, 0)
    buffer.save_partials({("a", 0, 0): first, ("b", 1, 2): second, ("nobody", 0, 0): first})
    buffer.save_partials({("a", 0, 0): longer})
    assert buffer.partials("a") == {(0, 0): longer.data} and buffer.partials("b") == {(1, 2): second.data}
    buffer.commit(group("a"))
    buffer.drop("b", "failed")
    buffer.save_partials({("a", 0, 0): first, ("b", 0, 0): first})
    assert buffer.partials("a") == buffer.partials("b") == buffer.partials("nobody") == {}


def test_take_over_returns_unfinished_groups_with_their_partials(group):
    buffer = buffer_of()
    admit(buffer, "a", "b")
    buffer.save_partials({("a", 0, 0): partial(0)})
    buffer.commit(group("b"))
    buffer.close("killed")
    buffer.take_over()
    assert buffer.closed is None and buffer.reclaimable() == ["a"] and buffer.partials("a") == {(0, 0): partial(0).data}
    assert buffer.live_uids() == ["a", "b"] and balanced(buffer)


# Back to a checkpoint


def test_groups_trained_after_the_checkpoint_are_retrained_in_the_same_order(group):
    buffer = buffer_of(max_staleness=2)
    groups = {uid: group(uid) for uid in "abcdef"}
    step(buffer, 1, groups["a"], groups["b"])
    step(buffer, 2, groups["c"], groups["d"])
    admit(buffer, "e", "f")
    buffer.commit(groups["f"])
    assert buffer.trained_after(1) == ["c", "d"]
    buffer.rollback(1, 2, groups)
    assert buffer.counts()["trained"] == 2 and balanced(buffer) and buffer.version == 2
    assert buffer.live_uids() == list("cdef")
    with pytest.raises(BufferStateError, match="version 1 cannot be published after version 2"):
        buffer.publish(1)
    assert [g.uid for g in buffer.lease(2, 2)] == ["c", "d"]
    buffer.ack(2)
    assert buffer.counts()["trained"] == 4 and balanced(buffer)


def test_rollback_returns_a_leased_batch_unless_the_checkpoint_contains_it(group):
    for checkpoint, trained in ((0, 0), (1, 2)):
        buffer = buffer_of()
        admit(buffer, "a", "b")
        for uid in "ab":
            buffer.commit(group(uid))
        buffer.lease(1, 0)
        buffer.rollback(checkpoint, 0)
        counts = buffer.counts()
        assert (counts["trained"], counts["slots"]["finished"]) == (trained, 2 - trained) and balanced(buffer)


def test_rollback_regenerates_a_trained_group_whose_payload_was_pruned(group):
    buffer = buffer_of(max_staleness=2)
    step(buffer, 1, group("a"), group("b"))
    admit(buffer, "c")
    buffer.rollback(0, 1, {"b": group("b")})
    assert buffer.reclaimable() == ["a"] and buffer.live_uids() == ["a", "b", "c"] and balanced(buffer)
    assert buffer.reclaim() == "a"
    buffer.commit(group("a", 1, 1))
    assert [g.uid for g in buffer.lease(1, 1)] == ["a", "b"]


def test_the_stale_policy_applies_to_groups_restored_by_a_rollback(group):
    buffer = buffer_of(max_staleness=0, stale="drop")
    step(buffer, 1, group("a"), group("b"))
    buffer.rollback(0, 1, {uid: group(uid) for uid in "ab"})
    assert buffer.counts()["dropped"] == {"stale": 2} and balanced(buffer)


def test_admission_is_blocked_while_a_rollback_exceeds_the_capacity(group):
    buffer = buffer_of(groups_per_step=1, max_staleness=1)
    step(buffer, 1, group("a"))
    admit(buffer, "b", "c")
    buffer.rollback(0, 1, {"a": group("a")})
    assert "all 2 are taken (2 generating, 1 finished)" in buffer.admission_blocker()
    buffer.lease(1, 1)
    buffer.ack(1)
    buffer.publish(2)
    buffer.drop("b", "failed")
    assert buffer.admit("d")


def test_rollback_is_idempotent_and_keeps_a_closed_buffer_closed(group):
    buffer = buffer_of(max_staleness=2)
    step(buffer, 1, group("a"), group("b"))
    buffer.close("over")
    for _ in range(2):
        buffer.rollback(0, 1, {uid: group(uid) for uid in "ab"})
        assert buffer.closed == "over" and buffer.counts()["slots"]["finished"] == 2 and balanced(buffer)


def test_rollback_and_checkpointed_reject_invalid_steps(group):
    buffer = buffer_of(max_staleness=2)
    for number, uids in enumerate(("ab", "cd", "ef"), 1):
        step(buffer, number, *(group(uid, number - 1, number - 1) for uid in uids))
    with pytest.raises(BufferStateError, match="of step 4, but the buffer knows of no step after 3"):
        buffer.rollback(4, 3)
    for wrong in ((4, 1), (1, 2)):
        with pytest.raises(BufferStateError, match="does not fit the last trained step, 3"):
            buffer.checkpointed(*wrong)
    buffer.checkpointed(3, 2)
    with pytest.raises(BufferStateError, match="step 1 is older than the oldest checkpoint that was kept, of step 2"):
        buffer.rollback(1, 3)
    buffer.rollback(2, 3)
    assert buffer.reclaimable() == ["e", "f"] and buffer.counts()["trained"] == 4 and balanced(buffer)
