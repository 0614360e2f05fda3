"""The fleet on real servers, the real router and Ray: whatever is killed or stopped, requests come back whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import pytest_asyncio
import ray
import torch
from processes import gone as all_gone
from processes import living, with_word
from real_servers import reference
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM
from waits import PATIENCE, until

from megasync.cluster import fleet_processes
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import PoolSpec
from megasync.config.schema import HealthConfig, SamplingConfig
from megasync.device import resolve_device
from megasync.errors import MegasyncError, ServerError
from megasync.observe.context import RunContext
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.partials import PartialResponse

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 1200
VOCAB = 300


@dataclass
class Rig:
    fleet: Fleet
    client: RolloutClient
    model: torch.nn.Module
    gone: list[str]

    async def all_serve(self, count: int) -> list[str]:
        """URLs, once `count` servers are up and have joined."""
        async with asyncio.timeout(PATIENCE):
            while len(up := [*self.fleet.serving(), *self.fleet.joiners()]) != count:
                await self.fleet.changed()
        await self.fleet.joined([control.url for control in up])
        return [control.url for control in up]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("fleet")
    config = Config()
    config.model.path = str(make_tiny_model(folder / "model", "qwen3", seed=0))
    config.model.dtype = "float32"
    # Ray's own idea of how large this machine is: room for three servers, and no more.
    config.cluster.devices_per_node = 1
    config.rollout.max_total_tokens, config.rollout.max_running_requests = 32768, 32
    config.rollout.mem_fraction = 0.3
    config.rollout.router_policy = "round_robin"
    config.rollout.stream_interval = 8
    config.rollout.health = HealthConfig(
        probe_seconds=0.5, probe_timeout=3.0, probe_failures=3, request_seconds=1.0, request_timeout=10.0
    )
    cluster = RayCluster(config, devices_needed=1)
    cluster.connect()
    pools = Pools({"rollout": PoolSpec("rollout", slots=2, devices=1, slots_per_node=8)}, "cpu")
    keys = Keys("admin-key-of-this-test", "router-key-of-this-test", "generation-key-of-this-test")
    fleet = Fleet(config, FleetProcesses(config, folder, resolve_device("cpu"), pools, keys), VOCAB, RunContext())
    client = None
    try:
        await pools.create(60)
        await fleet.start()
        gone: list[str] = []
        client = RolloutClient(
            fleet.router.url,
            [],
            ServedModel(VOCAB, 2048),
            RequestSettings(SamplingConfig(max_new_tokens=TOKENS), 300.0, stream_interval=8),
            api_key=keys.generation,
        )
        fleet.follow(client.add_server, client.remove_server)
        fleet.follow(lambda control: None, gone.append)
        assert not fleet.serving() and len(fleet.joiners()) == 2
        await fleet.joined([control.url for control in fleet.joiners()])
        yield Rig(fleet, client, AutoModelForCausalLM.from_pretrained(config.model.path), gone)
    finally:
        if client is not None:
            await client.close()
        await fleet.stop()
        pools.remove()
        cluster.close()
        assert all_gone(lambda: with_word(str(folder)))


def family(url: str) -> list[psutil.Process]:
    """The processes of a server or router at this address: its supervisor, and everything below."""
    port = str(urlsplit(url).port)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word.endswith("supervisor.py") for word in words) and (port in words or f'"port": {port},' in words[-1]):
            return [process, *process.children(recursive=True)]
    raise AssertionError(f"nothing at {url}")


async def interrupted(rig: Rig, harm: Callable[[], asyncio.Future | None]) -> list:
    """Runs eight long generations and `harm` once each has its first tokens; all must still complete."""
    growing = [PartialResponse() for _ in range(8)]
    requests = [
        asyncio.create_task(rig.client.generate([5, 6, 7 + i], keep=lambda ids, i=i: growing[i], ignore_eos=True))
        for i in range(8)
    ]
    async with asyncio.timeout(PATIENCE):
        while not all(map(len, growing)):
            assert not all(request.done() for request in requests), "too quick to be interrupted"
            await asyncio.sleep(0.02)
    result = harm()
    if result is not None:
        await result
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*requests)
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == TOKENS
        assert answer.finish_reason == "length"
    return answers


def check_logprobs(rig: Rig, answer) -> None:
    """The log-probs of the parts equal those of Hugging Face for the whole."""
    ours = reference(rig.model, answer.prompt_ids + answer.token_ids)[len(answer.prompt_ids) - 1 :]
    assert max(abs(a - b) for a, b in zip(answer.logprobs, ours, strict=True)) < 1e-3


async def test_requests_of_a_killed_server_are_finished_by_another(rig):
    victim, survivor = await rig.all_serve(2)
    answers = await interrupted(rig, lambda: family(victim)[1].kill())
    broken = [answer for answer in answers if answer.parts > 1]
    assert 0 < len(broken) < len(answers)
    check_logprobs(rig, broken[0])
    assert rig.gone == [victim]
    assert [control.url for control in rig.fleet.serving()] == [survivor]
    # It is started again as another server, which serves only once a sync has reached it.
    urls = await rig.all_serve(2)
    assert survivor in urls and victim not in urls
    assert rig.fleet.metrics()["fleet/restarts"] == 1.0
    await rig.fleet.watch()


async def test_a_stopped_server_is_detected_and_its_requests_continue(rig):
    victim, survivor = await rig.all_serve(2)
    stopped = family(victim)

    def stop() -> None:
        for process in stopped:
            process.suspend()

    answers = await interrupted(rig, stop)
    assert any(answer.parts > 1 for answer in answers)
    await until(lambda: not living(stopped))
    assert survivor in await rig.all_serve(2)


async def test_a_killed_router_restarts_at_its_address_with_the_serving_servers(rig):
    await rig.all_serve(2)
    url = rig.fleet.router.url
    answers = await interrupted(rig, lambda: family(url)[1].kill())
    assert all(answer.parts > 1 for answer in answers)
    assert rig.fleet.router.url == url
    assert rig.fleet.metrics()["fleet/router_restarts"] == 1.0
    await rig.fleet.watch()


async def test_the_fleet_grows_and_shrinks_while_requests_run(rig, monkeypatch):
    monkeypatch.setattr(fleet_processes, "PLACE_SECONDS", 3.0)
    before = await rig.all_serve(2)
    assert await rig.fleet.scaling.resize(3) == "2 -> 3 servers; the new ones serve after the next weight sync"
    assert len(rig.fleet.serving()) == 2
    (added,) = set(await rig.all_serve(3)) - set(before)
    with pytest.raises(MegasyncError, match="0 of 3 servers were added; the Ray cluster has no room.*needs {'CPU': 1}"):
        await rig.fleet.scaling.resize(6)
    with pytest.raises(ServerError, match="rollout=0 is below rollout.min_servers=1"):
        await rig.fleet.scaling.resize(0)
    answers = await interrupted(rig, lambda: rig.fleet.scaling.resize(1))
    assert any(answer.parts > 1 for answer in answers)
    assert [control.url for control in rig.fleet.serving()] == before[:1]
    assert {added, before[1]} <= set(rig.gone)
    # The room of those that went is there again.
    await until(lambda: ray.available_resources()["CPU"] >= 1)
    await rig.fleet.watch()
