"""The rollout loops: every admitted prompt is accounted for, everything is bounded, and stop works anywhere."""

import asyncio
import logging
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from responses import grow

from megasync.buffer.payload import decode_partial
from megasync.errors import DataError, ServerError
from megasync.rollout.inflight import InflightCap
from megasync.trajectory import Trajectory

PATIENCE = 20  # seconds; a hang is a failure, not a long test


async def finish(bench):
    await asyncio.wait_for(bench.rollouter.run(), PATIENCE)


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@settings(max_examples=40)
@given(
    size=st.integers(1, 7),
    total=st.integers(1, 25),
    samples=st.integers(2, 4),
    capacity=st.integers(1, 9),
    inflight=st.none() | st.integers(1, 5),
)
async def test_dispatched_equals_total_for_every_dataset_size_and_total(
    make_bench, size, total, samples, capacity, inflight
):
    bench = make_bench(size=size, total=total, samples=samples, capacity=capacity, inflight=inflight)
    await finish(bench)
    assert bench.buffer.admitted == len(bench.buffer.committed) == total
    assert len(bench.client.calls) == total * samples
    assert sorted(bench.buffer.committed) == sorted(f"{n // size}:{n % size}" for n in range(total))
    assert bench.client.most_running <= min(capacity, inflight or capacity, total) * samples
    assert bench.rollouter.finished_groups == total


async def test_groups_hold_all_scored_samples(make_bench):
    bench = make_bench(total=3, samples=4)
    await finish(bench)
    assert all(
        [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 3.0] for group in bench.buffer.committed.values()
    )


async def test_nothing_is_started_before_the_buffer_admits_it(make_bench):
    bench = make_bench(capacity=3, samples=2, behave=lambda ids, options: asyncio.sleep(600))
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: len(bench.client.calls) == 6)
    await asyncio.sleep(0.02)
    assert len(bench.client.calls) == 6
    assert len(bench.buffer.live) == 3
    assert bench.source.unconfirmed == ["0:3"]  # drawn, not admitted: still the source's
    assert bench.rollouter.metrics()["rollout/inflight_requests"] == 6.0
    bench.rollouter.stop()
    await run


async def test_stale_groups_are_generated_again_under_their_own_uid(make_bench):
    bench = make_bench(capacity=2, behave=lambda ids, options: "x")
    bench.buffer.live.append("7:1")  # admitted by an earlier life of the buffer
    bench.buffer.again.put_nowait("7:1")
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: "7:1" in bench.buffer.committed)
    bench.rollouter.stop()
    await run
    assert bench.rollouter.metrics()["rollout/groups_regenerated"] == 1.0


# Stopping


@pytest.mark.parametrize("moment", ["before", "stuck requests", "full buffer", "stuck reward", "no place"])
async def test_stop_ends_the_run_at_every_wait(make_bench, moment):
    async def stuck_reward(completions, **columns):
        await asyncio.sleep(600)

    options = {
        "before": {},
        "stuck requests": {"behave": lambda ids, o: asyncio.sleep(600), "capacity": 2},
        "full buffer": {"capacity": 0},
        "stuck reward": {"reward": stuck_reward, "capacity": 2},
        "no place": {"behave": lambda ids, o: asyncio.sleep(600), "inflight": 1},
    }[moment]
    bench = make_bench(**options)
    if moment == "before":
        bench.rollouter.stop()
    run = asyncio.create_task(bench.rollouter.run())
    await asyncio.sleep(0.02)
    bench.rollouter.stop()
    await asyncio.wait_for(run, 2)
    assert bench.client.running == 0
    assert len(bench.buffer.live) == bench.buffer.admitted - len(bench.buffer.committed)
    assert not bench.buffer.dropped
    assert [t for t in asyncio.all_tasks() if t.get_name().startswith(("group", "rollout"))] == []


async def test_closing_the_buffer_ends_the_run_and_leaves_prompts_live(make_bench):
    bench = make_bench(capacity=2, behave=lambda ids, options: asyncio.sleep(600))
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: len(bench.buffer.live) == 2)
    await bench.buffer.close("the run has ended")
    await asyncio.wait_for(run, 2)
    assert (len(bench.buffer.live), bench.client.running) == (2, 0)


async def test_cancelling_the_run_from_outside_cleans_up_too(make_bench):
    bench = make_bench(capacity=2, behave=lambda ids, options: asyncio.sleep(600))
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: bench.client.running == 4)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert bench.client.running == 0


