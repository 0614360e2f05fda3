"""What the state machine decides: admissions, batches, stale groups, repeated calls, rollbacks and failed steps."""

import dataclasses
import doctest

import pytest

import megasync.buffer.state
from megasync.buffer import BufferClosed, BufferStateError, TrajectoryBuffer
from megasync.buffer.payload import encode, encode_partial
from megasync.buffer.segments import load
from megasync.buffer.state import FailedStep
from megasync.config.pacing import Pacing
from megasync.trajectory import Group, Partial


def buffer_of(groups_per_step=2, max_staleness=1, window=None, **options):
    pacing_options = {"weight_sync_steps": options.pop("weight_sync_steps", 1), "window_fraction": window}
    return TrajectoryBuffer(Pacing(groups_per_step, max_staleness, **pacing_options), **options)


def admit(buffer, *uids):
    return [buffer.admit(uid) for uid in uids]


def train(buffer, step, version):
    uids = [g.uid for g in buffer.lease(step, version)]
    buffer.ack(step)
    return uids


def balanced(buffer):
    counts = buffer.counts()
    return counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["live"]


def test_the_docstring_example_passes_as_a_doctest():
    assert doctest.testmod(megasync.buffer.state, extraglobs=vars(megasync.buffer)).failed == 0


# Slots


def test_admission_stops_at_capacity_and_a_drop_frees_a_slot(group):
    buffer = buffer_of()
    assert admit(buffer, *"abcde") == [True] * 4 + [False]
    buffer.drop("b", "failed")
    assert admit(buffer, "e", "f") == [True, False]
    assert buffer.counts()["dropped"] == {"failed": 1} and balanced(buffer)


def test_a_trained_group_holds_its_slot_until_its_weights_are_published(group):
    buffer = buffer_of(max_staleness=0)
    admit(buffer, *"ab")
    for uid in "ab":
        buffer.commit(group(uid))
    train(buffer, 1, 0)
    counts = buffer.counts()
    assert counts["trained"] == 2 and counts["live"] == 0 and counts["slots"]["unpublished"] == 2 and balanced(buffer)
    assert admit(buffer, "c") == [False]
    buffer.publish(1)
    assert admit(buffer, "c") == [True]


def test_capacity_scales_with_weight_sync_steps(group):
    buffer = buffer_of(max_staleness=0, weight_sync_steps=2)
    admit(buffer, *"abcd")
    for uid in "abcd":
        buffer.commit(group(uid))
    assert [train(buffer, 1, 0), train(buffer, 2, 0)] == [["a", "b"], ["c", "d"]]
    assert "4 unpublished" in buffer.admission_blocker()


def test_a_run_admits_no_more_groups_than_it_will_train(group):
    buffer = buffer_of(total_groups=2)
    assert admit(buffer, *"abc") == [True, True, False]
    assert "all that the run needs" in buffer.admission_blocker()
    buffer.drop("a", "uniform")
    assert admit(buffer, "c", "d") == [True, False]


# Batches


def test_a_batch_holds_the_oldest_finished_groups_in_admission_order(group):
    buffer = buffer_of(groups_per_step=2, max_staleness=2, window=1.0)
    admit(buffer, *"abcdef")
    for uid in "fbead":
        buffer.commit(group(uid))
    assert train(buffer, 1, 0) == ["a", "b"]
    assert train(buffer, 2, 0) == ["d", "e"]


def test_synchronous_batches_do_not_depend_on_completion_order(group):
    for order in ("abcd", "dcba", "bdac"):
        buffer = buffer_of(max_staleness=0, weight_sync_steps=2, window=1.0)
        admit(buffer, *"abcd")
        steps = []
        for uid in order:
            buffer.commit(group(uid))
            if buffer.lease_blocker() is None:
                steps.append(train(buffer, len(steps) + 1, 0))
        while buffer.lease_blocker() is None:
            steps.append(train(buffer, len(steps) + 1, 0))
        assert steps == [["a", "b"], ["c", "d"]]


def test_strict_fifo_waits_for_the_straggler(group):
    buffer = buffer_of(groups_per_step=1, max_staleness=3, window=None)
    admit(buffer, *"abcd")
    for uid in "bcd":
        buffer.commit(group(uid))
    assert buffer.lease(1, 0) is None
    buffer.commit(group("a"))
    assert train(buffer, 1, 0) == ["a"]


