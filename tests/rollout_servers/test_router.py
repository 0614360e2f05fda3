"""The real router in front of servers that can be told to misbehave."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fake_sglang import FakeSGLang, hang, refuse

from megasync.config.schema import SamplingConfig
from megasync.errors import ServerError
from megasync.rollout import client as client_module
from megasync.rollout.client import RolloutClient
from megasync.rollout.control import ServerControl
from megasync.rollout.ports import free_port
from megasync.rollout.router import POLICIES, Router


@asynccontextmanager
async def routed(tmp_path, policy: str, workers: int = 2):
    """(fake servers, client through a real router in front of them)"""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeSGLang()) for _ in range(workers)]
        router = Router([fake.url for fake in fakes], policy, "127.0.0.1", 0, tmp_path / "router.log")
        stack.push_async_callback(router.stop)
        url = await router.start(30)
        controls = [ServerControl(fake.url) for fake in fakes]
        for control in controls:
            stack.push_async_callback(control.close)
        client = RolloutClient(url, controls, 100, 64, SamplingConfig(max_new_tokens=4), 20.0)
        stack.push_async_callback(client.close)
        yield fakes, client


async def test_requests_are_spread_and_whole(tmp_path):
    async with routed(tmp_path, "round_robin") as (fakes, client):
        results = await asyncio.gather(*(client.generate([i], seed=i) for i in range(20)))
        assert [got.token_ids[0] for got in results] == [i + 1 for i in range(20)]
        assert [len(fake.requests) for fake in fakes] == [10, 10]
        # No sampling parameter was lost on the way.
        sent = fakes[0].requests[0]["sampling_params"]
        assert {"temperature", "top_k", "min_p", "sampling_seed", "stop_token_ids", "max_new_tokens"} <= set(sent)
        assert fakes[0].requests[0]["rid"]


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_does_with_a_single_server(tmp_path, policy):
    async with routed(tmp_path, policy, workers=1) as (fakes, client):
        assert (await client.generate([1], routing_key="group")).token_ids
        assert len(fakes[0].requests) == 1


async def test_a_routing_key_sticks_to_one_server(tmp_path):
    async with routed(tmp_path, "consistent_hashing") as (fakes, client):
        for key in range(16):
            before = [len(fake.requests) for fake in fakes]
            await asyncio.gather(*(client.generate([i], routing_key=f"group-{key}") for i in range(5)))
            gained = sorted(len(fake.requests) - b for fake, b in zip(fakes, before, strict=True))
            assert gained == [0, 5]
        assert all(fake.requests for fake in fakes)


async def test_the_router_does_not_retry_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_ATTEMPTS", 1)
    async with routed(tmp_path, "round_robin") as (fakes, client):
        for fake in fakes:
            fake.script += [refuse(503)] * 10
        with pytest.raises(ServerError, match="503"):
            await client.generate([1])
        assert sum(len(fake.requests) for fake in fakes) == 1


async def test_a_dead_server_costs_retries_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_BACKOFF", 0.01)
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
        await asyncio.wait_for(started.wait(), 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(5):
            while not fakes[0].aborted:
                await asyncio.sleep(0.01)
        assert fakes[0].aborted == [fakes[0].requests[0]["rid"]]


async def test_a_router_without_its_servers_does_not_start(tmp_path):
    router = Router([f"http://127.0.0.1:{free_port()}"], "round_robin", "127.0.0.1", 0, tmp_path / "log")
    with pytest.raises(ServerError, match="did not serve"):
        await router.start(3)
    assert not router.alive()


def test_unknown_policies_and_empty_pools_are_refused(tmp_path):
    with pytest.raises(ServerError, match="cache_aware"):
        Router(["http://127.0.0.1:1"], "fastest", "127.0.0.1", 0, tmp_path / "log")
    with pytest.raises(ServerError, match="at least one server"):
        Router([], "round_robin", "127.0.0.1", 0, tmp_path / "log")
