import dataclasses
import doctest

import pytest

import megasync.buffer.state
from megasync.buffer import BufferClosed, BufferStateError, TrajectoryBuffer
from megasync.buffer.payload import encode
from megasync.buffer.segments import load
from megasync.config.pacing import Pacing
from megasync.trajectory import Group


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


def test_total_groups_must_be_a_multiple_of_groups_per_step():
    with pytest.raises(ValueError, match="total_groups=3.*groups_per_step=2"):
        buffer_of(total_groups=3)


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


def test_the_window_bounds_how_many_groups_overtake_a_straggler(group):
    buffer = buffer_of(groups_per_step=1, max_staleness=3, window=0.75)
    admit(buffer, *"abcd")
    for uid in "bcd":
        buffer.commit(group(uid))
    assert [train(buffer, 1, 0), train(buffer, 2, 0)] == [["b"], ["c"]]
    assert buffer.lease(3, 0) is None
    buffer.publish(1)
    assert buffer.lease(3, 1) is None  # published groups still count in the window
    assert "1 more behind the window of 3" in buffer.lease_blocker()
    buffer.commit(group("a"))
    assert [train(buffer, 3, 1), train(buffer, 4, 1)] == [["a"], ["d"]]


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


@pytest.mark.parametrize("step", [0, 1])
def test_leasing_a_step_that_is_already_trained_is_rejected(group, step):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, "a")
    buffer.commit(group("a"))
    train(buffer, 1, 0)
    with pytest.raises(BufferStateError, match="step 1 is trained already"):
        buffer.lease(step, 0)


def test_only_one_batch_can_be_leased_at_a_time(group):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, "a")
    buffer.commit(group("a"))
    buffer.lease(1, 0)
    with pytest.raises(BufferStateError, match="step 2 asks for a batch while step 1 has one"):
        buffer.lease(2, 0)


def test_a_lease_at_an_unpublished_version_is_rejected(group):
    with pytest.raises(BufferStateError, match="at version 1, but 0 is published"):
        buffer_of().lease(1, 1)


def test_ack_of_a_step_without_a_leased_batch_is_rejected(group):
    buffer = buffer_of(groups_per_step=1)
    with pytest.raises(BufferStateError, match="step 1 cannot be acknowledged.*no step has one"):
        buffer.ack(1)
    admit(buffer, "a")
    buffer.commit(group("a"))
    buffer.lease(1, 0)
    with pytest.raises(BufferStateError, match="step 2 cannot be acknowledged.*step 1 has one"):
        buffer.ack(2)
    buffer.ack(1)


def test_publishing_an_older_version_is_rejected():
    with pytest.raises(BufferStateError, match="version 2 cannot be published after version 3"):
        buffer_of(version=3).publish(2)


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


def test_committing_a_group_that_was_never_admitted_raises(group):
    with pytest.raises(BufferStateError, match="group a cannot be committed: it is unknown"):
        buffer_of().commit(group("a"))


def test_a_commit_after_a_drop_is_ignored(group):
    buffer = buffer_of()
    admit(buffer, "a")
    assert buffer.drop("a", "cancelled")
    before = buffer.counts()
    assert not buffer.commit(group("a")) and not buffer.drop("a", "again")
    assert buffer.counts() == before


def test_dropping_a_leased_trained_or_unknown_group_raises(group):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, "a")
    buffer.commit(group("a"))
    buffer.lease(1, 0)
    with pytest.raises(BufferStateError, match="group a cannot be dropped: it is leased"):
        buffer.drop("a", "why")
    buffer.ack(1)
    with pytest.raises(BufferStateError, match="it is trained"):
        buffer.drop("a", "why")
    with pytest.raises(BufferStateError, match="it is unknown"):
        buffer.drop("z", "why")


@pytest.mark.parametrize("ending", ["finished", "dropped", "trained"])
def test_a_uid_cannot_be_admitted_twice(group, ending):
    buffer = buffer_of(groups_per_step=1)
    admit(buffer, "a")
    if ending == "dropped":
        buffer.drop("a", "why")
    else:
        buffer.commit(group("a"))
    if ending == "trained":
        train(buffer, 1, 0)
        buffer.publish(1)
    with pytest.raises(BufferStateError, match="group a was admitted before"):
        buffer.admit("a")


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


def test_an_unknown_stale_policy_is_rejected():
    with pytest.raises(ValueError, match="stale='keep'"):
        buffer_of(stale="keep")


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
