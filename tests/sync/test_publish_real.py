"""Trainer ranks publish into real SGLang servers by each transport; whole tensors and folders also fail on the way."""

import asyncio
import hashlib
import json

import pytest
from real_servers import (
    SharedServers,
    answered,
    check_answers,
    check_bits,
    check_serves,
    generate,
    spans,
    steady_traffic,
)

from megasync.errors import SyncError
from megasync.layout.topology import Topology
from megasync.serving.plugin_control import PluginControl

pytestmark = [pytest.mark.real, pytest.mark.shares(SharedServers.MARK)]

STAGES = Topology(tensor=2, pipeline=2)
BUCKET_BYTES = 16_384
# A parameter of the last stage that its first bucket does not hold.
LATE = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture
def make(models, dense_servers, control, publishing):
    """Makes (transport, ranks, servers); p2p goes to servers of one and of two ranks, the others to two of one rank.

    Only the first ``known`` servers belong to the transport.
    """

    async def make(kind, topology=STAGES, known=2, **options):
        servers = [control(url) for url in (dense_servers[1:] if kind == "p2p" else dense_servers[:2])]
        sync, ranks = await publishing(kind, models[0][0][0], servers[:known], topology, BUCKET_BYTES, **options)
        return sync, ranks, servers

    return make


@pytest.mark.parametrize("mode", [pytest.param("retract", marks=pytest.mark.standard), "in_place", "abort"])
@pytest.mark.parametrize(
    ("kind", "topology"),
    [("p2p", STAGES), ("broadcast", Topology(tensor=2)), ("disk", Topology(tensor=2))],
    ids=["p2p", "broadcast", "disk"],
)
async def test_after_a_publish_under_traffic_servers_hold_the_bits_that_a_load_gives(
    make, models, tmp_path, monkeypatch, kind, topology, mode
):
    sync, ranks, servers = await make(kind, topology, pause_mode=mode)
    call, commands, links = PluginControl.call, [], []

    async def noted(control, command, *arguments):
        commands.append(command)
        return await call(control, command, *arguments)

    monkeypatch.setattr(PluginControl, "call", noted)
    for version, seed in ((11, 1), (12, 2)):
        commands.clear()
        links.append([getattr(server, "links", "") for server in sync._servers.values()])
        folder, model = models[0][seed]
        await ranks.call("load", str(folder), timeout=300)
        async with steady_traffic(servers) as clients:
            report = await sync.publish(version)
        nbytes = sum(p.numel() for p in model.parameters()) * 4
        least = nbytes if kind == "disk" else 2 * nbytes
        # Some of what a server of two ranks gets goes to both.
        assert report.bytes == least or (kind == "p2p" and report.bytes > least)
        await check_serves(servers, model, version)
        check_answers(clients, version, aborting=mode == "abort")
    # A server that generates answers late, so the second publish asks each only to stage, over the links of the first.
    assert set(commands) <= {"stage", "poll"}
    links.append([getattr(server, "links", "") for server in sync._servers.values()])
    assert links[1] == links[2]
    await check_bits(servers, models[0][2][0])
    if kind == "disk":
        for name, written in json.loads((tmp_path / "sync" / "v12" / "manifest.json").read_text())["files"].items():
            assert hashlib.sha256((tmp_path / "sync" / "v12" / name).read_bytes()).hexdigest() == written["sha256"]


# Whole tensors


async def test_a_request_that_arrives_during_a_sync_waits_and_gets_the_new_version(make, models):
    sync, ranks, servers = await make("broadcast", Topology(tensor=2))
    await ranks.call("load", str(models[0][1][0]), timeout=300)
    await ranks.call_one(1, "set_trap", "decoder.layers.0.mlp.linear_fc1.weight", "slow", timeout=300)
    paused = answered(servers[0], "/pause_generation")
    publish = asyncio.create_task(sync.publish(21))
    await paused.wait()
    late = asyncio.create_task(generate(servers[0], 4))
    await publish
    assert spans(await late) == ["21"]


