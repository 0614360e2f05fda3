"""Weights that ranks with Transformer Engine's layers trained reach a real server, which then computes the same."""

import json
import sys
from pathlib import Path

import pytest
from engine_models import make_model
from real_servers import PROMPTS, make_server, score

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.sync.publisher import compare_logprobs
from megasync.sync.shard.sync import ShardSync

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from local_ranks import LocalRanks

pytestmark = [pytest.mark.real, pytest.mark.matrix]

CASES = {
    "qwen3": Topology(tensor=2),
    "qwen3_moe": Topology(tensor=2, expert=2, expert_tensor=1),
    "glm4": Topology(pipeline=2),
}


@pytest.mark.parametrize("family", CASES)
async def test_a_server_computes_what_trained_ranks_hold(family, tmp_path):
    topology, folder = CASES[family], tmp_path / "model"
    make_model(folder, family)
    ranks = await LocalRanks.start(folder, topology, 2**20, "float32", str(Path(__file__).with_name("te_sync_rank.py")))
    engine = make_server(folder, tmp_path / "server.log", 1)
    try:
        server = ServerControl(await engine.start(180))
        layout = Layout(json.loads((folder / "config.json").read_text()), topology, "te")
        timeouts = TimeoutConfig(weight_sync=60.0)
        sync = ShardSync([server], ranks, layout, "float32", "gloo", SyncConfig(bucket_mb=1), timeouts)
        before = [await score(server, prompt) for prompt in PROMPTS]
        for version in (1, 2):
            ours, *others = await ranks.call("train", PROMPTS, timeout=300)
            assert all(other == ours for other in others)
            await sync.publish(version)
            assert await server.weight_version() == version
            theirs = [await score(server, prompt) for prompt in PROMPTS]
            compare_logprobs(ours, theirs, 1e-4, f"{family}, version {version}")
            assert abs(theirs[0][0] - before[0][0]) > 0.01
            before = theirs
        await sync.close()
        await server.close()
    finally:
        await engine.stop(5)
        await ranks.stop()
