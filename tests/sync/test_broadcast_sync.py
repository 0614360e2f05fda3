"""The transaction's laws against servers and ranks that fail on demand: who goes on, who stays paused, what is said."""

import asyncio

import pytest
from fake_control import FakeControl

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.device import Device
from megasync.errors import ServerError, SyncError
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync import attempt as attempt_module
from megasync.sync import weight_sync
from megasync.sync.broadcast import sync as broadcast_sync
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 70,
}
PLAN = plan_broadcast(Layout(CONFIG, Topology(pipeline=2)), 1500, "float32")
UPDATE = "/update_weights_from_distributed"


class Server(FakeControl):
    """Takes buckets from the ranks while a weight update is open."""

    def __init__(self, url, ranks):
        super().__init__(url)
        self.ranks = ranks
        self.session = False
        self.loaded = []
        ranks.servers.append(self)

    async def answer(self, path, body):
        match path:
            case "/begin_weight_update":
                if self.session:
                    raise ServerError("session already open")
                self.session, self.loaded = True, []
            case "/end_weight_update":
                self.session = False
            case "/update_weights_from_distributed":
                assert self.paused
                assert self.session
                await self.ranks.broadcast(self)
                self.loaded += body["names"]
                self.version = body.get("weight_version", self.version)


class Ranks:
    """Trainer ranks of which a bucket can be had while they send and have not left."""

    def __init__(self):
        self.servers, self.calls, self.faults = [], [], {}
        self.sending, self.gone = asyncio.Event(), asyncio.Event()

    async def on_all(self, timeout, method, *args):
        method = method.__name__
        self.calls.append(method)
        fault = self.faults.get(method, [None])
        fault = fault.pop(0) if fault else None
        if fault == "hang":
            await asyncio.wait_for(asyncio.Event().wait(), timeout)
        if fault:
            raise SyncError(fault)
        match method:
            case "sync_listen":
                return [("127.0.0.1", 1000), ("127.0.0.1", 1001)]
            case "sync_join":
                self.sending.clear()
                self.gone.clear()
            case "sync_send":
                self.sending.set()
            case "sync_leave":
                self.gone.set()
                self.sending.clear()
        return [{"pack": 0.1, "wire": 0.2}, {"pack": 0.3, "wire": 0.1}]

    async def broadcast(self, server):
        waits = [asyncio.ensure_future(event.wait()) for event in (self.sending, self.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.gone.is_set():
            raise ServerError(f"POST {server.url}{UPDATE}: status 400: Failed to receive weights: closed")


@pytest.fixture
def world(monkeypatch):
    for module in (broadcast_sync, attempt_module, weight_sync):
        monkeypatch.setattr(module, "RECOVERY_SECONDS", 0.2)
    for module in (broadcast_sync, weight_sync):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)

    def make(pause_mode="retract", seconds=5.0):
        ranks = Ranks()
        servers = [Server(url, ranks) for url in ("http://a", "http://b")]
        timeouts = TimeoutConfig(weight_sync=seconds)
        sync = BroadcastSync(servers, ranks, PLAN, 2, SyncConfig(pause_mode=pause_mode), timeouts, Device("cpu"))
        return sync, servers, ranks

    return make


def paths(server):
    return [path for path, _ in server.calls]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_every_server_takes_every_bucket_in_plan_order_between_pause_and_continue(world, mode):
    sync, servers, _ = world(mode)
    report = await sync.publish(7)
    assert report.version == 7
    assert report.bytes == PLAN.nbytes * len(servers) * 2
    assert {"connect", "pause", "transfer", "continue", "pack", "wire"} <= report.seconds.keys()
    assert report.seconds["pack"] == 0.3
    for server in servers:
        flush = [] if mode == "in_place" else ["/flush_cache"]
        assert paths(server) == [
            "/init_weights_update_group",
            "/init_weights_update_group",
            "/pause_generation",
            *flush,
            "/begin_weight_update",
            *[UPDATE] * len(PLAN.buckets),
            "/end_weight_update",
            "/continue_generation",
        ]
        updates = [body for path, body in server.calls if path == UPDATE]
        assert [body["names"] for body in updates] == [[e.name for e in b.tensors] for b in PLAN.buckets]
        assert [body.get("weight_version") for body in updates] == [None] * (len(updates) - 1) + ["7"]
        assert not any(body["flush_cache"] for body in updates)
        assert (server.paused, server.session, server.version) == (False, False, "7")


async def test_engine_ranks_follow_the_sender_and_each_stage_has_a_group(world):
    sync, servers, _ = world()
    await sync.connect()
    joins = [[body for path, body in server.calls] for server in servers]
    assert [[body["rank_offset"] for body in join] for join in joins] == [[1, 1], [3, 3]]
    assert {body["world_size"] for join in joins for body in join} == {5}
    assert [body["group_name"] for body in joins[0]] == ["megasync-1-stage0", "megasync-1-stage1"]
    assert [body["master_port"] for body in joins[0]] == [1000, 1001]
    await sync.publish(1)
    assert paths(servers[0]).count("/init_weights_update_group") == 2, "publish connected again"


@pytest.mark.parametrize(
    ("path", "fault", "phase"),
    [
        ("/init_weights_update_group", "refused", "connect"),
        ("/pause_generation", "refused", "pause"),
        ("/flush_cache", "requests are running", "flush"),
        ("/begin_weight_update", "refused", "begin"),
        (UPDATE, "Failed to receive weights: closed", "transfer"),
    ],
)
async def test_before_anything_is_loaded_a_failure_leaves_the_old_version_serving(
    world, monkeypatch, path, fault, phase
):
    monkeypatch.setattr(attempt_module, "FLUSH_SECONDS", 0.0)
    sync, servers, ranks = world()
    ranks.faults["sync_send"] = ["refused"] if path == UPDATE else []
    servers[1].faults[path] = [fault]
    with pytest.raises(SyncError, match=rf"version 3 .*'{phase}'.*the previous version") as caught:
        await sync.publish(3)
    assert (caught.value.phase, caught.value.version, caught.value.quarantined) == (phase, 3, {})
    assert any(who in str(caught.value) for who in ("http://b", "trainer"))
    assert [(s.paused, s.session, s.version) for s in servers] == [(False, False, "0")] * 2
    assert (await sync.publish(3)).version == 3
    assert [s.version for s in servers] == ["3", "3"]


async def test_a_refused_flush_is_repeated(world):
    sync, servers, _ = world()
    servers[1].faults["/flush_cache"] = ["requests are running"] * 3
    assert (await sync.publish(3)).version == 3
    assert paths(servers[1]).count("/flush_cache") == 4


async def test_only_a_complete_publish_ends_the_quarantine_of_a_server_with_a_part_of_a_version(world):
    sync, servers, _ = world()
    servers[0].faults[UPDATE] = [None, "Failed to update parameter online: partially updated"]
    with pytest.raises(SyncError, match=r"http://a.*left paused.*http://a \(it loaded 1 of \d+ buckets of version 2"):
        await sync.publish(2)
    assert servers[0].paused
    assert "http://a" in sync.quarantined
    servers[1].faults["/pause_generation"] = ["refused"]
    with pytest.raises(SyncError, match="left paused.*http://a"):
        await sync.publish(3)
    assert servers[0].paused, "a failed publish released a server that holds a mixture"
    await sync.publish(4)
    assert not any(server.paused for server in servers)
    assert sync.quarantined == {}


@pytest.mark.parametrize(
    ("path", "fault", "words"),
    [
        ("/end_weight_update", "refused", "'end' failed: http://b"),
        ("/model_info", "refused", "'verify' failed: http://b"),
        ("/model_info", None, "http://b: it reports version 1 instead of 2"),
    ],
)
async def test_servers_stay_paused_when_one_of_them_cannot_confirm(world, monkeypatch, path, fault, words):
    sync, servers, _ = world()
    if fault:
        servers[1].faults[path] = [fault]
    else:
        monkeypatch.setattr(servers[1], "get", lambda path, timeout: asyncio.sleep(0, {"weight_version": "1"}))
    with pytest.raises(SyncError, match=words):
        await sync.publish(2)
    assert all(server.paused for server in servers)


async def test_a_failed_trainer_ends_the_wait_of_servers_and_they_resume(world):
    sync, servers, ranks = world()
    ranks.faults["sync_send"] = ["rank 1 died"]
    with pytest.raises(SyncError, match=r"trainer: rank 1 died.*the previous version"):
        await sync.publish(2)
    assert "sync_leave" in ranks.calls
    assert not any(server.paused or server.session for server in servers)
    await sync.publish(2)
    assert paths(servers[0]).count("/init_weights_update_group") == 4, "the broken groups were used again"


async def test_after_a_failure_no_further_bucket_is_requested_and_each_server_leaves_its_groups(world, monkeypatch):
    sync, servers, ranks = world()
    slow, release = servers[0], asyncio.Event()
    servers[1].faults[UPDATE] = ["Failed to update parameter online"]

    async def broadcast(server):
        if server is slow:
            await release.wait()

    monkeypatch.setattr(ranks, "broadcast", broadcast)
    publish = asyncio.create_task(sync.publish(2))
    while "/destroy_weights_update_group" not in paths(servers[1]):
        await asyncio.sleep(0)
    assert "/destroy_weights_update_group" not in paths(slow), "it was in a collective"
    release.set()
    with pytest.raises(SyncError, match=r"http://a \(it loaded 1 of"):
        await publish
    assert paths(slow).count(UPDATE) == 1
    assert paths(slow).count("/destroy_weights_update_group") == 2


@pytest.mark.parametrize("who", ["trainer", "server"])
async def test_a_call_without_an_answer_ends_at_the_deadline(world, who):
    sync, servers, ranks = world(seconds=1.0)
    if who == "trainer":
        ranks.faults["sync_send"] = ["hang"]
    else:
        servers[0].faults[UPDATE] = ["hang"]
    with pytest.raises(SyncError, match="trainer" if who == "trainer" else "http://a: .*no answer within") as failure:
        await sync.publish(2)
    if who == "server":
        assert paths(servers[0])[-1] == UPDATE, "a server that answers nothing was asked more"
        assert "in doubt; it is stuck" in sync.quarantined["http://a"]
        assert "http://b" in sync.quarantined, "it holds the new version, which was not published"
        assert failure.value.failed == ("http://a",)


async def test_cancelling_a_publish_releases_the_servers(world):
    sync, servers, ranks = world()
    ranks.faults["sync_send"] = ["hang"]
    publish = asyncio.create_task(sync.publish(2))
    while UPDATE not in paths(servers[0]):
        await asyncio.sleep(0)
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert not any(server.paused for server in servers)
    await sync.publish(2)


async def test_closing_leaves_both_sides_and_may_be_repeated(world):
    sync, servers, ranks = world()
    await sync.publish(1)
    await sync.close()
    await sync.close()
    assert ranks.calls.count("sync_leave") == 1
    assert paths(servers[1]).count("/destroy_weights_update_group") == 2


async def test_a_late_server_gets_the_current_version_without_the_others(world):
    sync, servers, ranks = world()
    await sync.publish(1)
    late = Server("http://late", ranks)
    calls = [paths(server).count(UPDATE) for server in servers]
    sync.add(late)
    report = await sync.publish(1, only=["http://late"])
    assert report.bytes == PLAN.nbytes * 2
    assert (late.version, late.paused) == ("1", False)
    assert [paths(server).count(UPDATE) for server in servers] == calls
    assert not any(server.paused for server in servers)
    await sync.publish(2)
    assert [server.version for server in (*servers, late)] == ["2"] * 3
    sizes = [body["world_size"] for path, body in late.calls if path == "/init_weights_update_group"]
    assert sizes == [3, 3, 7, 7]


async def test_a_removed_server_no_longer_gets_versions(world):
    sync, servers, _ = world()
    await sync.publish(1)
    servers[0].faults["/pause_generation"] = ["refused"]
    with pytest.raises(SyncError) as failure:
        await sync.publish(2)
    assert failure.value.failed == ("http://a",)
    sync.remove("http://a")
    await sync.publish(2)
    assert [(server.version, server.paused) for server in servers] == [("1", False), ("2", False)]
    with pytest.raises(SyncError, match="http://a: it is no longer among the servers"):
        await sync.publish(2, only=["http://a"])
    await sync.publish(3)
    assert servers[1].version == "3"


async def test_new_ranks_get_new_groups(world):
    sync, servers, ranks = world()
    await sync.publish(1)
    sync.forget_ranks(1)
    await sync.publish(2)
    assert ranks.calls.count("sync_join") == 2
    assert paths(servers[0]).count("/destroy_weights_update_group") == 2
    assert [server.version for server in servers] == ["2", "2"]
