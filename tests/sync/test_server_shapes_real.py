"""Real servers of every shape: after a publish each rank holds the bits of a load, and all compute what was trained.

Ranks only hold shards here; that a Megatron engine's parameters are these shards is tested in `tests/trainer`.
"""

import asyncio
from itertools import product
from pathlib import Path

import pytest
from engine_models import make_model as make_family
from real_servers import (
    PROMPTS,
    SharedServers,
    check_answers,
    check_bits,
    check_serves,
    generate,
    make_server,
    reference,
    running,
    score,
    steady_traffic,
)

from megasync.config.pools import engine_devices
from megasync.layout.topology import Topology
from megasync.serving.plugin_control import PluginControl
from megasync.sync.publisher import compare_logprobs

pytestmark = pytest.mark.real

DENSE, EXPERTS = Topology(tensor=2), Topology(tensor=2, expert=2, expert_tensor=1)
GROUPS = 2


def topology_of(family):
    return DENSE if family == "qwen3" else EXPERTS


def case(family, tensor=(1,), layers=2, marks=(), **split):
    name = "-".join([family, *(f"TP{ranks}" for ranks in tensor), *(f"{key}={size}" for key, size in split.items())])
    return pytest.param((family, layers, tensor, split), marks=marks, id=name)


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """The family, two (folder, model), the servers of the first and their URLs: of a `case`."""
    family, layers, tensor, split = request.param
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(2)]
    models = [(path, make_family(path, family, seed, num_hidden_layers=layers)) for seed, path in enumerate(folders)]
    logs = tmp_path_factory.mktemp("logs")
    servers = [make_server(folders[0], logs / f"{ranks}.log", ranks, **split) for ranks in tensor]
    with running(servers) as urls:
        yield family, models, servers, urls


WIDE = pytest.mark.matrix
GROUPED = case("qwen3_moe", (2,), attention_data_parallel=GROUPS)
SHAPES = [
    # The last stage has the odd layer, and a copy of the tied embedding.
    case("qwen3", (1,), 3, pipeline_parallel=2),
    GROUPED,
    case("qwen3", (2,), 3, WIDE, pipeline_parallel=2),
    case("qwen3", (1,), 3, WIDE, pipeline_parallel=3),
    case("qwen3_moe", (2,), 3, WIDE, pipeline_parallel=2),
    *(case(family, (2,), 2, WIDE, attention_data_parallel=GROUPS) for family in ("qwen3", "glm4_moe", "deepseek_v3")),
    case("qwen3_moe", (4,), 2, WIDE, attention_data_parallel=GROUPS),
]


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("served", SHAPES, indirect=True)
async def test_stages_and_groups_serve_what_was_published_under_traffic(served, publishing, control, mode):
    family, models, (process,), (url,) = served
    server, rollout = control(url), process.spec.rollout
    sync, ranks = await publishing("p2p", models[0][0], [server], topology_of(family), pause_mode=mode)
    hello = await PluginControl(server).hello()
    assert [rank.rank for rank in hello] == list(range(engine_devices(rollout)))
    assert len({rank.pid for rank in hello}) == len(hello)
    groups = rollout.attention_data_parallel
    sockets = {path.name for path in Path(process.environment()["TMPDIR"]).iterdir() if path.is_socket()}
    assert groups == 1 or sockets >= {f"group-{group}" for group in range(groups)}
    for version, (folder, model) in enumerate(reversed(models), await server.weight_version() + 1):
        await ranks.call("load", str(folder), timeout=300)
        async with steady_traffic([server]) as clients:
            await sync.publish(version)
        check_answers(clients, version, aborting=mode == "abort")
        if groups > 1:
            # One that was aborted before it began has no group.
            begun = {answer.get("dp_rank") for client in clients for answer in client} - {None}
            assert begun == set(range(groups))
        # With `in_place`, the cache keeps keys and values of the old weights.
        await server.post("/flush_cache")
        await check_serves([server], model, version)
    await check_bits([server], models[0][0])


