"""Two real SGLang servers on the CPU behind the real router, with a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import pytest
import pytest_asyncio
import torch
from processes import command_line, family, living
from tiny_models import make_tiny_model
from waits import PATIENCE

from megasync.cluster.server_slot import CHECK, STREAMED_CHECK, CheckAnswer
from megasync.config.access import Keys
from megasync.config.schema import RolloutConfig, SamplingConfig
from megasync.errors import ContextLengthExceeded, ServerError
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.inflight import ServerLoad
from megasync.serving.answers import AnswerLimits, events
from megasync.serving.control import ServerControl
from megasync.serving.router import Router
from megasync.serving.server import ServerSpec, SGLangServer
from megasync.sglang.guard import GENERATION, PROBES

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

KEYS = Keys("admin-key-of-this-test", "router-key-of-this-test", "generation-key-of-this-test")
SECRETS = (KEYS.admin, KEYS.router, KEYS.generation)
# Metrics, so that theirs is one of the routes.
ROLLOUT = RolloutConfig(
    max_total_tokens=16384, max_running_requests=32, mem_fraction=0.3, server_args={"--enable-metrics": True}
)
VOCAB = 300


@dataclass
class Stack:
    servers: list[SGLangServer]
    controls: list[ServerControl]
    router: Router
    client: RolloutClient
    models: list  # paths: what the servers started with, and other weights of the same shape


def make_server(model_path, log_path, port=0, **changes) -> SGLangServer:
    spec = ServerSpec(model_path, ROLLOUT, "float32", "cpu", **changes)
    return SGLangServer(spec, "127.0.0.1", port, log_path, KEYS.admin, KEYS.generation)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stack")
    models = [make_tiny_model(folder / f"model-{seed}", "qwen3", seed=seed) for seed in (0, 1)]
    servers = [make_server(models[0], folder / f"server-{i}.log", seed=i, deterministic=True) for i in range(2)]
    router = None
    try:
        urls = await asyncio.gather(*(server.start(180) for server in servers))
        router = Router(urls, "round_robin", "127.0.0.1", 0, folder / "router.log", keys=KEYS)
        await router.start(PATIENCE)
        controls = [ServerControl(url, KEYS.admin) for url in urls]
        settings = RequestSettings(SamplingConfig(max_new_tokens=16), 120.0)
        client = RolloutClient(router.url, controls, ServedModel(VOCAB, 2048), settings, api_key=KEYS.generation)
        assert all(glob(pattern) for server in servers for pattern in server.scratch())
        for server in servers:
            # SGLang names those of all its models that cannot be imported here, when it looks through them.
            assert "sglang.srt.models" not in server.log_path.read_text()
        yield Stack(servers, controls, router, client, models)
        await client.close()
        for control in controls:
            await control.close()
    finally:
        parts = [part for part in [*servers, router] if part is not None]
        tree = [process for part in parts for process in processes_of(part)]
        scratch = [pattern for server in servers for pattern in server.scratch()]
        await asyncio.gather(*(part.stop() for part in parts))
    assert len(tree) >= 10, "two servers of four processes each, and the router's two"
    assert not living(tree), "stop left processes behind"
    assert not left(scratch)


def reference_logprobs(model_path, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """What Hugging Face's implementation says of each response token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def close_to(logprobs: list[float]) -> Any:
    return pytest.approx(logprobs, abs=1e-4)


async def until(condition) -> None:
    while not await condition():
        await asyncio.sleep(0.05)


async def generating(stack: Stack, requests: int) -> list[asyncio.Task]:
    """Long requests, once the servers have sampled some tokens of each."""

    async def loads() -> list[ServerLoad]:
        return [ServerLoad.parse(await control.get("/v1/loads?include=core")) for control in stack.controls]

    async def busy() -> bool:
        now = await loads()
        decoded = sum(load.decoded for load in now) - before
        return sum(load.running for load in now) == requests and decoded > 4 * requests

    before = sum(load.decoded for load in await loads())
    tasks = [
        asyncio.create_task(stack.client.generate([5, 6, i], max_new_tokens=800, ignore_eos=True, seed=i))
        for i in range(10, 10 + requests)
    ]
    await until(busy)
    return tasks


async def idle(control: ServerControl) -> bool:
    try:
        await control.post("/flush_cache")
        return True
    except ServerError as error:
        # A flush is refused while requests run.
        assert "status 400" in str(error)
        return False


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_tempered_distribution(stack, temperature):
    got = await stack.client.generate([5, 6, 7, 8], temperature=temperature, ignore_eos=True)
    assert len(got.token_ids) == 16
    expected = reference_logprobs(stack.models[0], [5, 6, 7, 8], got.token_ids, temperature)
    assert list(got.logprobs) == close_to(expected)