async def test_a_cancellation_while_it_stops_does_not_keep_workers_from_saving(make_bench, monkeypatch):
    bench = make_bench(capacity=2, behave=lambda ids, options: asyncio.sleep(600))
    (worker,) = bench.rollouter._workers
    halt, halted = worker.halt, asyncio.Event()

    async def halting():
        await halt()
        halted.set()

    monkeypatch.setattr(worker, "halt", halting)
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: bench.client.running == 4)
    bench.rollouter.stop()
    while bench.rollouter._running:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await asyncio.wait_for(halted.wait(), 2)


# Failures


async def test_one_bad_row_is_dropped_with_its_reason_and_the_run_continues(make_bench, caplog):
    def reward(completions, *, answer, **columns):
        if answer[0]["value"] == 2:
            raise ValueError("odd row")
        return [0.0, 1.0]

    bench = make_bench(total=9, size=4, reward=reward)
    with caplog.at_level(logging.WARNING):
        await finish(bench)
    assert {"0:2", "1:2"} <= bench.buffer.dropped.keys()
    assert set(bench.buffer.dropped.values()) == {"reward_error"}
    assert len(bench.buffer.committed) == 9
    assert not any(uid.endswith(":2") for uid in bench.buffer.committed)
    assert "Dropped group 0:2 (reward_error)" in caplog.text
    assert "raised ValueError: odd row" in caplog.text


async def test_a_prompt_too_long_for_the_server_is_dropped(make_bench):
    def behave(ids, options):
        if ids[0] == 1:
            raise DataError("the prompt has 900 tokens, no room in 512")
        return "x"

    bench = make_bench(total=6, size=4, behave=behave)
    await finish(bench)
    assert set(bench.buffer.dropped.values()) == {"no_response"}
    assert bench.rollouter.metrics()["rollout/samples_failed"] == 2.0 * len(bench.buffer.dropped)


async def test_a_reward_that_always_fails_ends_the_run_with_the_cause(make_bench):
    def broken(completions, **columns):
        raise KeyError("gold")

    bench = make_bench(reward=broken, capacity=2)
    with pytest.raises(
        DataError, match=r"all of the first 8 groups were dropped.\n.*reward_error.*raised KeyError: 'gold'"
    ):
        await finish(bench)
    assert bench.client.running == 0


async def test_an_invalid_workflow_result_ends_the_run_with_the_cause(make_bench):
    async def nonsense(client, sample):
        return "an answer"

    with pytest.raises(DataError, match="must return a Trajectory or a list of them, not 'an answer'"):
        await finish(make_bench(workflow=nonsense))


async def test_a_failed_sample_leaves_the_rest_of_its_group(make_bench):
    calls = []

    def behave(ids, options):
        calls.append(ids)
        if len(calls) == 2:
            raise RuntimeError("tool broke")
        return "x"

    bench = make_bench(total=2, samples=3, behave=behave)
    await finish(bench)
    assert sorted(len(group.trajectories) for group in bench.buffer.committed.values()) == [2, 3]


async def test_transient_server_failures_drop_no_prompt(make_bench):
    failures = iter([ServerError("connection refused")] * 2)

    def behave(ids, options):
        if error := next(failures, None):
            raise error
        return "x"

    bench = make_bench(total=4, inflight=1, behave=behave)
    await finish(bench)
    assert len(bench.buffer.committed) == 4
    assert not bench.buffer.dropped


async def test_a_long_server_outage_drops_no_prompt(make_bench):
    calls = []

    def behave(ids, options):
        calls.append(ids)
        if len(calls) <= 200:
            raise ServerError("no server answers")
        return "x"

    bench = make_bench(behave=behave, inflight=1, samples=2, total=2, max_attempts=1)
    await finish(bench)
    assert len(bench.buffer.committed) == 2
    assert not bench.buffer.dropped
    assert bench.rollouter.metrics()["rollout/server_failures"] == 200.0


async def test_a_server_error_wrapped_by_a_workflow_is_still_a_server_error(make_bench):
    failures = iter([ServerError("connection refused")] * 3)

    async def wrapping(client, sample):
        if error := next(failures, None):
            raise RuntimeError("the tool loop broke") from error
        return (await client.generate([1])).trajectory()

    bench = make_bench(total=1, workflow=wrapping)
    await finish(bench)
    assert len(bench.buffer.committed) == 1
    assert bench.rollouter.metrics()["rollout/samples_failed"] == 0.0


