"""Which transport a run gets, and what it says of it."""

import pytest

from megasync.config import Config
from megasync.device import Device
from megasync.errors import RankLost, ServerError
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.attempt import Attempt, PhaseFailed, PublishError
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.sync.choose import choose_sync
from megasync.sync.disk.sync import DiskSync
from megasync.sync.shard.sync import ShardSync

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "num_hidden_layers": 1,
}


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Chooses for one run whose servers answer `connect` as they are told to; no process is asked."""
    connected = []

    async def fake_connect(sync):
        if isinstance(sync, ShardSync) and refusal is not None:
            failure = PhaseFailed({"http://server": refusal})
            raise Attempt(0, {}).error(failure, {}) from failure
        connected.append(type(sync))

    async def fake_close(sync):
        connected.append(None)

    refusal = None
    for kind in (ShardSync, BroadcastSync, DiskSync):
        monkeypatch.setattr(kind, "connect", fake_connect)
        monkeypatch.setattr(kind, "close", fake_close)

    async def make(transport, refused=None, **rollout):
        nonlocal refusal
        refusal = refused
        config = Config()
        for key, value in rollout.items():
            setattr(config.rollout, key, value)
        config.sync.transport = transport
        config.model.path = str(tmp_path)
        sync, why = await choose_sync(config, tmp_path, Layout(CONFIG, Topology()), None, [], Device("cpu"))
        assert connected[-1] is type(sync)
        return type(sync), why

    return make


async def test_auto_takes_shards_where_every_server_can(chosen):
    kind, why = await chosen("auto")
    assert kind is ShardSync
    assert why.startswith("weights go shard to shard: every server has the plugin")


async def test_auto_goes_by_broadcast_where_a_server_cannot_take_shards_and_says_why(chosen):
    kind, why = await chosen("auto", ServerError("it runs without the plugin"))
    assert kind is BroadcastSync
    assert "weights go by broadcast: the servers cannot take shards" in why
    assert "it runs without the plugin" in why


@pytest.mark.parametrize("parts", [{"pipeline_parallel": 2}, {"prefill_engines": 1, "decode_engines": 1}])
async def test_servers_of_several_parts_do_not_fall_back_to_broadcast(chosen, parts):
    with pytest.raises(PublishError, match="it runs without the plugin"):
        await chosen("auto", ServerError("it runs without the plugin"), **parts)


async def test_what_is_asked_for_is_taken_or_refused(chosen):
    for transport, kind in (("p2p", ShardSync), ("broadcast", BroadcastSync), ("disk", DiskSync)):
        found, why = await chosen(transport)
        assert found is kind
        assert kind is ShardSync or "sync.transport selects it" in why
    with pytest.raises(PublishError, match="it runs without the plugin"):
        await chosen("p2p", ServerError("it runs without the plugin"))


async def test_a_lost_rank_is_no_reason_to_choose_another_transport(chosen):
    with pytest.raises(PublishError, match="rank 1 is gone"):
        await chosen("auto", RankLost("rank 1 is gone"))
