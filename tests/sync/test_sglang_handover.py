"""Who may take part in a handover, of which version it is, and what becomes of its two halves. No server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from megasync.sync.sglang_handover import (
    Handover,
    PrefillEngine,
    PromptCalls,
    keyed_context,
    keyed_requests,
    patient,
    word_of,
)

KEY = "key-of-these-engines"


@pytest.mark.parametrize(("sender", "arrives"), [(KEY, True), ("another", False), (None, False)])
def test_sockets_take_messages_of_their_own_key_only(sender, arrives):
    with (
        keyed_context(KEY)() as ours,
        zmq.Context() if sender is None else keyed_context(sender)() as theirs,
        ours.socket(zmq.PULL) as inlet,
        theirs.socket(zmq.PUSH) as outlet,
    ):
        inlet.linger = outlet.linger = 0
        outlet.connect(f"tcp://127.0.0.1:{inlet.bind_to_random_port('tcp://127.0.0.1')}")
        outlet.setsockopt(zmq.SNDTIMEO, 300)
        with suppress(zmq.Again):
            outlet.send_multipart([b"room", b"address"])
        assert bool(inlet.poll(2000 if arrives else 500)) == arrives
        if arrives:
            assert inlet.recv_multipart() == [b"room", b"address"]


class Meeting:
    """As much of SGLang's HTTP server as the guard sees."""

    def __init__(self) -> None:
        self.app = web.Application()

    def routes(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=request.headers.get("Authorization", ""))

        for route in ("/route", "/health"):
            self.app.router.add_route("*", route, answer)