async def test_a_sender_that_fails_before_the_first_bucket_changes_nothing(make, models):
    sync, ranks, servers = await make("broadcast", Topology(tensor=2))
    await sync.publish(30)
    await ranks.call("load", str(models[0][1][0]), timeout=300)
    await ranks.call_one(0, "set_trap", "embedding.word_embeddings.weight", "raise", timeout=300)
    with pytest.raises(SyncError, match=r"version 31 .*'transfer'.*rank 0 failed to send.*the previous version"):
        await sync.publish(31)
    await check_serves(servers, models[0][0][1], 30)
    await sync.publish(31)
    await check_serves(servers, models[0][1][1], 31)


async def test_a_peer_that_fails_in_the_middle_leaves_no_mixture_serving(make, models):
    sync, ranks, servers = await make("broadcast", Topology(tensor=2))
    await ranks.call("load", str(models[0][2][0]), timeout=300)
    await ranks.call_one(1, "set_trap", "decoder.layers.1.mlp.linear_fc2.weight", "raise", timeout=300)
    with pytest.raises(SyncError, match=r"left paused.*loaded \d of \d+ buckets of version 41"):
        await sync.publish(41)
    waiting = [asyncio.create_task(generate(server, 4)) for server in servers]
    await sync.publish(42)
    assert sync.quarantined == {}
    # Had a server answered while it was paused, its tokens would be of an older version.
    assert {version for answer in await asyncio.gather(*waiting) for version in spans(answer)} == {"42"}
    await check_serves(servers, models[0][2][1], 42)


async def test_a_sender_that_is_killed_ends_the_publish_in_time(make, models):
    sync, ranks, servers = await make("broadcast", Topology(tensor=2), seconds=10.0)
    await sync.publish(50)
    await ranks.call_one(0, "set_trap", "embedding.word_embeddings.weight", "die", timeout=300)
    with pytest.raises(SyncError, match=r"version 51 .*'transfer' failed: trainer: .*rank 0 (died|is dead)"):
        await sync.publish(51)
    # No bucket was on the wire, so the servers notice that the sender is gone, and go on.
    assert sync.quarantined == {}
    await check_serves(servers, models[0][0][1], 50)


# Folders


@pytest.mark.parametrize("fault", ["raise", "die"])
async def test_a_rank_that_fails_while_it_writes_changes_nothing(make, models, tmp_path, fault):
    sync, ranks, servers = await make("disk")
    await sync.publish(50)
    await ranks.call("load", str(models[0][1][0]), timeout=300)
    await ranks.call_one(3, "set_trap", LATE, fault, timeout=300)
    traffic = [asyncio.create_task(generate(server, 300)) for server in servers]
    with pytest.raises(SyncError, match=r"version 51 was not published: phase 'write' failed: .*the previous version"):
        await sync.publish(51)
    assert sync.quarantined == {}
    assert [path.name for path in (tmp_path / "sync").glob("[!.]*")] == ["v50"]
    for answer in await asyncio.gather(*traffic):
        assert (answer["finish_reason"]["type"], set(spans(answer))) == ("length", {"50"})
    await check_serves(servers, models[0][0][1], 50)
    if fault == "die":
        await sync.close()
        sync, ranks, servers = await make("disk")
        await ranks.call("load", str(models[0][1][0]), timeout=300)
    await sync.publish(51)
    await check_serves(servers, models[0][1][1], 51)


async def test_a_folder_that_a_server_does_not_see_leaves_it_serving_and_a_late_one_is_brought(make, models):
    sync, ranks, servers = await make("disk", known=1)
    await sync.publish(60)
    await ranks.call("load", str(models[0][2][0]), timeout=300)
    visible, sync._folders.seal = sync._folders.seal, lambda *args: hide(visible(*args))

    def hide(path):
        return path.rename(path.with_name("hidden")).with_name("not_there")

    with pytest.raises(SyncError, match=r"version 61 .*'load' failed: .*the previous version"):
        await sync.publish(61)
    assert sync.quarantined == {}
    await check_serves(servers[:1], models[0][0][1], 60)
    del sync._folders.seal
    traffic = asyncio.create_task(generate(servers[0], 300))
    sync.add(servers[1])
    await sync.publish(60, only=[servers[1].url])
    assert spans(await traffic) == ["60"]
    await check_serves(servers, models[0][0][1], 60)
    await sync.publish(61)
    await check_serves(servers, models[0][2][1], 61)
