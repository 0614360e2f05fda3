"""Who may do what at the real router: its whole route table, its keys, and its certificate."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest
from fake_sglang import FakeSGLang
from processes import command_line, family
from waits import PATIENCE

from megasync.config.access import Keys, router_trust
from megasync.config.schema import ClusterConfig, SamplingConfig
from megasync.errors import ServerError
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.serving.control import ServerControl
from megasync.serving.router import Router, RouterMembers

pytestmark = pytest.mark.processes

KEYS = Keys("admin-key-of-this-test", "router-key-of-this-test", "generation-key-of-this-test")
OPEN_GENERATION = Keys(KEYS.admin, KEYS.router)
SECRETS = (KEYS.admin, KEYS.router, KEYS.generation)
SOMEBODY = "0b7c6a5e-0000-4000-8000-000000000000"

# Routes as they stand one after the other in the router's program, with the methods that each takes.
GENERATION = {
    "/generate": "POST",
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/rerank": "POST",
    "/v1/rerank": "POST",
    "/v1/responses": "POST",
    "/v1/classify": "POST",
    "/v1/responses/{response_id}": "GET DELETE",
    "/v1/responses/{response_id}/cancel": "POST",
    "/v1/responses/{response_id}/input_items": "GET",
    "/v1/conversations": "POST",
    "/v1/conversations/{conversation_id}": "GET POST DELETE",
    "/v1/conversations/{conversation_id}/items": "GET POST",
    "/v1/conversations/{conversation_id}/items/{item_id}": "GET DELETE",
    "/v1/tokenize": "POST",
    "/v1/detokenize": "POST",
}
PROBES = {"/liveness": "GET", "/readiness": "GET", "/health": "GET", "/engine_metrics": "GET", "/get_model_info": "GET"}
CONTROL = {
    "/flush_cache": "POST",
    "/get_loads": "GET",
    "/parse/function_call": "POST",
    "/wasm": "GET POST",
    "/wasm/{module_uuid}": "DELETE",
    "/v1/tokenizers": "GET POST",
    "/v1/tokenizers/{tokenizer_id}": "GET DELETE",
    "/v1/tokenizers/{tokenizer_id}/status": "GET",
    "/workers/{worker_id}": "GET PUT DELETE",
}
# Of several routers that know each other, which these never do.
MESH = {
    "/ha/status": "GET",
    "/ha/health": "GET",
    "/ha/workers": "GET",
    "/ha/workers/{worker_id}": "GET",
    "/ha/policies": "GET",
    "/ha/policies/{model_id}": "GET",
    "/ha/config": "POST",
    "/ha/rate-limit": "GET POST",
    "/ha/rate-limit/stats": "GET",
    "/ha/shutdown": "POST",
}
TABLE = "".join(GENERATION | PROBES | CONTROL | MESH)
# Texts of 16 bytes or fewer that the compiler has put elsewhere.
PROBES |= {"/health_generate": "GET", "/get_server_info": "GET", "/v1/models": "GET"}
CONTROL |= {"/parse/reasoning": "POST", "/workers": "GET POST"}
GENERATION |= {"/v1/embeddings": "POST"}
MESH |= {"/ha/config/{key}": "GET"}


def routes(*tables: dict[str, str]) -> list[tuple[str, str]]:
    every = [(method, path) for table in tables for path, methods in table.items() for method in methods.split()]
    return [(method, re.sub(r"{\w+}", SOMEBODY, path)) for method, path in every]


@asynccontextmanager
async def guarded(tmp_path: Path, keys: Keys, cluster: ClusterConfig | None = None):
    """(a fake server, the router in front of it, `ask(method, path, key, body) -> (status, text)`)"""
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeSGLang())
        router = Router([fake.url], "round_robin", "127.0.0.1", 0, tmp_path / "router.log", keys=keys, cluster=cluster)
        stack.push_async_callback(router.stop)
        url = await router.start(PATIENCE)
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask(method: str, path: str, key: str | None = None, body: dict | None = None) -> tuple[int, str]:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with session.request(method, url + path, json=body or {}, headers=headers) as answer:
                return answer.status, await answer.text()

        yield fake, router, ask


@asynccontextmanager
async def generating(router: Router, cluster: ClusterConfig | None = None):
    """What a run has: (a client that generates, what changes the list of servers)."""
    trust, settings = cluster and router_trust(cluster), RequestSettings(SamplingConfig(max_new_tokens=4), 20.0)
    keys = {"api_key": KEYS.generation, "trust": trust}
    client = RolloutClient(router.url, [], ServedModel(100, 64), settings, **keys)
    members = RouterMembers(ServerControl(router.url, KEYS.router, trust), KEYS.generation)
    try:
        yield client, members
    finally:
        await client.close()
        await members.close()


def test_the_table_is_that_of_the_router():
    """When this fails, the router has another route table: decide for each new route, and write it down above."""
    program = next(Path(find_spec("sglang_router").submodule_search_locations[0]).glob("*.so")).read_bytes()
    first, last = next(iter(GENERATION)), "/ha/shutdown"
    found = re.findall(re.escape(first).encode() + rb"/v1/chat[\w/{}-]*?" + re.escape(last).encode(), program)
    assert [text.decode() for text in found] == [TABLE]


async def test_with_both_keys_a_caller_without_a_key_can_only_probe(tmp_path):
    async with guarded(tmp_path, KEYS) as (fake, router, ask):
        for key in (None, "wrong", ""):
            for method, path in routes(GENERATION, CONTROL, MESH):
                assert (await ask(method, path, key))[0] == 401, (method, path, key)
        for method, path in routes(PROBES):
            assert method == "GET"
            status, text = await ask(method, path)
            # Without a server's answer it says so.
            assert status in (200, 500) and not any(secret in text for secret in SECRETS), (path, text)
        assert not fake.requests
        # Neither key opens what the other one does.
        for method, path in routes(CONTROL):
            assert (await ask(method, path, KEYS.generation))[0] == 401, path
        assert (await ask("POST", "/generate", KEYS.router))[0] == 401
        # Nothing that the router says to the holder of its key, logs or was started with tells a key.
        _, listed = await ask("GET", "/workers", KEYS.router)
        assert fake.url in listed
        _, one = await ask("GET", f"/workers/{json.loads(listed)['workers'][0]['id']}", KEYS.router)
        told = [listed, one, router.log_path.read_text(), *map(command_line, family(router._process.pid))]
        assert len(told) >= 5
        assert not any(secret in text for text in told for secret in SECRETS)


async def test_without_a_generation_key_a_caller_without_a_key_can_only_generate(tmp_path):
    async with guarded(tmp_path, OPEN_GENERATION) as (fake, _, ask):
        _, before = await ask("GET", "/workers", KEYS.router)
        for method, path in routes(CONTROL):
            assert (await ask(method, path))[0] == 401, (method, path)
        # There, and of no effect: the router is no member of a mesh.
        for method, path in routes(MESH):
            status, _ = await ask(method, path, body={"key": "k", "value": [1]})
            assert status in (404, 405, 422, 503), (method, path, status)
        # It keeps no conversations.
        status, text = await ask("POST", "/v1/conversations")
        assert status == 200
        conversation = re.search(r"conv_\w+", text)[0]
        assert (await ask("GET", f"/v1/conversations/{conversation}"))[0] == 404
        assert (await ask("GET", "/workers", KEYS.router))[1] == before
        body = {"input_ids": [1], "rid": "r", "sampling_params": {"max_new_tokens": 1}}
        assert (await ask("POST", "/generate", body=body))[0] == 200
        assert len(fake.requests) == 1


async def test_the_run_itself_generates_and_changes_the_list(tmp_path):
    async with (
        guarded(tmp_path, KEYS) as (fake, router, _),
        FakeSGLang() as other,
        generating(router) as (client, members),
    ):
        assert (await client.generate([1])).token_ids == [2, 3, 4, 5]
        assert fake.headers[0]["Authorization"] == f"Bearer {KEYS.generation}"
        while not await members.adjust([other.url]):
            await asyncio.sleep(0.01)
        assert (await client.generate([1])).token_ids == [2, 3, 4, 5]
        assert len(other.requests) == 1


@pytest.fixture
def certificate(tmp_path: Path):
    """Makes a self-signed certificate for an address: its section of the configuration."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")

    def make(address: str) -> ClusterConfig:
        cert, key = tmp_path / f"{address}.pem", tmp_path / f"{address}.key"
        options = [
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=router",
        ]
        files = ["-out", cert, "-keyout", key]
        command = ["openssl", "req", *options, "-addext", f"subjectAltName=IP:{address}", *files]
        subprocess.run(command, check=True, capture_output=True)
        return ClusterConfig(tls_cert=str(cert), tls_key=str(key))

    return make


async def test_with_a_certificate_the_router_speaks_tls_to_those_who_trust_it(tmp_path, certificate):
    cluster = certificate("127.0.0.1")
    async with guarded(tmp_path, KEYS, cluster) as (fake, router, ask):
        assert router.url.startswith("https://")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask("GET", "/health")
        async with generating(router, cluster) as (client, members):
            assert (await client.generate([1])).token_ids == [2, 3, 4, 5]
            assert await members.adjust([fake.url])
        async with ServerControl(router.url.replace("https", "http")) as plain:
            with pytest.raises(ServerError):
                await plain.get("/health")


async def test_a_certificate_of_another_address_ends_the_start_at_once(tmp_path, certificate):
    router = Router([], "round_robin", "127.0.0.1", 0, tmp_path / "log", keys=KEYS, cluster=certificate("127.0.0.9"))
    with pytest.raises(ServerError, match=r"cluster\.tls_cert=.*must name 127\.0\.0\.1"):
        await router.start(PATIENCE)
    assert not router.alive()