async def test_a_server_says_how_fast_it_is_and_answers_the_fleets_check(stack):
    await asyncio.gather(*(stack.client.generate([5, 6], max_new_tokens=100, ignore_eos=True) for _ in range(2)))
    for control in stack.controls:
        asked = AnswerLimits(VOCAB, CHECK["sampling_params"]["max_new_tokens"])
        answer = CheckAnswer(asked)
        answer.add(orjson.dumps(await control.post("/generate", CHECK)))
        assert answer.problem() is None
        answer = CheckAnswer(asked)
        async with control.stream("/generate", STREAMED_CHECK) as response:
            async for piece in events(response, asked.most_bytes):
                answer.add(piece)
        assert (answer.tokens, answer.problem()) == (2, None)
        load = ServerLoad.parse(await control.get("/v1/loads?include=core"))
        # The first token of each response comes from its prompt.
        assert load.decoded >= 98
        assert load.after(replace(load, time=load.time - 2.0, decoded=load.decoded - 90.0)).throughput == 45.0


async def test_score_is_the_logprob_of_each_given_token(stack):
    ids = [9, 40, 3, 77, 250, 8, 12]
    expected = reference_logprobs(stack.models[0], ids[:1], ids[1:])
    for control in stack.controls:
        assert await stack.client.score(control, ids) == close_to(expected)


@pytest.mark.parametrize("room", [1, 6, 7])
@pytest.mark.parametrize("stream", [0, 4])
async def test_prompt_and_response_fill_the_whole_context(stack, room, stream):
    settings = RequestSettings(SamplingConfig(max_new_tokens=16), 60.0, stream_interval=stream)
    client = RolloutClient(stack.router.url, [], ServedModel(VOCAB, 2048), settings, api_key=KEYS.generation)
    try:
        generation = await client.generate([5] * (2048 - room), ignore_eos=True)
        with pytest.raises(ContextLengthExceeded):
            await client.generate([5] * 2048)
    finally:
        await client.close()
    assert (len(generation.token_ids), generation.finish_reason) == (room, "length")
    assert client.metrics()["rollout/invalid_answers"] == 0


async def test_an_aborted_generation_continues_with_the_same_tokens(stack):
    tasks = await generating(stack, 8)
    for server in stack.client.servers:
        await server.post("/abort_request", {"abort_all": True})
    results = await asyncio.gather(*tasks)
    assert all(got.parts == 2 for got in results)
    for got in results[:2]:
        assert (len(got.token_ids), got.finish_reason) == (800, "length")
        assert list(got.logprobs) == close_to(reference_logprobs(stack.models[0], got.prompt_ids, got.token_ids))


async def test_the_same_seed_gives_the_same_tokens_in_any_batch(stack):
    prompts = [[5 + i, 6, 7] for i in range(12)]
    alone = [await stack.client.generate(p, seed=i, ignore_eos=True) for i, p in enumerate(prompts)]
    together = await asyncio.gather(
        *(stack.client.generate(p, seed=i, ignore_eos=True) for i, p in reversed(list(enumerate(prompts))))
    )
    assert [g.token_ids for g in alone] == [g.token_ids for g in reversed(together)]
    other = await stack.client.generate(prompts[0], seed=99, ignore_eos=True)
    unseeded = await asyncio.gather(*(stack.client.generate(prompts[0], ignore_eos=True) for _ in range(3)))
    assert len({tuple(g.token_ids) for g in [alone[0], other, *unseeded]}) == 5


async def test_a_disconnected_caller_ends_its_generation_on_the_server(stack):
    tasks = await generating(stack, 10)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    async def all_idle() -> bool:
        return all([await idle(control) for control in stack.controls])

    await until(all_idle)
    logs = "".join(server.log_path.read_text() for server in stack.servers)
    assert logs.count("Request is disconnected from the client side") == 10


@pytest.mark.parametrize(("mode", "parts"), [("retract", 1), ("in_place", 1), ("abort", 2)])
async def test_versions_come_from_the_server_that_was_updated_mid_generation(stack, mode, parts):
    old = await stack.controls[0].weight_version()
    tasks = await generating(stack, 8)

    async def everywhere(path: str, body: dict) -> None:
        await asyncio.gather(*(control.post(path, body) for control in stack.controls))

    # Back and forth between the two models, so that the other tests find the first again.
    for version, model in ((old + 1, stack.models[1]), (old + 2, stack.models[0])):
        await everywhere("/pause_generation", {"mode": mode})
        update = {"model_path": str(model), "weight_version": str(version), "flush_cache": mode != "in_place"}
        await everywhere("/update_weights_from_disk", update)
        await everywhere("/continue_generation", {"torch_empty_cache": False})
        if version == old + 1:
            fresh = await stack.client.generate([5, 6, 7, 8], ignore_eos=True)
            assert fresh.versions == [version] * 16
            if mode != "in_place":
                # In place, the prefix cache still has keys and values of the old weights.
                assert list(fresh.logprobs) == close_to(reference_logprobs(model, fresh.prompt_ids, fresh.token_ids))
            results = await asyncio.gather(*tasks)
    for got in results:
        assert set(got.versions) <= {old, old + 1}
        assert got.versions == sorted(got.versions)
    across = [got for got in results if got.versions[0] != got.versions[-1]]
    assert across
    assert {got.parts for got in across} == {parts}
    assert [await control.weight_version() for control in stack.controls] == [old + 2, old + 2]


