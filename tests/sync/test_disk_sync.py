"""The laws of a publish through a folder, with servers and ranks that fail on demand: who serves what afterwards."""

import asyncio
from pathlib import Path

import pytest
import torch
from fake_control import FakeControl

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.errors import SyncError
from megasync.layout.layout import Layout
from megasync.layout.shards import part_name
from megasync.layout.topology import Topology
from megasync.sync import attempt as attempt_module
from megasync.sync import weight_sync
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.disk.sync import NOT_LOADED, DiskSync
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.disk.writer import write_bucket
from megasync.sync.groups import Deadline
from megasync.sync.messages import WriteReport

LOAD = "/update_weights_from_disk"


class Server(FakeControl):
    """Loads folders that are complete; ``nodes`` and ``tp`` are what it says of itself."""

    def __init__(self, url, nodes=1, tp=1):
        super().__init__(url)
        self.nodes, self.tp = nodes, tp
        self.loaded, self.sum = [], "old"

    async def get(self, path, timeout):
        info = await super().get(path, timeout)
        return info | {"tp_size": self.tp, "pp_size": 1, "dtype": "float32", "quantization": None, "nnodes": self.nodes}

    async def answer(self, path, body):
        match path:
            case "/update_weights_from_disk":
                assert self.paused
                assert not body["flush_cache"]
                folder = Path(body["model_path"])
                assert (folder / "manifest.json").is_file()
                self.loaded.append(folder.name)
                self.version, self.sum = body["weight_version"], f"{folder.name}/{self.tp}"
            case "/weights_checker":
                return {"ranks": [{"checksums": {"weight": self.sum}}] * self.tp}


class Ranks:
    """Two ranks of which the first writes all files of a plan. ``faults``: method -> what happens to the n-th call."""

    def __init__(self, plan):
        self.plan, self.calls, self.faults = plan, [], {}

    async def on_all(self, timeout, method, *args):
        method = method.__name__
        self.calls.append(method)
        fault = self.faults.get(method) and self.faults[method].pop(0)
        files = {}
        if method == "disk_write":
            for index, bucket in enumerate(self.plan.buckets):
                message = torch.zeros(bucket.nbytes, dtype=torch.uint8)
                name = part_name(index, len(self.plan.buckets))
                files[name] = write_bucket(Path(args[0]) / name, bucket, message, Deadline(5))
                if fault:
                    break
        if fault:
            raise SyncError(fault)
        seconds = {"pack": 0.1, "wire": 0.0, "disk": 0.2}
        return [WriteReport(files, seconds), WriteReport({}, seconds)]


@pytest.fixture
def world(make_model, save_model, tmp_path, monkeypatch):
    """Makes (sync, servers, ranks, names of what stands in the folder)."""
    monkeypatch.setattr(attempt_module, "RECOVERY_SECONDS", 0.2)
    monkeypatch.setattr(weight_sync, "RECOVERY_SECONDS", 0.2)
    monkeypatch.setattr(attempt_module, "FLUSH_SECONDS", 0.0)

    def make(*servers, mode="retract", seconds=5.0):
        source = tmp_path / "source"
        plan = plan_broadcast(Layout(save_model(make_model(), source), Topology()), 3000, "float32")
        folders = VersionFolders(tmp_path / "sync", source, plan, keep=2)
        ranks = Ranks(plan)
        servers = servers or (Server("http://a"), Server("http://b"))
        config, timeouts = SyncConfig(pause_mode=mode), TimeoutConfig(weight_sync=seconds)
        sync = DiskSync(servers, ranks, plan, folders, config, timeouts)
        return sync, servers, ranks, lambda: sorted(path.name for path in folders.root.glob("[!.]*"))

    return make


