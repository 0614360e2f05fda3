"""Every trainer topology into servers of one and two ranks, dense and with experts: what is served is what was trained.

Ranks only hold shards here; that a Megatron engine's parameters are these shards is tested in `tests/trainer`.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from real_servers import SIZES, check_serves, checksums, serving

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.sync.shard.sync import ShardSync

pytestmark = pytest.mark.real

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    # SGLang's Qwen3-MoE always has a head of its own, which a tied checkpoint would leave unwritten.
    "tie_word_embeddings": False,
}
FAMILIES = {"dense": SIZES, "experts": SIZES | EXPERTS}
# (tensor, pipeline, expert); data replicas as experts need them.
EVERY = list(product((1, 2), (1, 2), (1, 2)))
# What represents the others, which are marked `matrix`.
LEAN = {(2, 1, 2), (1, 2, 2)}


def case(sizes, lean):
    return pytest.param(sizes, marks=() if lean else pytest.mark.matrix, id="TP{}-PP{}-EP{}".format(*sizes))


@pytest.fixture(scope="module")
def served(request, make_model, save_model, tmp_path_factory):
    """Of one kind of model: two (folder, model), the config, and URLs of a TP1 and a TP2 server."""
    models = []
    for seed in range(2):
        model = make_model(seed, **FAMILIES[request.param])
        folder = tmp_path_factory.mktemp(f"model{seed}")
        config = save_model(model, folder)
        models.append((folder, model))
    with serving(models[0][0], tmp_path_factory.mktemp("logs"), (1, 2)) as urls:
        yield models, config, urls


@pytest.mark.matrix
async def test_ranks_of_an_engine_that_hold_different_experts_get_the_bits_of_a_load(
    make_model, save_model, tmp_path, local_ranks
):
    folders = []
    for seed in range(2):
        folders.append(tmp_path / f"model{seed}")
        config = save_model(make_model(seed, **FAMILIES["experts"]), folders[-1])
    topology = Topology(tensor=2, data=2, expert=4, expert_tensor=1)
    ranks = await local_ranks(folders[0], topology, 2**20)
    with ThreadPoolExecutor(1) as thread:
        # It has an event loop of its own.
        serve = serving(folders[0], tmp_path / "logs", (2,), expert_parallel=2)
        (url,) = await asyncio.wrap_future(thread.submit(serve.__enter__))
        server = ServerControl(url)
        sync = ShardSync(
            [server], ranks, Layout(config, topology), "float32", "gloo", SyncConfig(bucket_mb=1), TimeoutConfig()
        )
        try:
            await ranks.call("load", str(folders[1]), timeout=20)
            await sync.publish(1)
            assert await server.weight_version() == 1
            published = await checksums(server)
            # Nothing is generated: SGLang computes distributed experts on GPUs only.
            await server.post("/update_weights_from_disk", {"model_path": str(folders[1])}, timeout=60)
            assert await checksums(server) == published
        finally:
            await sync.close()
            await server.close()
            await asyncio.wrap_future(thread.submit(serve.__exit__, None, None, None))


# Parametrized apart, so that all sizes share the servers.
@pytest.mark.parametrize("served", ["experts"], indirect=True)
@pytest.mark.parametrize("sizes", [case(sizes, sizes in LEAN) for sizes in EVERY])
async def test_servers_of_experts_hold_the_bits_and_give_the_logprobs_of_the_trained_model(served, local_ranks, sizes):
    await check_publishes(served, local_ranks, sizes)


@pytest.mark.parametrize("served", ["dense"], indirect=True)
@pytest.mark.parametrize("sizes", [case(sizes, False) for sizes in EVERY if sizes[2] == 1])
async def test_servers_hold_the_bits_and_give_the_logprobs_of_the_trained_model(served, local_ranks, sizes):
    await check_publishes(served, local_ranks, sizes)


async def check_publishes(served, local_ranks, sizes):
    models, config, urls = served
    tensor, pipeline, expert = sizes
    topology = Topology(tensor=tensor, pipeline=pipeline, data=max(1, expert // tensor), expert=expert, expert_tensor=1)
    ranks = await local_ranks(models[0][0], topology, 2**20)
    servers = [ServerControl(url) for url in urls]
    sync = ShardSync(
        servers, ranks, Layout(config, topology), "float32", "gloo", SyncConfig(bucket_mb=1), TimeoutConfig()
    )
    try:
        for version, (folder, model) in enumerate(models, await servers[0].weight_version() + 1):
            await ranks.call("load", str(folder), timeout=20)
            await sync.publish(version)
            await check_serves(servers, model, version)
            published = [await checksums(server) for server in servers]
            for server in servers:
                await server.post("/update_weights_from_disk", {"model_path": str(folder)}, timeout=60)
            assert [await checksums(server) for server in servers] == published
    finally:
        await sync.close()
        for server in servers:
            await server.close()
