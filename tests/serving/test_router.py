"""The real router in front of servers that can be told to misbehave."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fake_sglang import FakeSGLang, hang, refuse
from waits import PATIENCE, until

from megasync.config.schema import SamplingConfig
from megasync.errors import ServerError
from megasync.rollout import client as client_module
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.partials import PartialResponse
from megasync.serving.answers import PromptQuestion
from megasync.serving.control import ServerControl
from megasync.serving.router import POLICIES, Router, RouterMembers

pytestmark = pytest.mark.processes


@asynccontextmanager
async def routed(tmp_path, policy: str, workers: int = 2):
    """(fake servers, client through a real router in front of them)"""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeSGLang()) for _ in range(workers)]
        router = Router([fake.url for fake in fakes], policy, "127.0.0.1", 0, tmp_path / "router.log")
        stack.push_async_callback(router.stop)
        url = await router.start(PATIENCE)
        controls = [await stack.enter_async_context(ServerControl(fake.url)) for fake in fakes]
        yield fakes, make_client(stack, url, controls)


def make_client(stack: AsyncExitStack, url: str, controls=(), stream_interval: int = 0) -> RolloutClient:
    settings = RequestSettings(SamplingConfig(max_new_tokens=4), 60.0, stream_interval)
    client = RolloutClient(url, controls, ServedModel(100, 64), settings)
    stack.push_async_callback(client.close)
    return client


async def test_requests_are_spread_and_whole(tmp_path):
    async with routed(tmp_path, "round_robin") as (fakes, client):
        results = await asyncio.gather(*(client.generate([i], seed=i) for i in range(20)))
        assert [got.token_ids[0] for got in results] == [i + 1 for i in range(20)]
        assert [len(fake.requests) for fake in fakes] == [10, 10]
        # No sampling parameter was lost on the way.
        sent = fakes[0].requests[0]["sampling_params"]
        assert {"temperature", "top_k", "min_p", "sampling_seed", "stop_token_ids", "max_new_tokens"} <= set(sent)
        await client.generate([1], priority=7)
        assert sorted(fake.requests[-1]["priority"] for fake in fakes) == [0, 7]


async def test_questions_about_a_prompt_and_names_of_adapters_arrive(tmp_path):
    async with routed(tmp_path, "cache_aware", workers=1) as (_, client):
        parts = PartialResponse()
        asked = PromptQuestion(1, 3, (4, 6))
        await client.generate([1, 2, 4], question=asked, adapter="tuned", keep=lambda _: parts, max_new_tokens=1)
        assert parts.scores.logprobs.tolist() == [-2 / 128, -4 / 128]
        assert parts.scores.top.ids.tolist() == [[0, 1, 2]] * 2
        assert parts.scores.named.tolist() == [[-4 / 128, -6 / 128]] * 2
        top = PartialResponse()
        await client.generate([1], top=2, adapter="tuned", keep=lambda _: top)
        assert top.top.ids.shape == (4, 2)


@pytest.mark.every(3)
@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_does_with_a_single_server(tmp_path, policy):
    async with routed(tmp_path, policy, workers=1) as (fakes, client):
        assert (await client.generate([1], routing_key="group")).token_ids
        assert len(fakes[0].requests) == 1


@pytest.mark.every(2)
@pytest.mark.parametrize("policy", ["consistent_hashing", "sticky"])
async def test_a_routing_key_sticks_to_one_server(tmp_path, policy):
    async with routed(tmp_path, policy) as (fakes, client):
        for key in range(16):
            before = [len(fake.requests) for fake in fakes]
            await asyncio.gather(*(client.generate([i], routing_key=f"group-{key}") for i in range(5)))
            gained = sorted(len(fake.requests) - b for fake, b in zip(fakes, before, strict=True))
            assert gained == [0, 5]
        assert all(fake.requests for fake in fakes)


async def test_new_routing_keys_go_to_the_server_with_the_fewest_requests_and_move_when_it_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_FAILURE_WAIT", (0.01, 0.1))
    async with routed(tmp_path, "sticky") as (fakes, client):
        started = [asyncio.Event() for _ in range(8)]
        for fake in fakes:
            fake.script += [hang(event) for event in started]
        held = [asyncio.create_task(client.generate([key], routing_key=f"group-{key}")) for key in range(8)]
        await until(lambda: sum(len(fake.requests) for fake in fakes) >= 8)
        assert [len(fake.requests) for fake in fakes] == [4, 4]
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        fakes[1].script.clear()
        await fakes[0].__aexit__()
        results = await asyncio.gather(*(client.generate([key], routing_key=f"group-{key}") for key in range(8)))
        assert [got.token_ids[0] for got in results] == list(range(1, 9))


async def test_the_router_does_not_retry(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_RETRIED", frozenset())
    async with routed(tmp_path, "round_robin") as (fakes, client):
        for fake in fakes:
            fake.script += [refuse(503)] * 10
        with pytest.raises(ServerError, match="503"):
            await client.generate([1])
        assert sum(len(fake.requests) for fake in fakes) == 1


async def test_a_dead_server_costs_retries_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_FAILURE_WAIT", (0.01, 0.1))
    # The policy that would send each prompt to the server it knows, dead or not.
    async with routed(tmp_path, "cache_aware") as (fakes, client):
        prompts = [[i] * 20 for i in range(16)]
        await asyncio.gather(*(client.generate(prompt) for prompt in prompts))
        assert all(fake.requests for fake in fakes)
        await fakes[0].__aexit__()
        results = await asyncio.gather(*(client.generate(prompt) for prompt in prompts))
        assert [got.token_ids[0] for got in results] == [i + 1 for i in range(16)]


async def test_a_cancelled_request_is_closed_at_the_server(tmp_path):
    async with routed(tmp_path, "round_robin", workers=1) as (fakes, client):
        started = asyncio.Event()
        fakes[0].script += [hang(started)]
        task = asyncio.create_task(client.generate([1]))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: fakes[0].disconnected)


async def test_a_router_without_its_servers_does_not_start(tmp_path):
    with socket.socket() as nobody:
        # Bound, so that nobody else listens there.
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        router = Router([url], "round_robin", "127.0.0.1", 0, tmp_path / "log")
        with pytest.raises(ServerError, match="was not ready"):
            await router.start(3)
    assert not router.alive()


def test_unknown_policies_are_refused(tmp_path):
    with pytest.raises(ServerError, match="cache_aware"):
        Router(["http://127.0.0.1:1"], "fastest", "127.0.0.1", 0, tmp_path / "log")


async def test_servers_come_and_go_while_requests_run(tmp_path):
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeSGLang()) for _ in range(2)]
        router = Router([], "round_robin", "127.0.0.1", 0, tmp_path / "router.log")
        stack.push_async_callback(router.stop)
        url = await router.start(PATIENCE)
        members = RouterMembers(ServerControl(url))
        stack.push_async_callback(members.close)
        client = make_client(stack, url, stream_interval=2)
        # Without a server a request waits, and is answered once there is one.
        early = asyncio.create_task(client.generate([5]))
        await settled(members, [fakes[0].url])
        assert (await early).token_ids == [6, 7, 8, 9]
        # A server that is taken away finishes what it is at, and gets nothing more.
        started, release = asyncio.Event(), asyncio.Event()

        async def slow(fake, body):
            started.set()
            await release.wait()
            return fake.answer(body, 4, "length")

        fakes[0].script += [slow]
        running = asyncio.create_task(client.generate([1]))
        await started.wait()
        await settled(members, [fakes[1].url])
        seen = len(fakes[0].requests)
        await asyncio.gather(*(client.generate([i]) for i in range(6)))
        release.set()
        assert (await running).parts == 1
        assert len(fakes[0].requests) == seen


async def settled(members: RouterMembers, urls: list[str]) -> None:
    while not await members.adjust(urls):
        await asyncio.sleep(0.05)


async def test_a_router_that_died_is_back_on_its_port_and_requests_wait_for_it(tmp_path):
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeSGLang())
        first = Router([fake.url], "cache_aware", "127.0.0.1", 0, tmp_path / "router.log")
        stack.push_async_callback(first.stop)
        url = await first.start(PATIENCE)
        client = make_client(stack, url, stream_interval=2)
        started = asyncio.Event()
        fake.script += [hang(started)]
        running = asyncio.create_task(client.generate([1]))
        await started.wait()
        first.kill()
        second = Router([fake.url], "cache_aware", "127.0.0.1", first.port, tmp_path / "router.log")
        stack.push_async_callback(second.stop)
        await until(lambda: not first.alive())
        assert await second.start(PATIENCE) == url
        assert (await running).token_ids == [2, 3, 4, 5]