async def test_a_workflow_that_raises_is_tried_as_often_as_allowed_then_its_prompt_is_dropped(make_bench):
    calls = []

    def behave(ids, options):
        calls.append(ids[0])
        if ids[0] == 1:
            raise DataError("malformed tool call")
        return "x"

    bench = make_bench(total=3, size=4, samples=2, behave=behave, inflight=1, max_attempts=3)
    await finish(bench)
    assert bench.buffer.dropped == {"0:1": "no_response"}
    assert calls.count(1) == 3 * 2


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
async def test_only_the_response_with_invalid_logprobs_is_discarded(make_bench, logprob):
    given = []

    async def workflow(client, sample):
        given.append(sample)
        first = logprob if len(given) == 1 else -0.5
        # What is not trained may have any.
        return Trajectory([1], [1, 2], loss_mask=[1, 0], logprobs=[first, logprob], versions=[0, 0])

    bench = make_bench(total=2, samples=3, workflow=workflow)
    await finish(bench)
    assert sorted(len(group.trajectories) for group in bench.buffer.committed.values()) == [2, 3]
    assert bench.rollouter.metrics()["rollout/samples_failed"] == 1.0


@pytest.mark.parametrize("where", ["workflow", "reward"])
async def test_an_unrequested_cancellation_counts_as_an_ordinary_failure(make_bench, where):
    async def cancelled(*args, **columns):
        shared = asyncio.ensure_future(asyncio.sleep(600))
        shared.cancel()
        await shared

    bench = make_bench(**{where: cancelled})
    with pytest.raises(DataError, match="raised CancelledError"):
        await finish(bench)
    assert set(bench.buffer.dropped.values()) == {"no_response" if where == "workflow" else "reward_error"}


async def test_only_the_failed_sample_of_a_group_is_retried(make_bench):
    calls = []

    def behave(ids, options):
        calls.append(ids)
        if len(calls) == 2:
            raise RuntimeError("tool broke")
        return "x"

    bench = make_bench(total=1, samples=3, behave=behave, max_attempts=2)
    await finish(bench)
    assert [len(group.trajectories) for group in bench.buffer.committed.values()] == [3]
    assert len(calls) == 4


async def test_a_reward_that_fails_once_scores_the_same_responses_again(make_bench):
    asked = []

    def reward(completions, **columns):
        asked.append(completions)
        if len(asked) == 1:
            raise ConnectionError("the judge is away")
        return [0.0, 1.0]

    bench = make_bench(total=1, reward=reward, max_attempts=2)
    await finish(bench)
    assert (len(bench.client.calls), asked[0]) == (2, asked[1])


async def test_unknown_errors_are_logged_with_their_traceback_the_first_times(make_bench, caplog):
    def behave(ids, options):
        if ids[0] % 2:
            raise ZeroDivisionError("by zero")
        return "x"

    bench = make_bench(total=8, size=16, behave=behave, inflight=1)
    with caplog.at_level(logging.ERROR):
        await finish(bench)
    loud = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(loud) == 3 < bench.rollouter.metrics()["rollout/samples_failed"]
    assert all("an unexpected ZeroDivisionError" in record.getMessage() and record.exc_info for record in loud)


# Unfinished responses


def grows(tokens, last=None):
    """Lets each response grow by `tokens`; after `last` calls they do not end."""
    calls = []

    async def behave(ids, options):
        calls.append(ids)
        parts = options["keep"](str(ids))
        grow(parts, [7] * tokens, version=3)
        if last is not None and len(calls) > last:
            await asyncio.sleep(600)
        return "x"

    return behave


async def test_unfinished_responses_are_saved_at_the_end_and_finished_ones_are_not(make_bench):
    bench = make_bench(capacity=2, behave=grows(4, last=2), save_seconds=600.0)
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: bench.buffer.committed and bench.client.running == 4)
    bench.rollouter.stop()
    await run
    assert len(bench.buffer.committed) == 1
    assert {key[0] for key in bench.buffer.saved} == set(bench.buffer.live)
    assert {tuple(decode_partial(saved).token_ids) for saved in bench.buffer.saved.values()} == {(7, 7, 7, 7)}
    assert {tuple(decode_partial(saved).versions) for saved in bench.buffer.saved.values()} == {(3, 3, 3, 3)}


async def test_a_resumed_run_continues_saved_responses_with_an_unchanged_prompt(make_bench):
    first = make_bench(capacity=1, behave=grows(4, last=0), save_seconds=600.0)
    run = asyncio.create_task(first.rollouter.run())
    await until(lambda: first.client.running == 2)
    first.rollouter.stop()
    await run
    begun = []

    async def behave(ids, options):
        begun.append(len(options["keep"](str(ids))))
        begun.append(len(options["keep"](str([*ids, 1]))))
        return "x"

    second = make_bench(total=1, behave=behave, save_seconds=600.0)
    second.buffer.saved = first.buffer.saved
    await finish(second)
    assert begun == [4, 0, 4, 0]