@pytest.mark.parametrize("returned", [False, True])
def test_the_window_bounds_how_many_groups_overtake_a_straggler(group, returned):
    buffer = buffer_of(groups_per_step=1, max_staleness=3, window=0.75, stale="regenerate", version=9)
    admit(buffer, *"abcd")
    if returned:
        assert not buffer.commit(group("a", 0, 0))
    for uid in "bcd":
        buffer.commit(group(uid, 9, 9))
    assert [train(buffer, 1, 9), train(buffer, 2, 9)] == [["b"], ["c"]]
    assert buffer.lease(3, 9) is None
    buffer.publish(10)
    assert buffer.lease(3, 10) is None  # published groups still count in the window
    assert "1 more behind the window of 3" in buffer.lease_blocker()
    buffer.commit(group("a", 9, 9))
    assert [train(buffer, 3, 10), train(buffer, 4, 10)] == [["a"], ["d"]]


def test_a_window_smaller_than_a_batch_still_allows_a_full_batch(group):
    buffer = buffer_of(groups_per_step=4, max_staleness=1, window=0.01)
    admit(buffer, *"abcdefgh")
    for uid in "hgfedcba":
        assert buffer.lease(1, 0) is None
        buffer.commit(group(uid))
    assert [train(buffer, 1, 0), train(buffer, 2, 0)] == [list("abcd"), list("efgh")]


def test_repeating_a_lease_for_the_same_step_returns_the_same_batch(group):
    buffer = buffer_of()
    admit(buffer, *"abcd")
    for uid in "bcd":
        buffer.commit(group(uid))
    buffer.drop("a", "failed")
    first = buffer.lease(1, 0)
    admit(buffer, "e")
    buffer.commit(group("e"))
    assert buffer.lease(1, 0) == first
    buffer.publish(1)
    assert buffer.lease(1, 1) == first
    assert buffer.counts()["slots"]["leased"] == 2


def test_repeating_a_lease_at_a_newer_version_rechecks_staleness(group):
    buffer = buffer_of(groups_per_step=1, max_staleness=0)
    admit(buffer, "a")
    buffer.commit(group("a", 0, 0))
    buffer.lease(1, 0)
    buffer.publish(1)
    assert buffer.lease(1, 1) is None and buffer.reclaimable() == ["a"]


# Groups


def test_a_group_with_fewer_than_two_valid_trajectories_is_dropped_and_frees_its_slot(trajectory):
    buffer = buffer_of()
    admit(buffer, *"abcd")
    assert not buffer.commit(encode(Group("a", [])))
    assert not buffer.commit(encode(Group("b", [trajectory([0]), trajectory([0], reward=None)])))
    assert not buffer.commit(encode(Group("c", [trajectory([0, 0], mask=[0, 0]), trajectory([])])))
    counts = buffer.counts()
    assert counts["dropped"] == {"no_survivor": 2, "lone_survivor": 1}
    assert counts["removed_trajectories"] == 3 and counts["slots"]["finished"] == 0 and balanced(buffer)
    assert admit(buffer, *"efgh") == [True, True, True, False]


def test_invalid_trajectories_are_removed_from_a_committed_group(trajectory):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, "a")
    kept = [trajectory([0]), trajectory([0, 0])]
    assert buffer.commit(encode(Group("a", [kept[0], trajectory([0], reward=None), kept[1]])))
    (leased,) = buffer.lease(1, 0)
    assert load(leased) == Group("a", kept)


def test_a_commit_after_a_drop_is_ignored(group):
    buffer = buffer_of()
    admit(buffer, "a")
    assert buffer.drop("a", "cancelled")
    before = buffer.counts()
    assert not buffer.commit(group("a")) and not buffer.drop("a", "again")
    assert buffer.counts() == before


# Stale groups


def stale_buffer(policy, *groups):
    """A synchronous buffer at version 1 to which groups with tokens of version 0 are committed."""
    buffer = buffer_of(groups_per_step=len(groups), max_staleness=0, stale=policy, version=1)
    for g in groups:
        buffer.admit(g.uid)
    accepted = [buffer.commit(g) for g in groups]
    return buffer, accepted


def test_regenerate_policy_returns_a_stale_group_and_keeps_its_slot_and_position(group):
    buffer, accepted = stale_buffer("regenerate", group("a", 0, 1), group("b", 1, 1))
    assert accepted == [False, True] and buffer.reclaimable() == ["a"] == buffer.live_uids()[:1]
    assert not buffer.admit("c") and buffer.lease(1, 1) is None
    assert buffer.reclaim() == "a" and buffer.reclaim() is None
    buffer.commit(group("a", 1, 1))
    assert train(buffer, 1, 1) == ["a", "b"]
    assert buffer.counts()["regenerated"] == 1 and balanced(buffer)


