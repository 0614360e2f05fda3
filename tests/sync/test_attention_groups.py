"""Real servers with attention groups: every rank gets the bits of a load while each group has its own requests."""

import asyncio
from pathlib import Path

import pytest
from engine_models import make_model
from real_servers import (
    PROMPTS,
    check_answers,
    check_serves,
    checksums,
    generate,
    make_server,
    reference,
    running,
    score,
    steady_traffic,
)

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.device import Device
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.serving.plugin_control import PluginControl
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.sync.disk.sync import DiskSync
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.publisher import compare_logprobs
from megasync.sync.shard.sync import ShardSync

pytestmark = pytest.mark.real

BUCKET_BYTES = 2**20
GROUPS = 2
TOPOLOGY = Topology(tensor=2)
EXPERTS = Topology(tensor=2, expert=2, expert_tensor=1)


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """Two (folder, model), their server and its URL: of (family, ranks)."""
    family, ranks = request.param
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(2)]
    models = [(folder, make_model(folder, family, seed)) for seed, folder in enumerate(folders)]
    log = tmp_path_factory.mktemp("logs") / "server.log"
    server = make_server(folders[0], log, ranks, attention_data_parallel=GROUPS)
    with running([server]) as (url,):
        yield models, server, url


def case(family, ranks, *marks):
    return pytest.param((family, ranks), marks=marks, id=f"{family}-TP{ranks}")


LEAN = case("qwen3_moe", 2)
WIDE = [
    *(case(family, 2, pytest.mark.matrix) for family in ("qwen3", "glm4_moe", "deepseek_v3")),
    case("qwen3_moe", 4, pytest.mark.matrix),
]
MODES = ["retract", *(pytest.param(mode, marks=pytest.mark.matrix) for mode in ("in_place", "abort"))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("served", [LEAN, *WIDE], indirect=True)
async def test_all_groups_serve_what_was_published_under_traffic(served, local_ranks, mode):
    models, process, url = served
    config = read_hf_config(models[0][0])
    topology = TOPOLOGY if config["model_type"] == "qwen3" else EXPERTS
    ranks = await local_ranks(models[0][0], topology, BUCKET_BYTES)
    server = ServerControl(url)
    sync = ShardSync(
        [server],
        ranks,
        Layout(config, topology),
        "float32",
        "gloo",
        SyncConfig(bucket_mb=1, pause_mode=mode),
        TimeoutConfig(),
    )
    try:
        tensor = process.spec.rollout.tensor_parallel
        assert [rank.rank for rank in await PluginControl(server).hello()] == list(range(tensor))
        sockets = {path.name for path in Path(process.environment()["TMPDIR"]).iterdir() if path.is_socket()}
        assert sockets >= {f"group-{group}" for group in range(GROUPS)}
        for version, (folder, model) in enumerate(reversed(models), await server.weight_version() + 1):
            await ranks.call("load", str(folder), timeout=20)
            async with steady_traffic([server], tokens=40) as clients:
                await sync.publish(version)
            check_answers(clients, version, aborting=mode == "abort")
            assert {answer["dp_rank"] for client in clients for answer in client} == set(range(GROUPS))
            # With `in_place`, the cache keeps keys and values of the old weights.
            await server.post("/flush_cache")
            await check_serves([server], model, version)
        published = await checksums(server)
        await server.post("/update_weights_from_disk", {"model_path": str(models[0][0])}, timeout=60)
        assert await checksums(server) == published
    finally:
        await sync.close()
        await server.close()


@pytest.mark.matrix
@pytest.mark.parametrize("served", [LEAN], indirect=True)
async def test_each_transport_updates_groups_with_and_without_requests(served, local_ranks, tmp_path):
    models, process, url = served
    layout = Layout(read_hf_config(models[0][0]), EXPERTS)
    ranks = await local_ranks(models[0][0], EXPERTS, BUCKET_BYTES)
    plan = plan_broadcast(layout, BUCKET_BYTES, "float32")
    server, pausing, timeouts = ServerControl(url), SyncConfig(bucket_mb=1), TimeoutConfig()
    tensor = process.spec.rollout.tensor_parallel
    syncs = [
        ShardSync([server], ranks, layout, "float32", "gloo", pausing, timeouts),
        BroadcastSync([server], ranks, plan, tensor, pausing, timeouts, Device("cpu")),
        DiskSync([server], ranks, plan, VersionFolders(tmp_path, models[0][0], plan, keep=2), pausing, timeouts),
    ]
    try:
        for version, (sync, busy) in enumerate([(sync, busy) for sync in syncs for busy in range(GROUPS)], 10):
            folder, model = models[version % 2]
            await ranks.call("load", str(folder), timeout=20)
            # The other group computes nothing but its part of the experts.
            publishing = asyncio.create_task(sync.publish(version))
            answers = []
            while not publishing.done():
                answers.append(await generate(server, 20, routed_dp_rank=busy))
            await publishing
            assert {answer["dp_rank"] for answer in answers} == {busy}
            assert await server.weight_version() == version
            for group in range(GROUPS):
                scores = [await score(server, prompt, routed_dp_rank=group) for prompt in PROMPTS]
                compare_logprobs([reference(model, prompt) for prompt in PROMPTS], scores, 1e-4, f"group {group}")
    finally:
        for sync in syncs:
            await sync.close()
        await server.close()
