"""The pool bounds and reuses environments, discards those that fail, and none can block a run."""

import asyncio
import os
import signal
import threading
from functools import partial

import envs
import pytest
from waits import PATIENCE, until

from megasync.environments import EnvironmentPool
from megasync.errors import DataError, ServerError, ServiceFailed
from megasync.rollout.breaker import Breaker

ROW = {"goal": 2}
KINDS = [
    ("thread", envs.Counter),
    pytest.param("process", envs.Counter, marks=pytest.mark.processes),
    ("thread", envs.AsyncCounter),
]


@pytest.fixture
async def make_pool():
    pools = []

    def make(isolation="thread", environment=envs.Counter, size=2, deadline=20.0, **options):
        pools.append(EnvironmentPool(partial(environment, **options), size, deadline, isolation))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


async def play(pool, *actions):
    async with pool.lease() as episode:
        first = await episode.reset(ROW)
        return first, [await episode.step(action) for action in actions]


@pytest.mark.parametrize(("isolation", "environment"), KINDS)
async def test_an_environment_is_reused_for_the_next_episode(make_pool, isolation, environment):
    pool = make_pool(isolation, environment)
    first, steps = await play(pool, "up", "left", "up")
    assert steps == [("1 of 2", 0.0, False), ("1 of 2", 0.0, False), ("2 of 2", 1.0, True)]
    assert (first, []) == await play(pool)
    assert pool.made == 1
    assert (str(os.getpid()) in first) == (isolation != "process")


async def test_concurrent_episodes_are_limited_by_the_pool_size(make_pool):
    pool = make_pool(size=2)
    under_way = most = 0

    async def episode():
        nonlocal under_way, most
        async with pool.lease() as lent:
            under_way += 1
            most = max(most, under_way)
            await lent.reset(ROW)
            under_way -= 1

    await asyncio.gather(*(episode() for _ in range(9)))
    assert (most, pool.made) == (2, 2)


@pytest.mark.parametrize(("isolation", "environment"), KINDS)
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "Counter: step raised KeyError: 'rope'"),
        ("sleep", "Counter: step did not answer within 0.5 s; raise timeouts.environment"),
    ],
)
async def test_a_failed_call_is_reported_and_its_environment_is_not_reused(
    make_pool, isolation, environment, action, message
):
    pool = make_pool(isolation, environment, size=1)
    with pytest.raises(DataError, match=message):
        async with pool.lease() as episode:
            await episode.reset(ROW)
            episode._deadline = 0.5 if action == "sleep" else 20.0
            await episode.step(action)
    if isolation == "thread" and environment is envs.Counter and action == "sleep":
        assert pool.abandoned == 1
        with pytest.raises(DataError, match="1 environments .*Counter hang.*isolation=process"):
            await play(pool)
        return
    await play(pool, "up")
    assert (pool.made, pool.abandoned) == (2, 0)


@pytest.mark.parametrize(
    ("action", "message"),
    [("odd", r"step must return \(observation, reward, done\), not 'only text'"), ("nan", "text and a finite reward")],
)
async def test_an_invalid_step_result_is_an_error(make_pool, action, message):
    with pytest.raises(DataError, match=message):
        await play(make_pool(), action)


@pytest.mark.processes
async def test_a_cancelled_call_discards_its_environment_and_frees_its_slot(make_pool):
    pool = make_pool("process", size=1)
    await play(pool)
    stuck = asyncio.create_task(play(pool, "sleep"))
    await asyncio.sleep(0.05)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    await play(pool, "up")
    assert pool.made == 2


async def test_an_abandoned_thread_that_returns_late_is_no_longer_counted(make_pool):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(envs.Counter):
        def step(self, action):
            entered.set()
            go_on.wait(PATIENCE)
            return super().step(action)

    pool = make_pool(environment=Slow, size=1)
    surplus = asyncio.create_task(play(pool, "up"))
    await asyncio.to_thread(entered.wait, 20)
    surplus.cancel()
    with pytest.raises(asyncio.CancelledError):
        await surplus
    assert pool.abandoned == 1
    go_on.set()
    await until(lambda: not pool.abandoned)
    await play(pool, "up")
    assert pool.made == 2


async def test_an_error_in_the_workflow_itself_does_not_discard_the_environment(make_pool):
    pool = make_pool()
    with pytest.raises(ZeroDivisionError):
        async with pool.lease() as episode:
            await episode.reset(ROW)
            raise ZeroDivisionError
    await play(pool)
    assert pool.made == 1


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.processes)])
async def test_an_environment_that_cannot_be_created_raises_an_error_with_the_cause(make_pool, isolation):
    with pytest.raises(DataError, match="reset raised ValueError: no licence"):
        await play(make_pool(isolation, refuse=True))


class Service:
    """An environment whose server is down at first; each failure is told apart from the actions'."""

    down = 3

    async def reset(self, sample):
        if Service.down:
            Service.down -= 1
            raise ServerError("connection refused")
        return "ready"

    async def step(self, action):
        if action == "down":
            raise ServerError("connection reset")
        return "", 1.0, True

    async def close(self): ...


async def test_an_environment_whose_server_is_down_is_paused_and_tried_by_one_episode(monkeypatch):
    monkeypatch.setattr(Service, "down", 3)
    pool = EnvironmentPool(Service, 4, 20.0, label="shop")
    # Failures far enough apart to count, and no delay before the trial.
    pool.breaker = Breaker("shop", clock=iter(range(0, 10**6, 100)).__next__, delay_seconds=(0.0, 0.0))
    for _ in range(3):
        with pytest.raises(ServiceFailed, match=r"Service: reset: ServerError: connection refused") as failure:
            await play(pool)
        assert failure.value.service == "shop"
    assert pool.breaker.paused
    assert (await play(pool, "go"))[0] == "ready"
    assert not pool.breaker.paused
    with pytest.raises(ServiceFailed, match="step: ServerError: connection reset"):
        await play(pool, "down")


async def test_a_reset_without_an_answer_is_no_fault_of_the_episode(make_pool):
    class Slow(envs.AsyncCounter):
        async def reset(self, sample):
            await asyncio.Event().wait()

    with pytest.raises(ServiceFailed, match=r"reset did not answer within 0\.2 s"):
        await play(make_pool(environment=Slow, deadline=0.2))


@pytest.mark.processes
async def test_the_death_of_an_environments_process_is_no_fault_of_the_episode(make_pool):
    pool = make_pool("process", envs.Counter)
    async with pool.lease() as episode:
        first = await episode.reset(ROW)
        os.kill(int(first.split()[-1]), signal.SIGKILL)
        with pytest.raises(ServiceFailed, match="step: BrokenProcessPool"):
            await episode.step("up")