def state(server):
    return int(server.version), server.paused


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_a_version_is_sealed_before_any_server_pauses_and_old_ones_are_pruned(world, mode):
    sync, servers, ranks, names = world(mode=mode)
    await sync.connect()
    for version in (1, 2, 3):
        report = await sync.publish(version)
        assert report.version == version
        assert report.bytes == ranks.plan.nbytes
        assert {"write", "seal", "pause", "load", "verify", "continue", "pack", "disk"} <= report.seconds.keys()
    assert names() == ["v2", "v3"]
    assert ranks.calls == ["disk_listen", "disk_join", *["disk_write"] * 3]
    expected = ["/pause_generation", "/flush_cache", LOAD, "/weights_checker", "/continue_generation"]
    if mode == "in_place":
        expected.remove("/flush_cache")
    for server in servers:
        assert [path for path, _ in server.calls] == expected * 3
        assert server.loaded == ["v1", "v2", "v3"]
        assert state(server) == (3, False)
    await sync.close()
    assert ranks.calls[-1] == "disk_leave"


async def test_a_write_that_fails_touches_no_server_and_leaves_nothing_behind(world):
    sync, servers, ranks, names = world()
    await sync.publish(1)
    calls = [len(server.calls) for server in servers]
    ranks.faults["disk_write"] = ["trainer rank 0 failed to write version 2: x cannot be written: No space left"]
    with pytest.raises(
        SyncError,
        match=r"version 2 .*'write' failed: trainer: .*No space left; every server keeps serving the previous version",
    ):
        await sync.publish(2)
    assert names() == ["v1"]
    assert [len(server.calls) for server in servers] == calls
    assert ranks.calls[-1] == "disk_leave"
    await sync.publish(2)
    assert ranks.calls[-3:] == ["disk_listen", "disk_join", "disk_write"]
    assert [state(server) for server in servers] == [(2, False)] * 2


@pytest.mark.parametrize("path", ["/server_info", "/pause_generation", "/flush_cache"])
async def test_a_server_that_fails_before_its_load_resumes_with_the_previous_version(world, path):
    sync, servers, _, _ = world()
    await sync.publish(1)
    servers[0].faults[path] = ["refused", "refused"]
    with pytest.raises(
        SyncError,
        match=r"http://a.*refused; version 2 is served by http://b; every other server keeps serving the prev",
    ) as failure:
        await sync.publish(2)
    assert failure.value.failed == ("http://a",)
    assert sync.quarantined == {}
    assert [state(server) for server in servers] == [(1, False), (2, False)]
    servers[0].faults.clear()
    await sync.publish(3)
    assert [state(server) for server in servers] == [(3, False)] * 2


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_folder_that_cannot_be_opened_leaves_a_server_on_one_node_with_its_version(world, nodes):
    sync, servers, _, _ = world(Server("http://a", nodes), Server("http://b", nodes))
    servers[0].faults[LOAD] = [f"{NOT_LOADED}: no such folder"]
    with pytest.raises(SyncError, match=r"'load' failed: http://a: .*no such folder"):
        await sync.publish(1)
    # On two nodes it is not known what the ranks of the second one did.
    assert set(sync.quarantined) == ({"http://a"} if nodes == 2 else set())
    assert state(servers[0]) == (0, nodes == 2)
    assert state(servers[1]) == (1, False)


async def test_a_server_that_fails_inside_its_load_stays_paused_until_it_has_a_complete_version(world):
    sync, servers, _, names = world(seconds=1.5)
    servers[0].faults[LOAD] = ["hang"]
    with pytest.raises(
        SyncError,
        match=r"version 1 .*'load' failed: http://a.*left paused.*http://a \(it may hold parts of version 1\)",
    ):
        await sync.publish(1)
    assert set(sync.quarantined) == {"http://a"}
    # A failure before the load does not end the quarantine.
    servers[0].faults["/flush_cache"] = ["refused"]
    with pytest.raises(SyncError, match="'flush' failed"):
        await sync.publish(2)
    assert set(sync.quarantined) == {"http://a"}
    assert [state(server) for server in servers] == [(0, True), (2, False)]
    servers[0].faults[LOAD] = ["hang"]
    for version in (3, 4, 5):
        if version == 3:
            with pytest.raises(SyncError, match="'load' failed"):
                await sync.publish(version)
            sync.remove("http://a")
        else:
            await sync.publish(version)
    # The removed server may still be reading v3.
    assert names() == ["v3", "v4", "v5"]
    sync.add(servers[0])
    await sync.publish(6)
    assert sync.quarantined == {}
    assert [state(server) for server in servers] == [(6, False)] * 2


