"""Retries, failover and deadlines over real HTTP; the servers that fail are fakes."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from deepresearch.http_pool import HttpPool, Limits, RequestRefused, ServiceFailed


class FakeService:
    """Answers every request by the next of `behaviours`, then by the last of them again and again."""

    def __init__(self, *behaviours):
        self.behaviours, self.requests = list(behaviours), []

    async def handle(self, request):
        self.requests.append((request.path, await request.json(), dict(request.headers)))
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        return await behaviour() if callable(behaviour) else behaviour_response(behaviour)


def behaviour_response(behaviour):
    if isinstance(behaviour, int):
        return web.json_response({"detail": "no"}, status=behaviour)
    return web.json_response(behaviour)


async def hang():
    await asyncio.sleep(60)


async def garbage():
    return web.Response(text="<html>")


@contextlib.asynccontextmanager
async def services(*fakes):
    """Their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for fake in fakes:
            app = web.Application()
            app.router.add_post("/{tail:.*}", fake.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield urls


@contextlib.asynccontextmanager
async def pool_of(*fakes, extra=(), **limits):
    async with services(*fakes) as urls:
        pool = HttpPool([*extra, *urls], Limits(**({"rest": 60.0} | limits)))
        try:
            yield pool
        finally:
            await pool.close()


@pytest.mark.parametrize("failure", [500, 503, 429, garbage])
async def test_the_next_endpoint_answers_for_a_failing_one_which_then_backs_off(failure):
    broken, sound = FakeService(failure), FakeService({"n": 1})
    async with pool_of(broken, sound) as pool:
        assert [await pool.request("POST", "/x", {}) for _ in range(4)] == [{"n": 1}] * 4
    assert (len(broken.requests), len(sound.requests)) == (1, 4)
    assert [endpoint.active for endpoint in pool.endpoints.all] == [0, 0]


async def test_a_hung_or_missing_endpoint_is_skipped():
    stuck, sound = FakeService(hang), FakeService({"n": 1})
    async with pool_of(stuck, sound, extra=["http://127.0.0.1:9"], attempt=0.2) as pool:
        assert await pool.request("POST", "/x", {}) == {"n": 1}
        assert [endpoint.failures for endpoint in pool.endpoints.all] == [1, 1, 0]


async def test_the_only_endpoint_is_retried():
    flaky = FakeService(503, 500, {"n": 1})
    async with pool_of(flaky) as pool:
        assert await pool.request("POST", "/x", {"q": 1}) == {"n": 1}
    assert [body for _, body, _ in flaky.requests] == [{"q": 1}] * 3


async def test_attempts_are_limited():
    dead = FakeService(500)
    async with pool_of(dead, attempts=2) as pool:
        with pytest.raises(ServiceFailed, match=r"/x failed after 2 attempts; the last: http://.*status 500: .*no"):
            await pool.request("POST", "/x", {})
    assert len(dead.requests) == 2


async def test_the_deadline_ends_the_attempts():
    async with pool_of(FakeService(hang), attempts=50, attempt=30.0, deadline=0.2) as pool:
        with pytest.raises(ServiceFailed, match=r"after 1 attempts; .* no answer within 0\.\d+ s"):
            await pool.request("POST", "/x", {})


async def test_a_refused_request_is_not_retried_and_counts_as_no_failure():
    strict, other = FakeService(422), FakeService({"n": 1})
    async with pool_of(strict, other) as pool:
        with pytest.raises(RequestRefused, match=r"/x refused with status 422: {'detail': 'no'}"):
            await pool.request("POST", "/x", {})
        assert [endpoint.failures for endpoint in pool.endpoints.all] == [0, 0]
    assert other.requests == []


async def test_a_cancelled_request_is_no_longer_counted():
    async with pool_of(FakeService(hang)) as pool:
        task = asyncio.create_task(pool.request("POST", "/x", {}))
        while not pool.endpoints.all[0].active:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (pool.endpoints.all[0].active, pool.endpoints.all[0].failures) == (0, 0)


async def test_requests_at_the_same_time_are_spread():
    go = asyncio.Event()

    async def wait():
        await go.wait()
        return web.json_response({})

    fakes = [FakeService(wait) for _ in range(3)]
    async with pool_of(*fakes) as pool:
        tasks = [asyncio.create_task(pool.request("POST", "/x", {})) for _ in range(6)]
        while sum(len(fake.requests) for fake in fakes) < 6:
            await asyncio.sleep(0.01)
        assert [endpoint.active for endpoint in pool.endpoints.all] == [2, 2, 2]
        go.set()
        await asyncio.gather(*tasks)
