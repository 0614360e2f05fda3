"""Four trainer processes (TP2 x PP2) publish through a folder into two stock servers, one of which may come late."""

import asyncio
import hashlib
import json

import pytest
from real_servers import SharedServers, check_answers, check_serves, checksums, generate, steady_traffic

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.errors import SyncError
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.disk.sync import DiskSync
from megasync.sync.disk.version_folders import VersionFolders

pytestmark = [pytest.mark.real, pytest.mark.shares(SharedServers.MARK)]

TOPOLOGY = Topology(tensor=2, pipeline=2)
BUCKET_BYTES = 16_384
# A parameter of the last stage that its first bucket does not hold.
LATE = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture
def urls(dense_servers):
    return dense_servers[:2]


@pytest.fixture
async def world(models, urls, local_ranks, tmp_path):
    """Makes (sync, ranks, servers); only the first ``known`` servers belong to the sync."""
    servers = [ServerControl(url) for url in urls]
    syncs = []

    async def make(mode="retract", known=2):
        ranks = await local_ranks(models[0][0][0], TOPOLOGY, BUCKET_BYTES)
        plan = plan_broadcast(Layout(models[1], TOPOLOGY), BUCKET_BYTES, "float32")
        assert len(plan.of_stage(1)) > 2
        folders = VersionFolders(tmp_path / "sync", models[0][0][0], plan, keep=2)
        config, timeouts = SyncConfig(pause_mode=mode), TimeoutConfig(weight_sync=60.0)
        syncs.append(DiskSync(servers[:known], ranks, plan, folders, config, timeouts))
        return syncs[-1], ranks, servers

    yield make
    for sync in syncs:
        await sync.close()
    for server in servers:
        await server.close()


@pytest.mark.parametrize("mode", [pytest.param("retract", marks=pytest.mark.standard), "in_place", "abort"])
async def test_after_a_publish_under_traffic_servers_hold_the_bits_that_a_load_gives(world, models, tmp_path, mode):
    sync, ranks, servers = await world(mode)
    for version, seed in ((11, 1), (12, 2)):
        folder, model = models[0][seed]
        await ranks.call("load", str(folder), timeout=20)
        async with steady_traffic(servers) as clients:
            report = await sync.publish(version)
        assert report.bytes == sum(p.numel() for p in model.parameters()) * 4
        await check_serves(servers, model, version)
        check_answers(clients, version, aborting=mode == "abort")
    published = [await checksums(server) for server in servers]
    for server in servers:
        await server.post("/update_weights_from_disk", {"model_path": str(models[0][2][0])}, timeout=60)
    assert [await checksums(server) for server in servers] == published
    for name, written in json.loads((tmp_path / "sync" / "v12" / "manifest.json").read_text())["files"].items():
        assert hashlib.sha256((tmp_path / "sync" / "v12" / name).read_bytes()).hexdigest() == written["sha256"]


@pytest.mark.parametrize("fault", ["raise", "die"])
async def test_a_rank_that_fails_while_it_writes_changes_nothing(world, models, tmp_path, fault):
    sync, ranks, servers = await world()
    await sync.publish(50)
    await ranks.call("load", str(models[0][1][0]), timeout=20)
    await ranks.call_one(3, "set_trap", LATE, fault, timeout=5)
    traffic = [asyncio.create_task(generate(server, 300)) for server in servers]
    with pytest.raises(SyncError, match=r"version 51 was not published: phase 'write' failed: .*the previous version"):
        await sync.publish(51)
    assert sync.quarantined == {}
    assert [path.name for path in (tmp_path / "sync").glob("[!.]*")] == ["v50"]
    for answer in await asyncio.gather(*traffic):
        assert answer["finish_reason"]["type"] == "length"
        assert {span["version"] for span in answer["weight_versions"]} == {"50"}
    await check_serves(servers, models[0][0][1], 50)
    if fault == "die":
        await sync.close()
        sync, ranks, servers = await world()
        await ranks.call("load", str(models[0][1][0]), timeout=20)
    await sync.publish(51)
    await check_serves(servers, models[0][1][1], 51)


async def test_a_folder_that_a_server_does_not_see_leaves_it_serving_and_a_late_one_is_brought(world, models, tmp_path):
    sync, ranks, servers = await world(known=1)
    await sync.publish(60)
    await ranks.call("load", str(models[0][2][0]), timeout=20)
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
    assert [span["version"] for span in (await traffic)["weight_versions"]] == ["60"]
    await check_serves(servers, models[0][0][1], 60)
    await sync.publish(61)
    await check_serves(servers, models[0][2][1], 61)