async def test_unfinished_responses_are_saved_every_so_often(make_bench):
    bench = make_bench(capacity=1, behave=grows(4, last=0), save_seconds=0.01)
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: len(bench.buffer.saved) == 2)
    bench.rollouter.stop()
    await run


# The in-flight cap


class FakeFleet:
    def __init__(self, *loads):
        self._loads = list(loads)

    def loads(self):
        return self._loads

    def metrics(self):
        return {"fleet/healthy": float(len(self._loads))}


async def test_the_cap_holds_requests_back(make_bench):
    cap = InflightCap(servers=1, high_usage=0.9)
    cap.limit = 3
    bench = make_bench(total=8, samples=4, behave=lambda ids, o: asyncio.sleep(0.001, "x"), cap=cap, fleet=FakeFleet())
    await finish(bench)
    assert bench.client.most_running == 3
    assert bench.rollouter.metrics()["rollout/inflight_limit"] == 3.0
    assert bench.rollouter.metrics()["fleet/healthy"] == 0.0


# Groups that teach nothing


@pytest.mark.parametrize(
    ("rewards", "relative", "drop_uniform", "kept", "reason"),
    [
        ([1.0, None, None], True, False, None, "lone_survivor"),
        ([1.0, None, None], False, False, 1, None),
        ([None, None, None], False, False, None, "unscored"),
        ([1.0, None, 0.0], True, True, 2, None),
        ([1.0, 1.0, 1.0], True, True, None, "all_solved"),
        ([0.0, 0.0, 0.0], True, True, None, "all_failed"),
        ([0.5, 0.5, 0.5], True, True, None, "uniform"),
        ([1.0, 1.0, 1.0], True, False, 3, None),
        ([1.0, 1.0, None], True, True, None, "all_solved"),
    ],
)
async def test_which_groups_are_committed(make_bench, rewards, relative, drop_uniform, kept, reason):
    first = []

    def reward(completions, *, prompt, **columns):
        if not first:
            first.append(prompt[0])
        return rewards if prompt[0] == first[0] else [0.0, 0.5, 1.0]

    bench = make_bench(
        total=3, size=100, samples=3, reward=reward, relative=relative, groups={"drop_uniform": drop_uniform}
    )
    await finish(bench)
    assert bench.buffer.dropped == ({f"0:{first[0]}": reason} if reason else {})
    if kept:
        assert len(bench.buffer.committed[f"0:{first[0]}"].trajectories) == kept


async def test_uniform_groups_do_not_count_as_failures(make_bench):
    def reward(completions, *, prompt, **columns):
        return [0.0, 1.0] if int(prompt[0]) >= 150 else [0.0, 0.0]

    bench = make_bench(total=2, size=200, reward=reward, groups={"drop_uniform": True}, capacity=4)
    await finish(bench)
    assert len(bench.buffer.dropped) >= 146
    assert bench.rollouter.metrics()["rollout/dropped_all_failed"] == len(bench.buffer.dropped)
    assert bench.rollouter.finished_groups == 2


async def test_a_response_without_a_trained_token_does_not_count_as_a_survivor(make_bench, make_trajectory):
    async def workflow(client, sample):
        await asyncio.sleep(0)
        return [make_trajectory(reward=1.0, trained=0), make_trajectory(reward=0.0)]

    bench = make_bench(total=2, samples=2, workflow=workflow)
    await finish(bench)
    assert all(len(group.trajectories) == 2 for group in bench.buffer.committed.values())


# What workflows and servers see


async def test_a_workflow_gets_a_copy_of_its_own(make_bench):
    seen = []

    async def careless(client, sample):
        seen.append((sample["prompt_ids"][:], dict(sample["answer"])))
        sample["answer"]["value"] = "spoilt"
        sample["prompt_ids"].append(99)
        return (await client.generate([1])).trajectory()

    bench = make_bench(total=2, size=1, samples=2, workflow=careless)
    await finish(bench)
    assert seen == [([0], {"value": 0})] * 4


async def test_seeds_are_the_same_in_every_run_and_differ_by_sample(make_bench):
    async def seeds(seed):
        bench = make_bench(total=3, samples=2, seed=seed)
        await finish(bench)
        return sorted((o["routing_key"], o["seed"]) for _, o in bench.client.calls)

    first = await seeds(1)
    assert len({seed for _, seed in first}) == 6
    assert first == await seeds(1) != await seeds(2)


async def test_without_a_seed_requests_carry_none(make_bench):
    bench = make_bench(total=1)
    await finish(bench)
    assert all("seed" not in options for _, options in bench.client.calls)


