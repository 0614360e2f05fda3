"""Failures of the infrastructure are repeated, the agent's are trained, the grader's are left out; all are counted."""

from __future__ import annotations

from collections import Counter

import pytest

from megasync.errors import DataError, SandboxError, ServerError, ServiceDown, ServiceFailed
from megasync.rewards import RewardRunner
from megasync.rollout.group_worker import MAX_REPEATS


def counted(bench):
    metrics = bench.rollouter.metrics()
    return {name: value for name, value in metrics.items() if name.startswith("failures/") and value}


def play(behave):
    """A workflow that calls `behave(number)` before each answer; numbers begin at 1."""
    calls = 0

    async def agent(client, sample):
        nonlocal calls
        calls += 1
        metrics = behave(calls) or {}
        reply = await client.generate(sample["prompt_ids"])
        return reply.trajectory(metrics=metrics)

    agent.label = "shop"
    return agent


@pytest.mark.parametrize("failure", [ServiceFailed("down", "shop"), SandboxError("it has died")])
async def test_a_failure_of_a_service_is_repeated_and_never_trained(make_bench, failure):
    def behave(number):
        if number in (1, 3):
            raise failure

    bench = make_bench(total=2, workflow=play(behave))
    await bench.rollouter.run()
    assert len(bench.buffer.committed) == 2 and not bench.buffer.dropped
    assert counted(bench) == {f"failures/{failure.service}/infrastructure": 2.0}
    metrics = bench.rollouter.metrics()
    assert (metrics["rollout/failures_infrastructure"], metrics["rollout/server_failures"]) == (2.0, 2.0)


@pytest.mark.parametrize("failure", [ServiceFailed("killed", "shop"), SandboxError("out of memory")])
async def test_a_sample_at_which_alone_a_service_fails_is_left_out_after_a_bound(make_bench, failure):
    calls = {}

    async def agent(client, sample):
        row = sample["answer"]["value"]
        calls[row] = calls.get(row, 0) + 1
        if row == 1:
            raise failure
        return (await client.generate(sample["prompt_ids"])).trajectory()

    bench = make_bench(total=3, samples=2, workflow=agent)
    await bench.rollouter.run()
    assert bench.buffer.dropped == {"0:1": "no_response"}
    assert calls[1] == 2 * (MAX_REPEATS + 1)


async def test_groups_of_a_service_that_stays_down_are_dropped_and_others_go_on(make_bench):
    async def agent(client, sample):
        if sample["answer"]["value"] % 2:
            raise ServiceDown("shop has failed for everybody for 700 s; its last failure: refused")
        return (await client.generate(sample["prompt_ids"])).trajectory()

    bench = make_bench(total=4, workflow=agent)
    await bench.rollouter.run()
    assert len(bench.buffer.committed) == 4
    assert set(bench.buffer.dropped.values()) == {"service_down"}


async def test_a_run_that_has_nothing_else_ends_and_names_the_service(make_bench):
    async def agent(client, sample):
        raise ServiceDown("shop has failed for everybody for 700 s; its last failure: refused")

    bench = make_bench(workflow=agent)
    with pytest.raises(DataError, match=r"all of the first 8 groups were dropped.*\n.*service_down.*shop has failed"):
        await bench.rollouter.run()


async def test_the_agents_failures_are_trained_and_counted(make_bench):
    ends = [{"turn_limit": 1.0}, {"context_full": 0.0, "turn_limit": 0.0}, {"deadline": 1.0}, {}]
    bench = make_bench(total=2, workflow=play(lambda number: ends[number - 1]))
    await bench.rollouter.run()
    assert sum(len(group.trajectories) for group in bench.buffer.committed.values()) == 4
    assert counted(bench) == {"failures/shop/agent": 2.0}


async def test_a_workflow_that_raises_is_counted_apart(make_bench):
    def behave(number):
        if number == 1:
            raise KeyError("a bug")

    bench = make_bench(total=1, capacity=1, max_attempts=2, workflow=play(behave))
    await bench.rollouter.run()
    assert counted(bench) == {"failures/shop/code": 1.0}


def per_response(data_source, solution_str, ground_truth, extra_info):
    if solution_str.endswith("2"):
        raise RuntimeError("the grader's own bug")
    return float(len(solution_str))


async def per_response_async(data_source, solution_str, ground_truth, extra_info):
    return per_response(data_source, solution_str, ground_truth, extra_info)


def nan_for_one(completions, **columns):
    return [float("nan") if text.endswith("2") else float(len(text)) for text in completions]


@pytest.mark.parametrize("reward", [per_response, per_response_async, nan_for_one])
@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_the_graders_failure_at_one_response_leaves_that_sample_out(make_bench, reward, max_attempts):
    bench = make_bench(total=1, capacity=1, samples=4, reward=reward, max_attempts=max_attempts)
    await bench.rollouter.run()
    (group,) = bench.buffer.committed.values()
    assert len(group.trajectories) == 3
    assert all(t.reward is not None for t in group.trajectories)
    assert counted(bench) == {f"failures/{reward.__name__}/grader": 1.0}


async def test_a_service_of_a_grader_that_is_down_is_no_failure_of_the_grader(make_trajectory):
    async def down(data_source, solution_str, ground_truth, extra_info):
        raise ServerError("no server")

    with pytest.raises(ServerError):
        await RewardRunner(down).score([make_trajectory("x")], {}, failed=Counter())