@WIDE
@pytest.mark.parametrize("served", [GROUPED], indirect=True)
async def test_each_transport_updates_groups_with_and_without_requests(served, publishing, control):
    _, models, _, (url,) = served
    server, folder, ranks = control(url), models[0][0], None
    syncs = []
    for kind in ("p2p", "broadcast", "disk"):
        sync, ranks = await publishing(kind, folder, [server], EXPERTS, ranks=ranks, tensor=2)
        syncs.append(sync)
    trials = list(product(syncs, range(GROUPS)))
    for version, (sync, busy) in enumerate(trials, await server.weight_version() + 1):
        folder, model = models[version % 2]
        await ranks.call("load", str(folder), timeout=300)
        # The other group computes nothing but its part of the experts.
        publish = asyncio.create_task(sync.publish(version))
        answers = []
        while not publish.done():
            answers.append(await generate(server, 20, routed_dp_rank=busy))
        await publish
        assert {answer["dp_rank"] for answer in answers} == {busy}
        assert await server.weight_version() == version
        for group in range(GROUPS):
            scores = [await score(server, prompt, routed_dp_rank=group) for prompt in PROMPTS]
            compare_logprobs([reference(model, prompt) for prompt in PROMPTS], scores, 1e-4, f"group {group}")


@WIDE
@pytest.mark.parametrize("served", [case("qwen3_moe", (2,), expert_parallel=2)], indirect=True)
async def test_ranks_of_a_server_that_hold_different_experts_get_the_bits_of_a_load(served, publishing, control):
    """Nothing is generated: SGLang computes distributed experts on GPUs only."""
    _, models, _, (url,) = served
    topology, server = Topology(tensor=2, data=2, expert=4, expert_tensor=1), control(url)
    sync, ranks = await publishing("p2p", models[0][0], [server], topology)
    await ranks.call("load", str(models[1][0]), timeout=300)
    await sync.publish(1)
    assert await server.weight_version() == 1
    await check_bits([server], models[1][0])


# (tensor, pipeline, expert) of the trainer; data replicas as experts need them. Two represent the others.
EVERY = list(product((1, 2), repeat=3))
LEAN = {(2, 1, 2), (1, 2, 2)}


def trainers(lean=(), dense=False):
    sizes = [each for each in EVERY if not dense or each[2] == 1]
    return [pytest.param(each, marks=() if each in lean else WIDE, id="TP{}-PP{}-EP{}".format(*each)) for each in sizes]


@pytest.mark.parametrize("served", [case("qwen3_moe", (1, 2))], indirect=True)
@pytest.mark.parametrize("sizes", trainers(LEAN))
async def test_experts_of_every_trainer_reach_servers_of_one_and_two_ranks(served, publishing, control, sizes):
    _, models, _, urls = served
    await check_publishes(models, [control(url) for url in urls], publishing, sizes)


@pytest.mark.shares(SharedServers.MARK)
@pytest.mark.parametrize("sizes", trainers(dense=True))
async def test_every_trainer_reaches_servers_of_one_and_two_ranks(dense_servers, models, publishing, control, sizes):
    await check_publishes(models[0][:2], [control(url) for url in dense_servers[1:]], publishing, sizes)


async def check_publishes(models, servers, publishing, sizes):
    tensor, pipeline, expert = sizes
    topology = Topology(tensor=tensor, pipeline=pipeline, data=max(1, expert // tensor), expert=expert, expert_tensor=1)
    sync, ranks = await publishing("p2p", models[0][0], servers, topology)
    newest = max([await server.weight_version() for server in servers])
    for version, (folder, model) in enumerate(models, newest + 1):
        await ranks.call("load", str(folder), timeout=300)
        await sync.publish(version)
        await check_serves(servers, model, version)
        await check_bits(servers, folder)