async def test_the_gate_lets_running_requests_finish_and_starts_none_until_it_opens(make_bench):
    release = asyncio.Event()

    async def behave(ids, options):
        await release.wait()
        return "x"

    bench = make_bench(total=6, capacity=2, behave=behave)
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: bench.client.running == 4)
    gate = asyncio.create_task(bench.rollouter.gate(PATIENCE))
    await asyncio.sleep(0.01)
    assert not gate.done()
    release.set()
    await gate
    asked = len(bench.client.calls)
    await asyncio.sleep(0.02)
    assert (bench.client.running, len(bench.client.calls)) == (0, asked)
    bench.rollouter.open()
    await asyncio.wait_for(run, PATIENCE)
    assert len(bench.buffer.committed) == 6


@asynccontextmanager
async def held_back(make_bench, busy):
    """Four requests in flight that end with the block, beside a quarantine that the test controls."""
    suspects = SimpleNamespace(busy=busy, holds=0, metrics=dict)
    release = asyncio.Event()

    async def behave(ids, options):
        await release.wait()
        return "x"

    bench = make_bench(total=2, capacity=2, behave=behave, quarantine=suspects)
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: bench.client.running == 4)
    yield bench.rollouter, suspects, release
    release.set()
    bench.rollouter.open()
    await asyncio.wait_for(run, PATIENCE)


async def test_the_gate_waits_while_suspects_are_on_trial(make_bench):
    async with held_back(make_bench, busy=True) as (rollouter, suspects, _):
        gate = asyncio.create_task(rollouter.gate(0.001))
        await asyncio.sleep(0.02)
        assert not gate.done()
        suspects.busy = False
        with pytest.raises(ServerError, match="4 requests still ran"):
            await gate


async def test_the_gate_extends_its_timeout_after_a_request_was_held_back(make_bench):
    """The request's own deadline was paused meanwhile, so it may end after the gate's timeout."""
    async with held_back(make_bench, busy=False) as (rollouter, suspects, release):
        gate = asyncio.create_task(rollouter.gate(0.5))
        await asyncio.sleep(0.01)
        suspects.holds += 1
        await asyncio.sleep(0.55)
        assert not gate.done()
        release.set()
        await gate


async def test_metrics_of_a_run(make_bench):
    bench = make_bench(total=5, samples=2)
    await finish(bench)
    metrics = bench.rollouter.metrics()
    assert metrics["rollout/groups"] == 5.0
    assert metrics["rollout/tokens"] == 5 * 2 * 2
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/inflight_groups"] == metrics["rollout/inflight_requests"] == 0.0
    assert all(isinstance(value, float) for value in metrics.values())


# Finished answers


@pytest.mark.parametrize(
    ("error", "asked"), [(ServerError("the parser's server went away"), 2), (RuntimeError("of the workflow"), 3)]
)
async def test_a_finished_response_survives_a_server_error_but_not_a_sample_error(make_bench, error, asked):
    """The same answer would fail the sample again and again."""
    sampled, failures = [], iter([error])

    def behave(ids, options):
        parts = options["keep"]("the same request")
        if not parts.finished:
            sampled.append(parts)
            grow(parts, [7])
            parts.finish_reason = "stop"
        return "x"

    async def workflow(client, sample):
        reply = await client.generate([1])
        if failure := next(failures, None):
            raise failure
        return reply.trajectory()

    bench = make_bench(total=1, samples=2, behave=behave, workflow=workflow, max_attempts=2)
    await finish(bench)
    assert len(bench.buffer.committed) == 1
    assert len(sampled) == asked


async def test_every_request_of_a_workflow_is_sampled_as_it_is_trained(make_bench):
    bench = make_bench(total=2)
    await finish(bench)
    assert all(options["trained"] for _, options in bench.client.calls)


@pytest.mark.parametrize("taken", [False, True], ids=["declined", "accepted"])
async def test_a_group_returned_during_its_own_commit_is_not_generated_concurrently(make_bench, taken):
    """As when the answer to a commit that was declined is lost, and the commit is sent again."""
    bench = make_bench(total=1, size=1, capacity=1)
    commit, commits = bench.buffer.commit, 0

    async def lost_answer(group):
        nonlocal commits
        commits += 1
        if commits > 1:
            return await commit(group)
        for _ in range(2):
            bench.buffer.again.put_nowait(group.uid)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(bench.client.calls) == 2, "one request for each sample"
        return await commit(group) if taken else False

    bench.buffer.commit = lost_answer
    await asyncio.wait_for(bench.rollouter.run(), 5)
    assert list(bench.buffer.committed) == ["0:0"]
    assert len(bench.client.calls) == (2 if taken else 4)
