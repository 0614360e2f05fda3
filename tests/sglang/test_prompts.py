"""What becomes of the two halves of a request that a prefill and a decode engine share. No server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megasync.sglang.prompts import PrefillEngine, PromptCalls

KEY = "key-of-these-engines"


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