# (method, path) of all that SGLang's application routes; * for what takes any method, ws for a WebSocket.
ROUTES = """
import json
from sglang.srt.entrypoints.http_server import app
from sglang.srt.utils import add_prometheus_middleware
add_prometheus_middleware(app)
def walk(routes):
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from [route] if included is None else walk(included.routes)
kinds = {"Mount": ["*"], "APIWebSocketRoute": ["ws"], "WebSocketRoute": ["ws"]}
found = [(kinds.get(type(r).__name__) or list(r.methods), r.path) for r in walk(app.routes)]
print("ROUTES", json.dumps([(method, path) for methods, path in found for method in methods]))
"""


def routes_of(server: SGLangServer, folder: Path) -> set[tuple[str, str]]:
    env = server.environment() | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", ROUTES], env=env, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("ROUTES "))
    return {(method, path) for method, path in json.loads(line.removeprefix("ROUTES "))}


async def test_every_route_of_a_server_is_closed_or_tells_no_secret(stack, tmp_path):
    server = stack.servers[0]
    routes = await asyncio.to_thread(routes_of, server, tmp_path)
    assert len(routes) > 100
    assert {("ws", "/v1/realtime"), ("*", "/metrics"), ("GET", "/v1/loads"), ("GET", "/openapi.json")} <= routes
    # Nothing is open by a name that SGLang no longer has.
    opened = {("GET", "/metrics") if method == "*" else (method, path) for method, path in routes} & (
        PROBES | GENERATION
    )
    assert opened == (PROBES | GENERATION) - {("GET", "/metrics/")}
    before = await resolved(stack)
    async with aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, key: str | None = None) -> tuple[int, str]:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            if method != "ws":
                async with session.request(method, server.url + path, headers=headers, json={}) as answer:
                    return answer.status, await answer.text()
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(server.url + path, headers=headers)
            return refused.value.status, ""

        for method, path in sorted(routes):
            path = re.sub(r"{[^}]+}", "x", path)
            for each in ("GET", "POST", "PUT", "DELETE") if method == "*" else (method,):
                status, text = await ask(each, path)
                if (each, path) in PROBES:
                    assert status == 200 and not any(secret in text for secret in SECRETS), (each, path, status)
                else:
                    # A WebSocket is one to a server that has a library for it, else a plain request.
                    assert status == 401 or (each, status) == ("ws", 403), (each, path, status)
                    status, _ = await ask(each, path, KEYS.generation)
                    assert (status not in (401, 403)) == ((each, path) in GENERATION), (each, path, status)
    assert await resolved(stack) == before


async def resolved(stack: Stack) -> dict:
    """What a server says of itself to the holder of the admin key: its settings. It does not tell a key either."""
    info = await stack.controls[0].get("/server_info")
    assert not any(secret in str(info) for secret in SECRETS)
    changing = ("internal_states", "kv_events")
    return {key: value for key, value in info.items() if key not in changing} | await stack.controls[0].get(
        "/model_info"
    )


async def test_keys_are_on_no_command_line_and_in_no_log(stack):
    parts = [*stack.servers, stack.router]
    for process in (process for part in parts for process in processes_of(part)):
        told = command_line(process)
        assert told and not any(secret in told for secret in SECRETS), told
    for part in parts:
        assert not any(secret in part.log_path.read_text() for secret in SECRETS)


async def test_the_router_opens_no_further_route_without_a_key(stack):
    async with aiohttp.ClientSession() as session:
        for path in ("/get_server_info", "/get_model_info", "/engine_metrics", "/v1/models", "/readiness"):
            async with session.get(stack.router.url + path) as answer:
                text = await answer.text()
                assert answer.status == 200 and not any(secret in text for secret in SECRETS), (path, text)
        async with session.post(stack.router.url + "/generate", json={"input_ids": [5]}) as answer:
            assert answer.status == 401


async def test_nothing_listens_beyond_loopback(stack):
    parts = [*stack.servers, stack.router]
    tree = [p for part in parts for p in processes_of(part)]
    listening = [c.laddr.ip for p in tree for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3
    assert set(listening) == {"127.0.0.1"}


async def test_a_folder_without_a_model_is_refused_at_once(tmp_path):
    with pytest.raises(ServerError, match=r"no config\.json"):
        await make_server(tmp_path, tmp_path / "log").start(PATIENCE)


async def test_a_cancelled_start_leaves_nothing(tmp_path):
    server = make_server(make_tiny_model(tmp_path / "model", "qwen3"), tmp_path / "log")
    starting = asyncio.create_task(server.start(120))
    await until(lambda: asyncio.sleep(0, len(processes_of(server)) >= 2))
    tree, scratch = processes_of(server), server.scratch()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not living(tree)
    assert not left(scratch)


def processes_of(part) -> list[psutil.Process]:
    return family(part._process.pid if part._process else None)


def left(patterns: list[str]) -> list[str]:
    return [path for pattern in patterns for path in glob(pattern)]