def test_drop_policy_counts_a_stale_group_and_frees_its_slot(group):
    buffer, accepted = stale_buffer("drop", group("a", 0, 1))
    assert accepted == [False] and buffer.counts()["dropped"] == {"stale": 1} and balanced(buffer)
    assert buffer.admit("b")


def test_mask_policy_excludes_stale_tokens_from_the_loss(trajectory):
    old = Group("a", [trajectory([0, 1, 1]), trajectory([1, 1]), trajectory([0, 0])])
    buffer, accepted = stale_buffer("mask", encode(old))
    (leased,) = buffer.lease(1, 1)
    assert accepted == [True]
    assert [list(t.loss_mask) for t in load(leased).trajectories] == [[0, 1, 1], [1, 1]]
    assert load(leased).trajectories[0].versions == [0, 1, 1] and old.trajectories[0].loss_mask == [1, 1, 1]
    counts = buffer.counts()
    assert counts["masked_tokens"] == 3 and counts["removed_trajectories"] == 1


@pytest.mark.parametrize("versions, reason", [([[0], [0]], "no_survivor"), ([[0], [1]], "lone_survivor")])
def test_a_group_left_with_fewer_than_two_trajectories_by_masking_is_dropped(trajectory, versions, reason):
    buffer, accepted = stale_buffer("mask", encode(Group("a", [trajectory(v) for v in versions])))
    assert accepted == [False] and buffer.counts()["dropped"] == {reason: 1} and balanced(buffer)


@pytest.mark.parametrize("least, samples, kept", [(2, [0, 0], False), (2, [0, 1], True), (1, [0, 0], True)])
def test_survivors_are_counted_by_samples(trajectory, least, samples, kept):
    """Two trajectories of one sample cannot be compared; an estimator that compares none takes them."""
    buffer = buffer_of()
    admit(buffer, "a")
    members = [dataclasses.replace(trajectory([0]), sample=number) for number in samples]
    assert buffer.commit(encode(Group("a", members, least=least))) == kept
    assert buffer.counts()["dropped"] == ({} if kept else {"lone_survivor": 1}) and balanced(buffer)


def test_masking_counts_the_samples_that_are_left(trajectory):
    numbered = [([0], 0), ([1], 1), ([1], 1)]
    members = [dataclasses.replace(trajectory(versions), sample=number) for versions, number in numbered]
    for least, accepted in ((2, [False]), (1, [True])):
        assert stale_buffer("mask", encode(Group("a", members, least=least)))[1] == accepted


def test_tokens_outside_the_loss_mask_do_not_count_for_staleness(trajectory):
    two = [trajectory([0, 1], mask=[0, 1]) for _ in range(2)]
    _, accepted = stale_buffer("drop", encode(Group("a", two)))
    assert accepted == [True]


@pytest.mark.parametrize("policy", ["mask", "regenerate", "drop"])
def test_publication_applies_the_stale_policy_to_waiting_finished_groups(group, policy):
    buffer = buffer_of(groups_per_step=2, max_staleness=0, stale=policy)
    admit(buffer, *"ab")
    assert buffer.commit(group("a", 0, 0))
    buffer.publish(1)
    counts = buffer.counts()
    assert counts["slots"]["finished"] == 0 and balanced(buffer)
    assert counts["slots"]["returned"] == (policy == "regenerate")


def test_the_staleness_bound_is_tight(group):
    """One group a step, two slots, a window of two: the straggler `f` is passed once more than FIFO would allow."""
    pacing = Pacing(groups_per_step=1, max_staleness=1, window_fraction=1.0)
    buffer = TrajectoryBuffer(pacing)
    for uid in ("a", "f"):
        buffer.admit(uid)
    buffer.commit(group("a", 0, 0))
    for step, admitted in ((1, "b"), (2, "c")):
        buffer.lease(step, step - 1)
        buffer.ack(step)
        buffer.publish(step)
        buffer.admit(admitted)
        buffer.commit(group(admitted, step, step))
    assert buffer.lease(3, 2) is None  # c is the second to overtake f, outside of the window of two
    buffer.commit(group("f", 0, 0))
    (leased,) = buffer.lease(3, 2)
    assert leased.uid == "f" and 2 - leased.header.oldest_version == pacing.staleness_bound == 2


