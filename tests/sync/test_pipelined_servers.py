"""Real servers with pipeline stages: every stage gets the bits of a load, between the same two batches."""

import pytest
from real_servers import SIZES, check_answers, check_serves, checksums, make_server, running, steady_traffic

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.serving.plugin_control import PluginControl
from megasync.sync.shard.sync import ShardSync

pytestmark = pytest.mark.real

# The last stage has the odd layer, and a copy of the tied embedding.
DENSE = SIZES | {"num_hidden_layers": 3}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def served(request, make_model, save_model, tmp_path_factory):
    """Two (folder, model), their config, and the URL of a server: of (sizes, tensor ranks, stages)."""
    sizes, tensor, stages = request.param
    models = []
    for seed in range(2):
        model = make_model(seed, **sizes)
        folder = tmp_path_factory.mktemp(f"model{seed}")
        config = save_model(model, folder)
        models.append((folder, model))
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with running([make_server(models[0][0], log, tensor, pipeline_parallel=stages)]) as (url,):
        yield models, config, url


def case(name, sizes, tensor, stages, *marks):
    return pytest.param((sizes, tensor, stages), marks=marks, id=name)


LEAN = case("dense-TP1-PP2", DENSE, 1, 2)
WIDE = [
    case("dense-TP2-PP2", DENSE, 2, 2, pytest.mark.matrix),
    case("dense-TP1-PP3", DENSE, 1, 3, pytest.mark.matrix),
    case("experts-TP2-PP2", EXPERTS, 2, 2, pytest.mark.matrix),
]


@pytest.mark.parametrize("served", [LEAN, *WIDE], indirect=True)
async def test_all_stages_serve_what_was_published_under_traffic(served, local_ranks):
    models, config, url = served
    topology = Topology(tensor=2, pipeline=1)
    ranks = await local_ranks(models[0][0], topology, 2**20)
    server = ServerControl(url)
    engine = PluginControl(server)
    try:
        hello = await engine.hello()
        assert [rank.rank for rank in hello] == list(range(hello[0].ranks))
        assert len({rank.pid for rank in hello}) == hello[0].ranks
        version = 0
        for mode in ("retract", "in_place", "abort"):
            sync = ShardSync(
                [server],
                ranks,
                Layout(config, topology),
                "float32",
                "gloo",
                SyncConfig(bucket_mb=1, pause_mode=mode),
                TimeoutConfig(),
            )
            for folder, model in reversed(models):
                version += 1
                await ranks.call("load", str(folder), timeout=20)
                async with steady_traffic([server], tokens=60) as clients:
                    await sync.publish(version)
                check_answers(clients, version, aborting=mode == "abort")
                # With `in_place`, the cache keeps keys and values of the old weights.
                await server.post("/flush_cache")
                await check_serves([server], model, version)
            await sync.close()
        published = await checksums(server)
        assert len(published) == hello[0].ranks
        await server.post("/update_weights_from_disk", {"model_path": str(models[0][0])}, timeout=60)
        assert await checksums(server) == published
    finally:
        await server.close()
