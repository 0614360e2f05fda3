"""The rollout loops: every admitted prompt is accounted for, everything is bounded, and stop works anywhere."""

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from responses import grow
from waits import until

from megasync.buffer.payload import decode_partial
from megasync.errors import DataError, ServerError
from megasync.rollout.inflight import InflightCap


async def finish(bench):
    await bench.rollouter.run()


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
    rewards = [float(number) for number in range(samples)]
    assert all([t.reward for t in group.trajectories] == rewards for group in bench.buffer.committed.values())


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
    await run
    assert bench.client.running == 0
    assert len(bench.buffer.live) == bench.buffer.admitted - len(bench.buffer.committed)
    assert not bench.buffer.dropped
    assert [t for t in asyncio.all_tasks() if t.get_name().startswith(("group", "rollout"))] == []


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_a_closed_buffer_or_a_cancellation_ends_the_run_and_leaves_prompts_live(make_bench, how):
    bench = make_bench(capacity=2, behave=lambda ids, options: asyncio.sleep(600))
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: bench.client.running == 4)
    if how == "closed":
        await bench.buffer.close("the run has ended")
        await run
    else:
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert (len(bench.buffer.live), bench.client.running) == (2, 0)


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
    await halted.wait()


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


def broken(completions, **columns):
    raise KeyError("gold")


async def nonsense(client, sample):
    return "an answer"


async def cancelled(*args, **columns):
    shared = asyncio.ensure_future(asyncio.sleep(600))
    shared.cancel()
    await shared


@pytest.mark.parametrize(
    ("options", "message", "reason"),
    [
        ({"reward": broken}, r"all of the first 8 groups .*\n.*reward_error.*raised KeyError: 'gold'", "reward_error"),
        ({"workflow": nonsense}, "must return a Trajectory or a list of them, not 'an answer'", "no_response"),
        ({"reward": cancelled}, "raised CancelledError", "reward_error"),
        ({"workflow": cancelled}, "raised CancelledError", "no_response"),
    ],
)
async def test_what_always_fails_ends_the_run_with_its_cause(make_bench, options, message, reason):
    bench = make_bench(capacity=2, **options)
    with pytest.raises(DataError, match=message):
        await finish(bench)
    assert set(bench.buffer.dropped.values()) == {reason}
    assert bench.client.running == 0


@pytest.mark.parametrize(("max_attempts", "sizes"), [(1, [2, 3]), (2, [3, 3])])
async def test_a_failed_sample_is_retried_or_left_out_of_its_group(make_bench, max_attempts, sizes):
    calls = []

    def behave(ids, options):
        calls.append(ids)
        if len(calls) == 2:
            raise RuntimeError("tool broke")
        return "x"

    bench = make_bench(total=2, samples=3, behave=behave, max_attempts=max_attempts)
    await finish(bench)
    assert sorted(len(group.trajectories) for group in bench.buffer.committed.values()) == sizes
    assert len(calls) == 5 + max_attempts


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_long_server_outage_drops_no_prompt(make_bench, wrapped):
    calls = []

    async def workflow(client, sample):
        calls.append(sample)
        if len(calls) <= 200:
            error = ServerError("no server answers")
            if wrapped:
                raise RuntimeError("the tool loop broke") from error
            raise error
        return (await client.generate([1])).trajectory()

    bench = make_bench(workflow=workflow, inflight=1, samples=2, total=2, max_attempts=1)
    await finish(bench)
    assert len(bench.buffer.committed) == 2
    assert not bench.buffer.dropped
    metrics = bench.rollouter.metrics()
    assert (metrics["rollout/server_failures"], metrics["rollout/samples_failed"]) == (200.0, 0.0)


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
    assert calls.count(1) == 3 * 2 == bench.rollouter.metrics()["rollout/samples_failed"]


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


async def test_uniform_groups_do_not_count_as_failures(make_bench):
    def reward(completions, *, prompt, **columns):
        return [0.0, 1.0] if int(prompt[0]) >= 150 else [0.0, 0.0]

    bench = make_bench(total=2, size=200, reward=reward, groups={"drop_uniform": True}, capacity=4)
    await finish(bench)
    assert len(bench.buffer.dropped) >= 146
    assert bench.rollouter.metrics()["rollout/dropped_all_failed"] == len(bench.buffer.dropped)
    assert bench.rollouter.finished_groups == 2


# What workflows and servers see


async def test_seeds_are_the_same_in_every_run_and_differ_by_sample(make_bench):
    async def seeds(seed):
        bench = make_bench(total=3, samples=2, seed=seed)
        await finish(bench)
        return sorted((o["routing_key"], o["seed"]) for _, o in bench.client.calls)

    first = await seeds(1)
    assert len({seed for _, seed in first}) == 6
    assert first == await seeds(1) != await seeds(2)


@pytest.mark.parametrize("reading", ["busy", "holds"])
async def test_the_gate_waits_while_requests_of_suspects_are_held_back(make_bench, reading):
    """Their own deadlines are paused meanwhile, so they may end after the gate's."""

    class Quarantine:
        """Holds one back in each of the first three looks."""

        looks = 0

        def look(self, name):
            self.looks += name == reading
            return min(self.looks, 3) if name == "holds" else self.looks < 3

        busy = property(lambda self: self.look("busy") if reading == "busy" else False)
        holds = property(lambda self: self.look("holds") if reading == "holds" else 0)
        metrics = dict

    suspects = Quarantine()
    bench = make_bench(capacity=2, behave=lambda ids, options: asyncio.sleep(600), quarantine=suspects)
    run = asyncio.create_task(bench.rollouter.run())
    await until(lambda: bench.client.running == 4)
    with pytest.raises(ServerError, match="4 requests still ran"):
        await bench.rollouter.gate(0.001)
    assert suspects.looks >= 3
    bench.rollouter.stop()
    await run


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
