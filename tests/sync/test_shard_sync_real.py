"""Four trainer processes (TP2 x PP2) publish shard to shard into two real servers of different size (TP1 and TP2)."""

import asyncio
from dataclasses import replace

import pytest
from processes import family, living, with_word
from real_servers import SharedServers, check_serves, checksums, generate, make_server, spans

from megasync.errors import SyncError
from megasync.layout.topology import Topology
from megasync.sync.shard.server import ShardServer

pytestmark = [pytest.mark.real, pytest.mark.shares(SharedServers.MARK)]

TOPOLOGY = Topology(tensor=2, pipeline=2)
BUCKET_BYTES = 16_384
# A parameter of the last stage that the first buckets do not hold.
LATE = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture
def world(models, dense_servers, control, publishing):
    """Makes (sync, ranks, servers)."""
    servers = [control(url) for url in dense_servers[1:]]

    async def make(seconds=20.0, stall=5.0, topology=TOPOLOGY, **options):
        options |= {"seconds": seconds, "stall": stall}
        return *await publishing("p2p", models[0][0][0], servers, topology, BUCKET_BYTES, **options), servers

    return make


@pytest.fixture
async def started(models, control, tmp_path):
    """Starts one more server of the first model: (the server, its control)."""
    servers = []

    async def start(port=0):
        servers.append(make_server(models[0][0][0], tmp_path / f"{len(servers)}.log", 1, port=port))
        return servers[-1], control(await servers[-1].start(120))

    yield start
    for server in servers:
        await server.stop(5)


def after(monkeypatch, phase):
    """An event that is set once a server has taken a phase of a publish."""
    call, event = getattr(ShardServer, phase), asyncio.Event()

    async def noted(server, *arguments):
        result = await call(server, *arguments)
        event.set()
        return result

    monkeypatch.setattr(ShardServer, phase, noted)
    return event


async def test_deltas_waves_and_a_small_arena_end_with_the_same_bits(world, models):
    expected = None
    for version, options in ((20, {"delta": True}), (30, {"wave": 1}), (40, {"arena_mb": 1, "arena": "device"})):
        sync, ranks, servers = await world(**options)
        if "arena_mb" in options:
            # Less than a version takes, and less than the configuration allows to ask for.
            sync._arena_bytes = 10_000
        moved = []
        for step in range(2):
            await ranks.call("load", str(models[0][step][0]), timeout=300)
            moved.append((await sync.publish(version + step)).bytes)
        if "delta" in options:
            again = await sync.publish(version + 2)
            assert again.bytes < 0.05 * moved[0]
        await check_serves(servers, models[0][1][1], version + (2 if "delta" in options else 1))
        held = [await checksums(server) for server in servers]
        assert held == (expected or held)
        expected = held


async def test_a_server_that_is_killed_while_it_stages_comes_back_through_a_full_sync(
    world, models, started, monkeypatch
):
    sync, ranks, servers = await world(stall=6.0, delta=True)
    server, late = await started()
    await sync.publish(70)
    sync.add(late)
    # The others have it; the late one is brought it alone.
    await sync.publish(70, only=[late.url])
    await check_serves([*servers, late], models[0][0][1], 70)
    await ranks.call("load", str(models[0][1][0]), timeout=300)
    await ranks.call_one(3, "set_trap", LATE, "slow", timeout=300)
    links = {other.url: sync._servers[other.url].links for other in servers}
    receiving = after(monkeypatch, "stage")
    publish = asyncio.create_task(sync.publish(71))
    await asyncio.wait({publish, asyncio.create_task(receiving.wait())}, return_when=asyncio.FIRST_COMPLETED)
    server.kill()
    with pytest.raises(SyncError, match=rf"version 71 was not published: .*{late.url}"):
        await publish
    await check_serves(servers, models[0][0][1], 70)
    await server.stop(5)
    await started(port=server.port)
    await sync.publish(72)
    await check_serves([*servers, late], models[0][1][1], 72)
    assert {other.url: sync._servers[other.url].links for other in servers} == links
    # Leaving is as simple as coming.
    sync.remove(late.url)
    await sync.publish(73)
    assert await late.weight_version() == 72


