"""Real engines that hand prompts over: both kinds serve what was published, and no request is left waiting."""

import asyncio

import aiohttp
import psutil
import pytest
import zmq
from engine_models import make_model
from real_servers import (
    ADMIN_KEY,
    PROMPTS,
    check_answers,
    check_bits,
    check_serves,
    control_of,
    generate,
    running_engines,
    score,
    spans,
    steady_traffic,
)

from megasync.config.schema import SamplingConfig
from megasync.config.schema.rollout import HANDED_OVER
from megasync.errors import HttpStatusError, ServerError
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.serving.control import ServerControl
from megasync.serving.plugin_control import PluginControl
from megasync.sync.publisher import compare_logprobs

pytestmark = [pytest.mark.real, pytest.mark.extra]

VOCABULARY = 301
PAIR = ("prefill", "decode")
MANY = ("prefill", "prefill", "decode", "decode", "decode")


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """Two (folder, model), the engines that serve the first one, and their kinds: of (family, ranks, kinds)."""
    family, ranks, kinds = request.param
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(2)]
    models = [(folder, make_model(folder, family, seed)) for seed, folder in enumerate(folders)]
    with running_engines(folders[0], tmp_path_factory.mktemp("logs"), ranks, kinds) as engines:
        yield models, engines, kinds


def case(family, ranks=1, kinds=PAIR, *marks):
    return pytest.param((family, ranks, kinds), marks=marks, id=f"{family}-TP{ranks}-{len(kinds)}")


LEAN = case("qwen3")
WIDE = [
    *(case(family, 1, PAIR, pytest.mark.matrix) for family in HANDED_OVER if family != "qwen3"),
    *(case(family, 2, PAIR, pytest.mark.matrix) for family in ("qwen3_moe", "deepseek_v3")),
    case("qwen3", 1, MANY, pytest.mark.matrix),
]


def make_client(server):
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=8)
    return RolloutClient(server.url, [server], ServedModel(VOCABULARY, 1024), RequestSettings(sampling, 60.0))


async def check_engines(server):
    """Checks that all engines compute the same."""
    compared = await make_client(server).engine_scores(server, PROMPTS[0])
    assert len(compared) == 2 * server.pairs
    for pair in compared:
        compare_logprobs([pair.expected], [pair.logprobs], 1e-4, pair.engine)


async def idle(server):
    """Returns once no engine has a request."""
    while any(
        load["num_running_reqs"] + load["num_waiting_reqs"]
        for load in (await server.get("/v1/loads?include=core"))["loads"]
    ):
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("served", [LEAN, *WIDE], indirect=True)
async def test_all_engines_serve_what_was_published_under_traffic(served, publishing):
    models, engines, kinds = served
    config = read_hf_config(models[0][0])
    topology = (
        Topology(tensor=2, expert=2, expert_tensor=1) if "moe" in str(config["model_type"]) else Topology(tensor=2)
    )
    async with control_of(engines, kinds) as server:
        tensor, ranks = engines[0].spec.rollout.tensor_parallel, None
        assert [rank.rank for rank in await PluginControl(server).hello()] == list(range(len(kinds) * tensor))
        for kind in ("p2p", "disk"):
            sync, ranks = await publishing(kind, models[0][0], [server], topology, ranks=ranks, pause_mode="abort")
            for version, (folder, model) in enumerate(reversed(models), await server.weight_version() + 1):
                await ranks.call("load", str(folder), timeout=300)
                async with steady_traffic([server]) as clients:
                    await sync.publish(version)
                check_answers(clients, version, aborting=True)
                # Each answer is of one version: a request does not go on with the cache of another one.
                assert all(len(spans(answer)) <= 1 for client in clients for answer in client)
                await check_serves([server], model, version)
                await check_engines(server)
            await sync.close()
        await check_bits([server], models[0][0])