async def test_a_server_that_is_added_again_is_no_longer_quarantined(world):
    sync, servers, _, _ = world()
    servers[0].faults[LOAD] = ["broken"]
    with pytest.raises(SyncError, match="'load' failed"):
        await sync.publish(1)
    # The same address, after a restart.
    restarted = Server("http://a")
    sync.add(restarted)
    restarted.faults["/flush_cache"] = ["refused"]
    with pytest.raises(SyncError, match="'flush' failed"):
        await sync.publish(2)
    assert (sync.quarantined, state(restarted)) == ({}, (0, False))


async def test_weights_that_differ_among_servers_of_a_kind_never_serve(world):
    sync, servers, _, _ = world(*(Server(f"http://{name}") for name in "abc"), Server("http://d", tp=2))
    await sync.publish(1)
    original = servers[1].answer

    async def damaged(path, body):
        answer = await original(path, body)
        servers[1].sum = "flipped" if path == LOAD else servers[1].sum
        return answer

    servers[1].answer = damaged
    with pytest.raises(SyncError, match=r"'verify' failed: http://b: its weights have another checksum .*kind \(TP 1"):
        await sync.publish(2)
    assert set(sync.quarantined) == {"http://b"}
    assert [server.paused for server in servers] == [False, True, False, False]
    # With two servers that differ there is no majority.
    sync.remove("http://c")
    with pytest.raises(SyncError, match="'verify'"):
        await sync.publish(3)
    assert set(sync.quarantined) == {"http://a", "http://b"}
    servers[1].answer = original
    await sync.publish(4)
    assert [state(server) for server in servers] == [(4, False), (4, False), (2, False), (4, False)]


async def test_a_late_server_gets_the_last_published_version_without_the_others(world):
    sync, servers, ranks, _ = world()
    early, late = Server("http://early"), Server("http://late")
    sync.add(early)
    assert early.calls == []
    await sync.publish(1)
    ranks.faults["disk_write"] = ["lost"]
    with pytest.raises(SyncError):
        await sync.publish(2)
    calls = [len(server.calls) for server in servers]
    late.sum = "flipped"
    sync.add(late)
    report = await sync.publish(1, only=["http://late"])
    assert report.bytes == 0, "a version that is on the disk was written again"
    assert state(late) == (1, False)
    assert [len(server.calls) for server in servers] == calls
    # What the others had after loading it is what a late one must have.
    wrong = Server("http://wrong")
    wrong.tp = 1
    wrong.answer = lambda path, body: asyncio.sleep(0, {"ranks": [{"checksums": {"weight": "flipped"}}]})
    wrong.version = "1"
    with pytest.raises(SyncError, match="http://wrong: its weights have another checksum"):
        sync.add(wrong)
        await sync.publish(1, only=["http://wrong"])
    sync.remove("http://wrong")
    await sync.publish(3)
    assert [state(server) for server in (*servers, early, late)] == [(3, False)] * 4


async def test_a_cancelled_publish_releases_servers_that_hold_one_version(world):
    sync, servers, _, names = world(seconds=30.0)
    await sync.publish(1)
    servers[0].faults["/flush_cache"] = ["hang"]
    publish = asyncio.create_task(sync.publish(2))
    while not any(path == "/flush_cache" for path, _ in servers[0].calls[5:]):
        await asyncio.sleep(0)
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert [state(server) for server in servers] == [(1, False)] * 2
    assert names() == ["v1", "v2"]
