"""Control calls: what was asked, of whom, and what came back."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from megasync.errors import ServerError
from megasync.serving.control import ServerControl

# The client's port of each call: the same port is the same connection.
ports: list[int] = []


@pytest.fixture
async def server():
    """(control of a small server, what the server saw, its URL)"""
    seen = []
    ports.clear()

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, request.headers.get("Authorization"), await request.text()))
        ports.append(request.transport.get_extra_info("peername")[1])
        return {
            "/json": web.json_response({"a": 1}),
            "/text": web.Response(text="done"),
            "/empty": web.Response(),
            "/bad": web.Response(status=400, text="begin first"),
            "/model_info": web.json_response({"weight_version": "default"}),
        }[request.path]

    async def slow(request: web.Request) -> None:
        await asyncio.Event().wait()

    app = web.Application()
    app.router.add_route("*", "/slow", slow)
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ServerControl(url + "/", "secret") as control:
        yield control, seen, url
    await runner.cleanup()


async def test_answers_are_json_or_text(server):
    control, seen, _ = server
    assert await control.post("/json", {"x": [1]}) == {"a": 1}
    assert await control.post("/text") == "done"
    assert await control.get("/empty") == ""
    assert seen == [
        ("POST", "/json", "Bearer secret", '{"x":[1]}'),
        ("POST", "/text", "Bearer secret", "{}"),
        ("GET", "/empty", "Bearer secret", ""),
    ]


async def test_only_gets_reuse_a_connection(server):
    control, _, _ = server
    for _ in range(3):
        await control.get("/json")
    assert len(set(ports)) == 1
    ports.clear()
    for _ in range(3):
        await control.post("/json")
    assert len(set(ports)) == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda control: control.post("/bad"), "POST {url}/bad: status 400: begin first"),
        (lambda control: control.post("/slow", timeout=0.1), "/slow: no answer within 0.1 s"),
        (lambda control: control.weight_version(), "/model_info has no integer weight_version"),
        (lambda _: ServerControl("http://127.0.0.1:9").get("/model_info"), "127.0.0.1:9/model_info"),
    ],
    ids=["refused", "late", "no version", "no server"],
)
async def test_a_call_that_fails_is_a_server_error_that_names_it(server, call, words):
    control, _, url = server
    with pytest.raises(ServerError, match=words.format(url=url)):
        await call(control)


async def test_a_response_can_be_read_while_it_arrives(server):
    control, seen, url = server
    async with control.stream("/json", {"x": 1}) as response:
        assert await response.json() == {"a": 1}
    assert seen == [("POST", "/json", "Bearer secret", '{"x":1}')]
    with pytest.raises(ServerError, match=rf"POST {url}/bad: status 400: begin first"):
        async with control.stream("/bad", {}):
            pytest.fail("it was refused")
    await control.close()
    with pytest.raises(ServerError, match="the server is gone"):
        async with control.stream("/json", {}):
            pytest.fail("it is closed")


async def test_a_caller_gets_its_own_timeout_at_the_moment_of_the_calls_timeout(server):
    control, _, _ = server
    loop = asyncio.get_running_loop()
    # Both end while the loop is busy, so it finds them at the same moment.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05) as callers:
            loop.call_later(0.02, time.sleep, 0.1)
            await control.post("/slow", timeout=0.05)
    assert callers.expired()
