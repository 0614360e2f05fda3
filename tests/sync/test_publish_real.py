"""Two trainer ranks publish into two stock SGLang servers on a CPU, with and without failures."""

import asyncio
import time

import pytest
from real_servers import SharedServers, answered, check_answers, check_serves, generate, steady_traffic

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.device import Device
from megasync.errors import SyncError
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync

pytestmark = [pytest.mark.real, pytest.mark.shares(SharedServers.MARK)]

TOPOLOGY = Topology(tensor=2)
BUCKET_BYTES = 16_384


@pytest.fixture
def urls(dense_servers):
    return dense_servers[:2]


@pytest.fixture
async def world(models, urls, local_ranks):
    """(sync, ranks, servers); `mode` is a pause mode, `seconds` the deadline of a phase."""
    servers = [ServerControl(url) for url in urls]
    syncs = []

    async def make(mode="retract", seconds=20.0):
        ranks = await local_ranks(models[0][0][0], TOPOLOGY, BUCKET_BYTES)
        plan = plan_broadcast(Layout(models[1], TOPOLOGY), BUCKET_BYTES, "float32")
        assert len(plan.buckets) > 3
        timeouts = TimeoutConfig(weight_sync=seconds)
        sync = BroadcastSync(servers, ranks, plan, 1, SyncConfig(pause_mode=mode), timeouts, Device("cpu"))
        # Group names count from one in each BroadcastSync; servers outlive the one of a test.
        sync._connections = int(time.monotonic() * 1000)
        syncs.append(sync)
        return sync, ranks, servers

    yield make
    for sync in syncs:
        await sync.close()
    for server in servers:
        await server.close()


@pytest.mark.parametrize("mode", [pytest.param("retract", marks=pytest.mark.standard), "in_place", "abort"])
async def test_after_a_publish_under_traffic_servers_compute_what_the_trainer_holds(world, models, mode):
    sync, ranks, servers = await world(mode)
    for version, seed in ((11, 1), (12, 2)):
        folder, model = models[0][seed]
        await ranks.call("load", str(folder), timeout=20)
        async with steady_traffic(servers) as clients:
            report = await sync.publish(version)
        assert report.bytes == 2 * sum(p.numel() for p in model.parameters()) * 4
        await check_serves(servers, model, version)
        check_answers(clients, version, aborting=mode == "abort")


async def test_a_request_that_arrives_during_a_sync_waits_and_gets_the_new_version(world, models):
    sync, ranks, servers = await world()
    await ranks.call("load", str(models[0][1][0]), timeout=20)
    await ranks.call_one(1, "set_trap", "decoder.layers.0.mlp.linear_fc1.weight", "slow", timeout=5)
    paused = answered(servers[0], "/pause_generation")
    publish = asyncio.create_task(sync.publish(21))
    async with asyncio.timeout(30):
        await paused.wait()
    late = asyncio.create_task(generate(servers[0], 4))
    await asyncio.sleep(0.5)
    assert not late.done()
    await publish
    assert [span["version"] for span in (await late)["weight_versions"]] == ["21"]


async def test_a_sender_that_fails_before_the_first_bucket_changes_nothing(world, models):
    sync, ranks, servers = await world()
    await sync.publish(30)
    await ranks.call("load", str(models[0][1][0]), timeout=20)
    await ranks.call_one(0, "set_trap", "embedding.word_embeddings.weight", "raise", timeout=5)
    with pytest.raises(SyncError, match=r"version 31 .*'transfer'.*rank 0 failed to send.*the previous version"):
        await sync.publish(31)
    await check_serves(servers, models[0][0][1], 30)
    await sync.publish(31)
    await check_serves(servers, models[0][1][1], 31)


async def test_a_peer_that_fails_in_the_middle_leaves_no_mixture_serving(world, models):
    sync, ranks, servers = await world()
    await ranks.call("load", str(models[0][2][0]), timeout=20)
    await ranks.call_one(1, "set_trap", "decoder.layers.1.mlp.linear_fc2.weight", "raise", timeout=5)
    with pytest.raises(SyncError, match=r"left paused.*loaded \d of \d+ buckets of version 41"):
        await sync.publish(41)
    waiting = [asyncio.create_task(generate(server, 4)) for server in servers]
    await asyncio.sleep(0.5)
    assert not any(request.done() for request in waiting)
    await sync.publish(42)
    assert sync.quarantined == {}
    assert {span["version"] for meta in await asyncio.gather(*waiting) for span in meta["weight_versions"]} == {"42"}
    await check_serves(servers, models[0][2][1], 42)


async def test_a_sender_that_is_killed_ends_the_publish_in_time(world, models):
    sync, ranks, servers = await world(seconds=10.0)
    await sync.publish(50)
    await ranks.call_one(0, "set_trap", "embedding.word_embeddings.weight", "die", timeout=5)
    async with asyncio.timeout(30):
        with pytest.raises(SyncError, match=r"version 51 .*'transfer' failed: trainer: .*rank 0 (died|is dead)"):
            await sync.publish(51)
    # No bucket was on the wire, so the servers notice that the sender is gone, and go on.
    assert sync.quarantined == {}
    await check_serves(servers, models[0][0][1], 50)