# The end


def test_a_closed_buffer_raises_its_first_reason_and_rejects_late_commits(group):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, *"ab")
    buffer.commit(group("a"))
    buffer.lease(1, 0)
    buffer.close("Ctrl-C")
    buffer.close("something later")
    for call in (lambda: buffer.admit("c"), lambda: buffer.lease(1, 0), buffer.reclaim):
        with pytest.raises(BufferClosed, match="^Ctrl-C$"):
            call()
    assert not buffer.commit(group("b")) and not buffer.drop("b", "cancelled")
    assert buffer.live_uids() == ["a", "b"]
    buffer.ack(1)
    buffer.publish(1)
    assert buffer.live_uids() == ["b"] and balanced(buffer)


def test_a_resumed_run_continues_its_counters_and_readmits_live_groups(group):
    buffer = buffer_of(total_groups=8)
    admit(buffer, *"abcd")
    for uid in "bc":
        buffer.commit(group(uid))
    buffer.drop("a", "failed")
    train(buffer, 1, 0)
    admit(buffer, "e")
    saved, pending = buffer.counters(), buffer.live_uids()
    assert pending == ["d", "e"]

    resumed = buffer_of(total_groups=8, version=1, counters=saved)
    assert admit(resumed, *pending, *"fghi") == [True] * 4 + [False] * 2
    counts = resumed.counts()
    assert (counts["admitted"], counts["trained"], counts["dropped"]) == (7, 2, {"failed": 1}) and balanced(resumed)


def test_lease_blocker_reports_the_oldest_group_and_its_generation_time(group):
    now = [10.0]
    buffer = buffer_of(clock=lambda: now[0])
    admit(buffer, *"ab")
    now[0] = 12.5
    assert "a is the oldest and generating for 2.5 s" in buffer.lease_blocker()


@pytest.mark.parametrize("reclaim", [False, True])
def test_a_regenerated_group_restarts_its_timer(group, reclaim):
    now = [10.0]
    buffer = buffer_of(max_staleness=0, version=1, clock=lambda: now[0])
    admit(buffer, "a")
    now[0] = 20.0
    buffer.commit(group("a", 0, 0))
    if reclaim:
        now[0] = 30.0
        buffer.reclaim()
    now[0] += 1.5
    assert f"a is the oldest and {'generating' if reclaim else 'returned'} for 1.5 s" in buffer.lease_blocker()


def step(buffer, number, *groups):
    """Trains a step on these and publishes it."""
    admit(buffer, *(group.uid for group in groups))
    for group in groups:
        buffer.commit(group)
    uids = [group.uid for group in buffer.lease(number, buffer.version)]
    buffer.ack(number)
    buffer.publish(buffer.version + 1)
    return uids


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


# Steps that raise an error


@pytest.fixture
def filled(group):
    """``filled(n)``: a buffer with so many finished groups, 0:0 and so on."""

    def fill(groups=4):
        buffer = buffer_of(max_staleness=3, window=1.0)
        for number in range(groups):
            assert buffer.admit(f"0:{number}") and buffer.commit(group(f"0:{number}"))
        return buffer

    return fill


def fail(buffer, step, attempts=2, most=1):
    assert buffer.lease(step, buffer.version) is not None
    return buffer.step_failed(step, attempts, most)


def test_a_failed_batch_is_retried_until_its_attempts_are_exhausted(filled):
    buffer = filled()
    assert fail(buffer, 1) == FailedStep(1, 1, [], 0)
    assert buffer.counts()["slots"]["finished"] == 4
    assert fail(buffer, 1) == FailedStep(1, 2, ["0:0", "0:1"], 1)
    assert buffer.counts()["dropped"] == {"failed_step": 2}
    assert [group.uid for group in buffer.lease(1, 0)] == ["0:2", "0:3"]


def test_only_the_group_that_exhausts_its_attempts_is_dropped(filled, group):
    buffer = filled(2)
    fail(buffer, 1)
    buffer.drop("0:0", "workflow")
    assert buffer.admit("0:2") and buffer.commit(group("0:2"))
    assert fail(buffer, 1).set_aside == ["0:1"]
    assert buffer.live_uids() == ["0:2"]


def test_reporting_a_step_failure_twice_is_idempotent(filled):
    buffer = filled()
    first = fail(buffer, 1)
    assert buffer.step_failed(1, 2, 1) == first
    assert fail(buffer, 1).attempt == 2