async def test_engines_meet_with_the_key_only():
    meeting, handover = Meeting(), Handover(KEY, on_cpu=True)
    handover.around_routes(lambda server: server.routes(), meeting)
    async with TestClient(TestServer(meeting.app)) as client:
        for key, status in ((KEY, 200), ("another", 401), ("schlüssel", 401)):
            async with client.put("/route", headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == status
        async with client.get("/route") as answer:
            assert answer.status == 401
        async with client.get("/health") as answer:
            assert answer.status == 200
        # What SGLang uses instead of the module `requests`.
        keyed = keyed_requests(f"Bearer {KEY}")
        for send in (keyed.put, keyed.post, keyed.get, keyed.Session().get):
            answer = await asyncio.to_thread(send, str(client.make_url("/route")), timeout=5)
            assert (answer.status_code, answer.text) == (200, f"Bearer {KEY}")


class Buffers:
    """SGLang's metadata of handovers: a row for each request, whose room is 77."""

    def __init__(self) -> None:
        self.cached_tokens = torch.zeros((2, 16), dtype=torch.int32)

    def read(self, row: int) -> tuple[Any, ...]:
        return torch.zeros(1), self.cached_tokens[row].clone(), torch.zeros(1), torch.tensor([77, 0])


@pytest.mark.parametrize(
    ("computed", "own", "accepted"), [("4", "4", True), ("3", "4", False), ("0", "0", True), ("5", "4", False)]
)
def test_a_handover_is_of_the_version_that_computed_it(computed, own, accepted, caplog):
    buffers, versions = Buffers(), iter([computed, own])
    handover = Handover(KEY, on_cpu=True, version=lambda: next(versions))
    handover.around_write(lambda buffers, request: None, buffers, SimpleNamespace(metadata_buffer_index=1))
    with caplog.at_level(logging.ERROR):
        received = handover.around_read(Buffers.read, buffers, 1)
    assert (int(received[-1][0]) == 77) == accepted
    assert int(received[-1][0]) != 0
    if not accepted:
        assert f"version {computed} computed, to version {own}" in caplog.text


def test_metadata_without_a_version_is_not_that_of_the_first_version():
    received = Handover(KEY, on_cpu=True, version=lambda: "0").around_read(Buffers.read, Buffers(), 0)
    assert int(received[-1][0]) not in (0, 77)
    assert word_of(str(2**31 - 2)) == 2**31 - 1


def test_a_cache_on_the_host_is_registered_as_that_and_moved_on_patiently(monkeypatch):
    class Settings:
        def __init__(self) -> None:
            self.delay = 5

        @property
        def pthrDelay(self) -> int:
            return self.delay

        @pthrDelay.setter
        def pthrDelay(self, delay: int) -> None:
            self.delay = delay

    settings = patient(Settings)()
    settings.pthrDelay = 0
    assert settings.pthrDelay == settings.delay == 1000
    settings.pthrDelay = 5000
    assert settings.delay == 5000
    api = SimpleNamespace(nixlBind=SimpleNamespace(nixlAgentConfig=Settings))
    monkeypatch.setitem(__import__("sys").modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", api)
    arguments = SimpleNamespace(kv_data_ptrs=[1, 2, 3], kv_data_mem_kinds=["VRAM"] * 3)
    Handover(KEY, on_cpu=True).before_transfers(None, arguments)
    assert arguments.kv_data_mem_kinds == ["DRAM"] * 3
    assert issubclass(api.nixlBind.nixlAgentConfig, Settings)


class Manager:
    """A decode engine's request manager: a request waits for its turn, then for the prompt, then is answered."""

    def __init__(self, calls: PromptCalls) -> None:
        self.calls = calls
        self.turn, self.computed = asyncio.Event(), asyncio.Event()
        self.turn.set()
        self.aborted: list[str] = []

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)
        self.computed.set()

    async def generate(self, manager: Manager, request: Any, http: Any) -> Any:
        await self.turn.wait()
        await self.calls.around_send(self.send, self, SimpleNamespace(bootstrap_room=request.bootstrap_room))
        yield {"meta_info": {"finish_reason": None}}
        await self.computed.wait()
        kind = "abort" if self.aborted else "length"
        yield {"meta_info": {"finish_reason": {"type": kind}, "input_token_logprobs": []}}

    async def send(self, manager: Manager, tokenized: Any) -> None: ...


class Prefill:
    """Prefill engines whose answers the test gives, one future for each call."""

    def __init__(self, calls: PromptCalls) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[asyncio.Future[Any]] = []
        self.dropped = 0
        calls._post = self.post
        calls.engines = [PrefillEngine(f"http://10.0.0.{number}:30000", 9000 + number) for number in range(3)]

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        self.asked.append((url, body))
        self.answers.append(asyncio.get_running_loop().create_future())
        try:
            return await self.answers[-1]
        except asyncio.CancelledError:
            self.dropped += 1
            raise


def a_request(**fields: Any) -> Any:
    return SimpleNamespace(
        **{"rid": "r", "bootstrap_host": None, "bootstrap_room": None, "return_logprob": True, **fields}
    )


def http_of(body: dict[str, Any], path: str = "/generate", **headers: str) -> Any:
    async def json() -> dict[str, Any]:
        return body

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(json=json, headers=named, url=SimpleNamespace(path=path))


def computed(finish: str = "length") -> dict[str, Any]:
    return {"meta_info": {"finish_reason": {"type": finish}, "input_token_logprobs": [[None, 1, None]]}}


@pytest.fixture
def calls() -> PromptCalls:
    return PromptCalls("admin")


async def drained(calls: PromptCalls, manager: Manager, request: Any, http: Any) -> list[Any]:
    return [answer async for answer in calls.around_generate(manager.generate, manager, request, http)]


async def asked(prefill: Prefill, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(prefill.answers) < count:
            await asyncio.sleep(0)


async def test_a_prompt_is_asked_for_once_its_request_is_queued_and_its_scores_come_with_the_answer(calls):
    manager, prefill = Manager(calls), Prefill(calls)
    manager.turn.clear()
    request, body = a_request(), {"input_ids": [1], "stream": True}
    answering = asyncio.create_task(drained(calls, manager, request, http_of(body)))
    await asyncio.sleep(0.01)
    assert prefill.asked == []
    manager.turn.set()
    await asked(prefill)
    ((url, sent),) = prefill.asked
    meeting = {"bootstrap_host": "10.0.0.0", "bootstrap_port": 9000, "bootstrap_room": request.bootstrap_room}
    assert (url, sent) == ("http://10.0.0.0:30000", {"input_ids": [1], "stream": False, **meeting})
    assert {name: getattr(request, name) for name in meeting} == meeting
    manager.computed.set()
    await asyncio.sleep(0.01)
    # The answer waits for the scores.
    assert not answering.done()
    prefill.answers[0].set_result(computed())
    _, last = await answering
    assert last["meta_info"]["input_token_logprobs"] == [[None, 1, None]]
    assert (manager.aborted, calls._queued, calls.engines[0].calls) == ([], {}, 0)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (computed("abort"), None),
        (RuntimeError("status 500: KVTransferError: Aborted by AbortReq."), None),
        (ConnectionResetError("it is gone"), 500),
    ],
)
async def test_a_request_ends_with_its_prompt_and_keeps_an_error_status_only_if_the_engine_failed(
    calls, outcome, status
):
    manager, prefill = Manager(calls), Prefill(calls)
    request = a_request()
    stream = calls.around_generate(manager.generate, manager, request, http_of({}))
    await anext(stream)
    await asked(prefill)
    if isinstance(outcome, Exception):
        prefill.answers[0].set_exception(outcome)
    else:
        prefill.answers[0].set_result(outcome)
    last = await anext(stream)
    assert manager.aborted == ["r"]
    # The prompt's scores are not there, and not waited for.
    assert last["meta_info"]["input_token_logprobs"] == []
    out = {"meta_info": {"finish_reason": {"message": "x: Aborted by AbortReq.", "status_code": 500}}}
    calls.before_abort(manager, out, SimpleNamespace(obj=request), False)
    assert out["meta_info"]["finish_reason"].get("status_code") == status
    await stream.aclose()
    assert (calls._lost, calls.engines[0].calls) == (set(), 0)


