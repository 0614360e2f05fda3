"""Calls to a server of several engines: which of them get one, and what their answers are together."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from megasync.config.schema import RolloutConfig
from megasync.errors import EngineErrors, HttpStatusError, InvalidAnswer, ServerError
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.engine_protocol import PREFILL_ROUTE
from megasync.serving.server import EngineRole, ServerSpec, SGLangServer

ADMIN, GENERATION = "admin-key", "generation-key"


class Server:
    """A small HTTP server. `answers` has the JSON of a path's answer, its text, or the status that refuses it."""

    def __init__(self) -> None:
        self.answers: dict = {}
        # Seconds before each answer.
        self.seconds = 0.0
        # (method, path, Authorization, body) of each call.
        self.calls: list[tuple] = []

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.method, request.path, request.headers.get("Authorization"), body))
        await asyncio.sleep(self.seconds)
        answer = self.answers.get(request.path, {"success": True})
        if isinstance(answer, int):
            return web.Response(status=answer, text="not now")
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)


class Rig:
    """The engines of a server and its router, each a `Server`, and the control of all."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.router = Server()
        self.prefill = [Server() for _ in range(prefill)]
        self.decode = [Server() for _ in range(decode)]
        self.engines = [*self.prefill, *self.decode]

    async def start(self) -> None:
        for server in (self.router, *self.engines):
            await server.start()
        self.controls = [ServerControl(engine.url, ADMIN) for engine in self.engines]
        first = len(self.prefill)
        self.control = DisaggregatedControl(self.router.url, self.controls[:first], self.controls[first:], GENERATION)

    async def stop(self) -> None:
        await self.control.close()
        for server in (self.router, *self.engines):
            await server.stop()


@pytest.fixture
async def make():
    rigs = []

    async def start(prefill: int = 1, decode: int = 1) -> Rig:
        rigs.append(Rig(prefill, decode))
        await rigs[-1].start()
        return rigs[-1]

    yield start
    for rig in rigs:
        await rig.stop()


async def test_a_call_goes_to_all_engines_and_not_to_the_router(make):
    rig = await make(1, 2)
    await rig.control.post("/pause_generation", {"mode": "abort"})
    await rig.control.get("/server_info")
    await rig.control.delete("/adapter")
    for engine in rig.engines:
        assert engine.calls == [
            ("POST", "/pause_generation", f"Bearer {ADMIN}", {"mode": "abort"}),
            ("GET", "/server_info", f"Bearer {ADMIN}", None),
            ("DELETE", "/adapter", f"Bearer {ADMIN}", None),
        ]
    assert not rig.router.calls


async def test_generation_goes_to_the_url_of_the_server_with_its_key(make):
    rig = await make(1, 2)
    rig.router.answers["/generate"] = {"text": "x"}
    assert await rig.control.post("/generate", {"input_ids": [1]}) == {"text": "x"}
    async with rig.control.stream("/generate", {"input_ids": [2]}) as response:
        assert await response.json() == {"text": "x"}
    assert rig.router.calls == [
        ("POST", "/generate", f"Bearer {GENERATION}", {"input_ids": [1]}),
        ("POST", "/generate", f"Bearer {GENERATION}", {"input_ids": [2]}),
    ]
    assert not any(engine.calls for engine in rig.engines)


@pytest.mark.parametrize("name", ["ranks", "loads", "internal_states"])
async def test_lists_are_joined_in_the_order_of_the_engines_and_the_rest_is_that_of_the_first(make, name):
    rig = await make(2, 1)
    for number, engine in enumerate(rig.engines):
        engine.answers["/info"] = {name: [f"{number}a", f"{number}b"], "url": number, "others": [number]}
        # The order of the answers is another one.
        engine.seconds = 0.1 * (2 - number)
    expected = [f"{number}{part}" for number in range(3) for part in "ab"]
    assert await rig.control.get("/info") == {name: expected, "url": 0, "others": [0]}


async def test_an_engine_without_a_list_adds_nothing_to_it(make):
    rig = await make(1, 2)
    for engine, loads in zip(rig.engines, ({"loads": [1]}, {"loads": None}, {}), strict=True):
        engine.answers["/v1/loads"] = loads
    assert await rig.control.get("/v1/loads") == {"loads": [1]}


async def test_text_is_that_of_the_first_engine(make):
    rig = await make()
    rig.prefill[0].answers["/flush_cache"], rig.decode[0].answers["/flush_cache"] = "flushed", "flushed too"
    assert await rig.control.post("/flush_cache") == "flushed"


async def test_one_engine_that_fails_is_told_from_one_that_succeeded(make):
    rig = await make()
    rig.decode[0].answers["/load"] = 400
    with pytest.raises(EngineErrors) as raised:
        await rig.control.post("/load")
    succeeded, refused = raised.value.errors
    assert succeeded is None
    assert isinstance(refused, HttpStatusError) and refused.status == 400
    url = rig.decode[0].url
    assert str(raised.value) == f"1 of 2 engines of {rig.router.url}: POST {url}/load: status 400: not now"


async def test_all_engines_are_waited_for_before_a_failure_is_raised(make):
    rig = await make()
    rig.prefill[0].answers["/load"] = 400
    rig.decode[0].seconds = 0.3
    rig.decode[0].answers["/load"] = 503
    with pytest.raises(EngineErrors) as raised:
        await rig.control.post("/load")
    assert [error.status for error in raised.value.errors] == [400, 503]
    assert str(raised.value).startswith("2 of 2 engines of ")
    assert all(engine.url in str(raised.value) for engine in rig.engines)


async def test_an_engine_that_does_not_answer_in_time_is_one_that_failed(make):
    rig = await make()
    rig.decode[0].seconds = 60.0
    with pytest.raises(EngineErrors, match=r"1 of 2 engines .*no answer within 0.1 s") as raised:
        await rig.control.post("/load", timeout=0.1)
    assert isinstance(raised.value.errors[1].__cause__, TimeoutError)


class Broken(ServerControl):
    async def _request(self, method, path, body, timeout):
        raise ZeroDivisionError("a defect")


async def test_a_defect_is_no_failure_of_an_engine(make):
    rig = await make()
    rig.prefill[0].answers["/load"] = 400
    control = DisaggregatedControl(rig.router.url, [rig.controls[0]], [Broken(rig.decode[0].url)])
    with pytest.raises(ZeroDivisionError, match="a defect"):
        await control.post("/load")


async def test_the_version_is_the_one_that_all_engines_hold(make):
    rig = await make(1, 2)
    for engine in rig.engines:
        engine.answers["/model_info"] = {"weight_version": "7"}
    assert await rig.control.weight_version() == 7
    rig.decode[1].answers["/model_info"] = {"weight_version": "8"}
    with pytest.raises(InvalidAnswer) as raised:
        await rig.control.weight_version()
    first, second, third = (engine.url for engine in rig.engines)
    held = f"{first}: 7, {second}: 7, {third}: 8"
    assert str(raised.value) == f"the engines of {rig.router.url} hold different versions: {held}"


async def test_a_version_is_unknown_if_one_engine_does_not_say_it(make):
    rig = await make()
    rig.prefill[0].answers["/model_info"] = {"weight_version": "7"}
    rig.decode[0].answers["/model_info"] = 503
    with pytest.raises(ServerError, match=f"{rig.decode[0].url}/model_info: status 503"):
        await rig.control.weight_version()


@pytest.mark.parametrize(
    ("prefill", "decode", "pairs"),
    [
        (1, 1, [(0, 0)]),
        (1, 3, [(0, 0), (0, 1), (0, 2)]),
        (3, 1, [(0, 0), (1, 0), (2, 0)]),
        (2, 3, [(0, 0), (1, 1), (0, 2)]),
    ],
)
async def test_a_pair_answers_by_its_decode_engine_with_the_prompt_of_its_prefill_engine(make, prefill, decode, pairs):
    rig = await make(prefill, decode)
    assert rig.control.pairs == len(pairs)
    body = {"input_ids": [1]}
    expected = [[] for _ in range(decode)]
    for pair, (first, second) in enumerate(pairs):
        rig.decode[second].answers["/generate"] = {"pair": pair}
        assert await rig.control.generate_on(pair, body, 10.0) == {"pair": pair}
        sent = body | {"bootstrap_host": rig.prefill[first].url}
        expected[second].append(("POST", "/generate", f"Bearer {ADMIN}", sent))
    assert [engine.calls for engine in rig.decode] == expected
    assert not rig.router.calls and not any(engine.calls for engine in rig.prefill)
    assert body == {"input_ids": [1]}


async def test_engines_are_named_in_the_order_of_their_ranks(make):
    rig = await make(2, 1)
    assert rig.control.engine_urls == tuple(server.url for server in (*rig.prefill, *rig.decode))
    assert rig.control.url == rig.router.url


async def test_closing_closes_the_control_of_each_engine(make):
    rig = await make()
    await rig.control.post("/pause_generation")
    await rig.control.close()
    for control in rig.controls:
        with pytest.raises(ServerError, match="the server is gone"):
            await control.get("/server_info")
    with pytest.raises(ServerError, match=f"{rig.router.url}/generate: the server is gone"):
        await rig.control.post("/generate")


async def test_a_decode_engine_is_told_where_prefill_engines_are(make):
    rig = await make()
    engine = rig.decode[0]
    spec = ServerSpec("/models/m", RolloutConfig(), "bfloat16", "cpu")
    role = EngineRole("decode", 1, 2, "handover-key")
    server = SGLangServer(spec, "127.0.0.1", engine.port, "log", ADMIN, GENERATION, role=role)
    await server.know_prefill([("http://10.0.0.1:30000", 41000)])
    told = {"engines": [["http://10.0.0.1:30000", 41000]]}
    assert engine.calls == [("POST", PREFILL_ROUTE, f"Bearer {ADMIN}", told)]
    engine.answers[PREFILL_ROUTE] = 401
    with pytest.raises(HttpStatusError, match=f"{engine.url}{PREFILL_ROUTE}: status 401"):
        await server.know_prefill([])