def test_consecutive_batch_drops_are_limited_until_the_failed_step_is_trained(filled):
    buffer = filled(6)
    fail(buffer, 1, attempts=1)
    assert fail(buffer, 1, attempts=1) == FailedStep(1, 1, [], 1)
    assert buffer.counts()["dropped"] == {"failed_step": 2}
    buffer.lease(1, 0)
    buffer.ack(1)
    assert fail(buffer, 2, attempts=1).in_a_row == 1


def test_retraining_steps_after_a_rollback_does_not_reset_the_drop_limit(filled, group):
    buffer = filled(8)
    buffer.lease(1, 0)
    buffer.ack(1)
    fail(buffer, 2, attempts=1)
    buffer.rollback(0, 0)
    for uid in ("0:0", "0:1"):
        assert buffer.reclaim() == uid
        buffer.commit(group(uid))
    buffer.lease(1, 0)
    buffer.ack(1)
    assert fail(buffer, 2, attempts=1).set_aside == []


def test_failed_attempts_are_cleared_once_the_groups_are_trained(filled):
    buffer = filled()
    fail(buffer, 1)
    buffer.lease(1, 0)
    buffer.ack(1)
    assert buffer.status.failed_attempts == {}


# What must not be done


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.lease(2, 3), "step 2 asks for a batch, but step 2 is trained already"),
        (lambda b: b.lease(3, 4), "step 3 asks for a batch at version 4, but 3 is published"),
        (lambda b: b.ack(3), "step 3 cannot be acknowledged.*no step has one"),
        (lambda b: b.step_failed(3, 2, 1), "step 3 cannot have failed: it has no batch"),
        (lambda b: b.publish(2), "version 2 cannot be published after version 3"),
        (lambda b: b.drop("b", "why"), "group b cannot be dropped: it is trained"),
        (lambda b: b.drop("z", "why"), "it is unknown"),
        (lambda b: b.commit(encode(Group("z", []))), "group z cannot be committed: it is unknown"),
        (lambda b: b.admit("b"), "group b was admitted before and is trained"),
        (lambda b: b.admit("c"), "group c was admitted before and is finished"),
        (lambda b: b.admit("e"), r"group e was admitted before and is dropped \(failed\)"),
        (lambda b: b.rollback(3, 3), "of step 3, but the buffer knows of no step after 2"),
        (lambda b: b.rollback(0, 3), "step 0 is older than the oldest checkpoint that was kept, of step 1"),
        (lambda b: b.checkpointed(3, 1), "does not fit the last trained step, 2"),
        (lambda b: b.checkpointed(1, 2), "does not fit the last trained step, 2"),
    ],
)
def test_a_call_out_of_order_raises_and_changes_nothing(group, call, message):
    """Steps 1 and 2 have trained a and b, version 3 is published, c and d are finished, e was dropped."""
    buffer = buffer_of(groups_per_step=1, max_staleness=3)
    step(buffer, 1, group("a"))
    step(buffer, 2, group("b"))
    buffer.publish(3)
    admit(buffer, *"cde")
    for uid in "cd":
        buffer.commit(group(uid, 3, 3))
    buffer.drop("e", "failed")
    buffer.checkpointed(2, 1)
    before = buffer.counts()
    with pytest.raises(BufferStateError, match=message):
        call(buffer)
    assert buffer.counts() == before


def test_a_leased_batch_ends_before_another_step_begins(group):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, "a")
    buffer.commit(group("a"))
    buffer.lease(1, 0)
    for call, message in (
        (lambda: buffer.lease(2, 0), "step 2 asks for a batch while step 1 has one"),
        (lambda: buffer.ack(2), "step 2 cannot be acknowledged.*step 1 has one"),
        (lambda: buffer.drop("a", "why"), "group a cannot be dropped: it is leased"),
    ):
        with pytest.raises(BufferStateError, match=message):
            call()
    # A rollback returns it, unless the checkpoint contains its step.
    buffer.rollback(0, 0)
    assert buffer.counts()["slots"]["finished"] == 1
    buffer.lease(1, 0)
    buffer.rollback(1, 0)
    assert buffer.counts()["trained"] == 1 and balanced(buffer)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stale": "keep"}, "stale='keep'"), ({"total_groups": 3}, "total_groups=3.*groups_per_step=2")],
)
def test_options_that_no_run_has_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        buffer_of(**options)
