"""Calls to a server of several engines: which of them get one, and what their answers are together."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from megasync.config.schema import RolloutConfig
from megasync.errors import EngineErrors, HttpStatusError, InvalidAnswer, ServerError
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.plugin_protocol import PREFILL_ROUTE
from megasync.serving.server import EngineRole, ServerSpec, SGLangServer

ADMIN, GENERATION = "admin-key", "generation-key"


class Server:
    """A small HTTP server. `answers` has the JSON of a path's answer, its text, the status that refuses it, or None."""

    def __init__(self) -> None:
        self.answers: dict = {}
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
        answer = self.answers.get(request.path, {"success": True})
        if answer is None:
            await asyncio.Event().wait()
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


@pytest.mark.parametrize(
    ("answers", "together"),
    [
        *(
            ([{name: [f"{n}a", f"{n}b"], "url": n, "others": [n]} for n in range(3)],
             {name: ["0a", "0b", "1a", "1b", "2a", "2b"], "url": 0, "others": [0]})
            for name in ("ranks", "loads", "internal_states")
        ),
        # An engine without a list adds nothing to it.
        ([{"loads": [1]}, {"loads": None}, {}], {"loads": [1]}),
        (["flushed", "flushed too", "flushed as well"], "flushed"),
    ],
)  # fmt: skip
async def test_lists_are_joined_in_the_order_of_the_engines_and_the_rest_is_that_of_the_first(make, answers, together):
    rig = await make(2, 1)
    for engine, answer in zip(rig.engines, answers, strict=True):
        engine.answers["/info"] = answer
    assert await rig.control.get("/info") == together


async def test_all_engines_are_waited_for_and_one_that_fails_is_told_from_one_that_succeeded(make):
    rig = await make(1, 2)
    rig.prefill[0].answers["/load"], rig.decode[1].answers["/load"] = 400, 503
    with pytest.raises(EngineErrors) as raised:
        await rig.control.post("/load")
    refused, succeeded, broken = raised.value.errors
    assert succeeded is None
    assert isinstance(refused, HttpStatusError) and (refused.status, broken.status) == (400, 503)
    first, last = rig.engines[0].url, rig.engines[2].url
    problems = f"POST {first}/load: status 400: not now; POST {last}/load: status 503: not now"
    assert str(raised.value) == f"2 of 3 engines of {rig.router.url}: {problems}"


async def test_an_engine_that_does_not_answer_in_time_is_one_that_failed(make):
    rig = await make()
    rig.decode[0].answers["/load"] = None
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
    first, second, third = (engine.url for engine in rig.engines)
    assert rig.control.engine_urls == (first, second, third)
    with pytest.raises(InvalidAnswer, match=f"hold different versions: {first}: 7, {second}: 7, {third}: 8"):
        await rig.control.weight_version()
    rig.decode[1].answers["/model_info"] = 503
    with pytest.raises(ServerError, match=f"{third}/model_info: status 503"):
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