@pytest.mark.parametrize(
    ("phase", "quarantined"),
    [
        pytest.param("stage", False, id="while it stages", marks=pytest.mark.matrix),
        pytest.param("load", True, id="inside its commit"),
    ],
)
async def test_a_suspended_server_delays_no_other_and_recovers(world, models, started, monkeypatch, phase, quarantined):
    sync, ranks, servers = await world(seconds=12.0, stall=2.0)
    server, late = await started()
    url, call, stopped = late.url, getattr(ShardServer, phase), []

    async def still(updated, *arguments):
        if updated.url == url:
            stopped.extend(p for root in with_word(f"--port {server.port}") for p in family(root))
            assert stopped
            for process in stopped:
                process.suspend()
        return await call(updated, *arguments)

    try:
        sync.add(late)
        await sync.publish(100)
        await ranks.call("load", str(models[0][1][0]), timeout=300)
        with monkeypatch.context() as patch:
            patch.setattr(ShardServer, phase, still)
            with pytest.raises(
                SyncError, match=rf"version 101 was not published: .*{url}.*(no answer|no links)"
            ) as failure:
                await sync.publish(101)
        assert url in failure.value.failed
        assert list(sync.quarantined) == ([url] if quarantined else []), failure.value
        # Whoever committed serves the new version whole, whoever did not the one before.
        moved = set(failure.value.moved)
        assert moved == ({other.url for other in servers} if quarantined else set())
        await check_serves(servers, models[0][int(quarantined)][1], 101 if quarantined else 100)
        for process in stopped:
            process.resume()
        await sync.publish(102)
        assert sync.quarantined == {}
        await check_serves([*servers, late], models[0][1][1], 102)
    finally:
        for process in living(stopped):
            process.resume()


@pytest.mark.parametrize("left", ["receiving", "inside a commit"])
async def test_a_new_driver_takes_over_servers_that_a_dead_one_left(world, models, monkeypatch, caplog, left):
    sync, ranks, servers = await world(seconds=10.0, stall=3.0)
    await sync.connect()
    reached = after(monkeypatch, "stage" if left == "receiving" else "load")
    if left == "receiving":
        await ranks.call_one(3, "set_trap", LATE, "die", timeout=300)
    else:
        monkeypatch.setattr(sync, "_resume", lambda *_: asyncio.Event().wait())
    publish = asyncio.create_task(sync.publish(80))
    await reached.wait()
    # As if the process had gone: no clean-up at all.
    sync._clean_up = lambda attempt: asyncio.sleep(0)
    sync._involved = lambda attempt: []
    publish.cancel()
    await asyncio.gather(publish, return_exceptions=True)
    sync, ranks, servers = await world()
    await ranks.call("load", str(models[0][1][0]), timeout=300)
    await sync.publish(81)
    assert ("closing one that may still be open" in caplog.text) == (left != "receiving")
    await check_serves(servers, models[0][1][1], 81)


async def test_a_rank_that_fails_while_a_server_streams_quarantines_it_until_a_whole_version_came(world, models):
    sync, ranks, servers = await world(seconds=10.0, stall=1.5, arena_mb=1)
    sync._arena_bytes = 10_000
    await sync.publish(60)
    await ranks.call("load", str(models[0][2][0]), timeout=300)
    await ranks.call_one(3, "set_trap", LATE, "raise", timeout=300)
    with pytest.raises(
        SyncError, match=r"version 61 .*phase 'stream' failed: .*left paused, so as not to serve a mixture"
    ):
        await sync.publish(61)
    # The rank fails in whatever it does for one of the servers; the other one may have got everything by then.
    assert sync.quarantined
    mixed = [server for server in servers if server.url in sync.quarantined]
    waiting = [asyncio.create_task(generate(server, 4)) for server in mixed]
    await sync.publish(62)
    assert sync.quarantined == {}
    assert {version for answer in await asyncio.gather(*waiting) for version in spans(answer)} == {"62"}
    await check_serves(servers, models[0][2][1], 62)


async def test_restarted_ranks_may_be_fewer_and_more_again(world, models, local_ranks):
    whole = Topology(tensor=2, data=2)
    sync, ranks, servers = await world(topology=whole)
    await sync.publish(85)
    for version, data, seed in ((86, 1, 1), (87, 2, 2)):
        await ranks.stop()
        ranks = sync._ranks = await local_ranks(models[0][seed][0], replace(whole, data=data), BUCKET_BYTES)
        sync.forget_ranks(data)
        await sync.publish(version)
        assert {replica for server in sync._servers.values() for replica in server.feed.replicas} == set(range(data))
        await check_serves(servers, models[0][seed][1], version)


async def test_a_server_that_is_killed_inside_a_commit_harms_no_other(world, models, started, monkeypatch):
    sync, ranks, servers = await world()
    server, late = await started()
    load = ShardServer.load

    async def killed(updated, *arguments):
        if updated.url == late.url:
            server.kill()
            # They have sent everything, so nobody waits for them.
            await ranks.stop()
        return await load(updated, *arguments)

    sync.add(late)
    await sync.publish(90)
    await ranks.call("load", str(models[0][1][0]), timeout=300)
    monkeypatch.setattr(ShardServer, "load", killed)
    with pytest.raises(SyncError, match=rf"version 91 was not published: phase 'commit' failed: {late.url}") as failure:
        await sync.publish(91)
    assert failure.value.failed == (late.url,)
    assert set(failure.value.moved) == {server.url for server in servers}
    await check_serves(servers, models[0][1][1], 91)
