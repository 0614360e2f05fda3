"""Which transport a run gets, and what it says of it."""

import re

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


NO_PLUGIN = ServerError("it runs without the plugin")


@pytest.mark.parametrize(
    ("transport", "refused", "kind", "words"),
    [
        ("auto", None, ShardSync, "weights go shard to shard: every server has the plugin"),
        (
            "auto",
            NO_PLUGIN,
            BroadcastSync,
            "weights go by broadcast: the servers cannot.*without the plugin",
        ),
        ("p2p", None, ShardSync, ""),
        ("broadcast", None, BroadcastSync, "sync.transport selects it"),
        ("disk", None, DiskSync, "sync.transport selects it"),
    ],
)
async def test_what_is_asked_for_is_taken_and_auto_takes_what_the_servers_can(chosen, transport, refused, kind, words):
    found, why = await chosen(transport, refused)
    assert found is kind and re.search(words, why)


@pytest.mark.parametrize(
    ("transport", "refused", "parts"),
    [
        ("p2p", NO_PLUGIN, {}),
        # Servers of several parts have no broadcast to fall back to.
        ("auto", NO_PLUGIN, {"pipeline_parallel": 2}),
        ("auto", NO_PLUGIN, {"prefill_engines": 1, "decode_engines": 1}),
        # A lost rank is no reason to choose another transport.
        ("auto", RankLost("rank 1 is gone"), {}),
    ],
)
async def test_a_refusal_is_the_error_where_nothing_else_may_be_taken(chosen, transport, refused, parts):
    with pytest.raises(PublishError, match=str(refused)):
        await chosen(transport, refused, **parts)