async def test_other_errors_keep_their_status(calls):
    out = {"meta_info": {"finish_reason": {"message": "Metadata corruption detected", "status_code": 500}}}
    calls.before_abort(None, out, SimpleNamespace(obj=a_request()), False)
    assert out["meta_info"]["finish_reason"]["status_code"] == 500


async def test_a_request_that_is_dropped_drops_its_prompt(calls):
    manager, prefill = Manager(calls), Prefill(calls)
    stream = calls.around_generate(manager.generate, manager, a_request(), http_of({}))
    await anext(stream)
    await asked(prefill)
    await stream.aclose()
    await asyncio.sleep(0.01)
    assert (prefill.dropped, manager.aborted, calls._queued) == (1, [], {})
    # Also before it was queued.
    manager.turn.clear()
    waiting = asyncio.create_task(drained(calls, manager, a_request(), http_of({})))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (len(prefill.asked), calls._queued) == (1, {})


async def test_prompts_go_where_they_are_told_to_with_their_key_or_to_the_least_busy_engine(calls):
    manager, prefill = Manager(calls), Prefill(calls)
    running = []
    headers = {"x_smg_routing_key": "group-7"}
    for fields, named in [({}, {}), ({}, {}), ({"bootstrap_host": "http://10.0.0.0:30000"}, {}), ({}, headers)]:
        running.append(asyncio.create_task(drained(calls, manager, a_request(**fields), http_of({}, **named))))
        await asked(prefill, len(running))
    urls = [url for url, _ in prefill.asked]
    assert urls[:3] == ["http://10.0.0.0:30000", "http://10.0.0.1:30000", "http://10.0.0.0:30000"]
    assert [engine.calls for engine in calls.engines] == [urls.count(engine.url) for engine in calls.engines]
    again = asyncio.create_task(drained(calls, manager, a_request(), http_of({}, **headers)))
    await asked(prefill, 5)
    assert prefill.asked[4][0] == urls[3]
    for task in (*running, again):
        task.cancel()
    await asyncio.gather(*running, again, return_exceptions=True)


@pytest.mark.parametrize(
    ("engines", "request_", "http", "named"),
    [
        (3, a_request(bootstrap_host="http://elsewhere:1"), http_of({}), "is no prefill engine of this server"),
        (3, a_request(), http_of({}, path="/v1/completions"), "answers at /generate only"),
        (0, a_request(), http_of({}), "has not been told where prefill engines are"),
    ],
)
async def test_what_cannot_be_answered_is_refused(calls, engines, request_, http, named):
    manager, _ = Manager(calls), Prefill(calls)
    calls.engines = calls.engines[:engines]
    with pytest.raises(ValueError, match=named):
        await drained(calls, manager, request_, http)


async def test_a_request_with_a_room_of_its_own_passes(calls):
    manager, prefill = Manager(calls), Prefill(calls)
    manager.computed.set()
    answers = await drained(calls, manager, a_request(bootstrap_room=0), None)
    assert (len(answers), prefill.asked) == (2, [])


async def test_a_decode_engine_is_told_its_prefill_engines_over_http(calls):
    seen, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    pieces = iter(
        [
            {"body": b'{"engines": [["http://a:1",', "more_body": True},
            {"body": b" 9000]]}", "more_body": False},
        ]
    )

    async def receive() -> Any:
        return next(pieces)

    async def send(message: Any) -> None:
        sent.append(message)

    route = calls.middleware(app)
    await route({"type": "http", "path": "/generate"}, receive, send)
    await route({"type": "http", "path": "/prefill_engines"}, receive, send)
    assert seen == ["/generate"]
    assert [(engine.url, engine.host, engine.port) for engine in calls.engines] == [("http://a:1", "a", 9000)]
    assert sent[0]["status"] == 200