@pytest.mark.parametrize("served", [LEAN], indirect=True)
async def test_a_prompt_of_another_version_is_not_continued(served):
    models, engines, _ = served
    async with control_of(engines) as server, ServerControl(engines[1].url, ADMIN_KEY) as decode:
        version = await server.weight_version()
        newer = {"model_path": str(models[1][0]), "weight_version": str(version + 1)}
        await decode.post("/update_weights_from_disk", newer, timeout=300)
        with pytest.raises(HttpStatusError, match="Metadata corruption"):
            await generate(server, 8)
        with pytest.raises(ServerError, match="hold different versions"):
            await server.weight_version()
        await server.post("/update_weights_from_disk", newer, timeout=300)
        await check_serves([server], models[1][1], version + 1)
        await idle(server)


@pytest.mark.parametrize("served", [LEAN], indirect=True)
async def test_strangers_take_no_part(served):
    _, engines, _ = served
    meeting_point = f"http://127.0.0.1:{engines[0].handover_port()}"
    routes = [("GET", "/route?prefill_dp_rank=-1"), ("PUT", "/route"), ("POST", "/query_dp_ranks")]
    routes.append(("POST", "/register_dp_rank"))
    async with control_of(engines) as server:
        before = [await score(server, prompt) for prompt in PROMPTS]
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer wrong"}) as stranger:
            for method, route in routes:
                async with stranger.request(method, meeting_point + route, json={}) as answer:
                    assert answer.status == 401, route
            for engine in engines:
                async with stranger.post(engine.url + "/prefill_engines", json={"engines": []}) as answer:
                    assert answer.status == 401
        with zmq.Context() as context:
            for port in listening(engines):
                with context.socket(zmq.PUSH) as socket:
                    socket.linger = 100
                    socket.connect(f"tcp://127.0.0.1:{port}")
                    # A request for a prompt without any of its parts ends the thread that reads it.
                    socket.send_multipart([b"1", b"None"])
        for prompt, scores in zip(PROMPTS, before, strict=True):
            assert await score(server, prompt) == pytest.approx(scores, abs=1e-6)


def listening(engines):
    """The ports on which schedulers listen: those for handovers among them. None is open to other machines."""
    ports = []
    for engine in engines:
        for process in psutil.Process(engine.process_id().pid).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip == "127.0.0.1"
                    ports += [connection.laddr.port] if "scheduler" in " ".join(process.cmdline()) else []
    assert len(ports) >= len(engines)
    return ports


@pytest.mark.parametrize("served", [LEAN], indirect=True)
async def test_no_half_of_a_request_is_left_behind(served):
    _, engines, _ = served
    server = control_of(engines)
    prefill, decode = (ServerControl(engine.url, ADMIN_KEY) for engine in engines)
    try:
        for paused in (prefill, decode):
            # The caller gives up while one engine does not take requests.
            await paused.post("/pause_generation", {"mode": "abort"})
            with pytest.raises(ServerError, match="no answer within"):
                await server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 4}}, 1.0)
            await paused.post("/continue_generation", {})
            await idle(server)
        for aborted in (prefill, decode):
            # One engine drops the request, and the caller learns it.
            request = asyncio.create_task(generate(server, 900))
            await asyncio.sleep(0.2)
            await aborted.post("/abort_request", {"abort_all": True})
            await aborted.post("/pause_generation", {"mode": "abort"})
            late = asyncio.create_task(generate(server, 4))
            await asyncio.sleep(0.2)
            await aborted.post("/continue_generation", {})
            finished = await asyncio.gather(request, late, return_exceptions=True)
            assert all(
                isinstance(answer, HttpStatusError) or answer["finish_reason"]["type"] in ("abort", "length")
                for answer in finished
            )
            await idle(server)
    finally:
        for control in (prefill, decode, server):
            await control.close()


@pytest.mark.parametrize("served", [case("qwen2")], indirect=True)
async def test_a_dead_prefill_engine_leaves_no_request_waiting(served):
    _, engines, _ = served
    async with control_of(engines) as server:
        await generate(server, 4)
        engines[0].kill()
        with pytest.raises(HttpStatusError):
            await generate(server, 4)
