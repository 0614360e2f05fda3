"""OpenEnv servers as environments: what the model reads and writes, and what comes of each failure.

The server is a fake that speaks OpenEnv's WebSocket protocol on loopback; one test has a real server.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import WSCloseCode, web
from waits import until

from megasync.environments import EnvironmentPool
from megasync.environments.protocol import environment_factory
from megasync.errors import ConfigError, DataError, ServerError

TEXT = {"title": "EchoAction", "required": ["message"], "properties": {"message": {"type": "string"}, "metadata": {}}}
MOVES = {"required": ["x"], "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {}}}
TOOLS = [{"name": "look", "description": "Counts an item.", "input_schema": {"type": "object"}}]


def observed(observation, reward=None, done=False):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def refused(code, message="no", **more):
    return {"type": "error", "data": {"code": code, "message": message} | more}


class FakeOpenEnv:
    """`answer(message)` gives what is sent: a dictionary, a text or bytes; None closes the connection."""

    def __init__(self) -> None:
        self.schema: object = {"action": TEXT}
        self.status = 200
        self.received: list[dict] = []
        self.sessions = self.open = 0
        self.ended = asyncio.Event()
        self.sockets: set[web.WebSocketResponse] = set()

    def answer(self, message):
        return observed({"text": "ready"}) if message["type"] == "reset" else observed({"text": "ok"}, 0.5)

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/ws", self._socket)
        app.router.add_get("/schema", self._schema)
        self.runner = web.AppRunner(app, shutdown_timeout=0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _schema(self, request):
        return web.Response(text=self.schema if isinstance(self.schema, str) else json.dumps(self.schema))

    async def _socket(self, request):
        if self.status != 200:
            return web.Response(status=self.status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.add(socket)
        self.sessions += 1
        self.open += 1
        try:
            async for raw in socket:
                message = json.loads(raw.data)
                self.received.append(message)
                answer = self.answer(message)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                    break
                if answer is None:
                    await socket.close(code=WSCloseCode.GOING_AWAY)
                elif isinstance(answer, bytes):
                    await socket.send_bytes(answer)
                else:
                    await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.open -= 1
            self.sockets.discard(socket)
        return socket


@pytest.fixture
async def fake():
    server = FakeOpenEnv()
    server.url = await server.start()
    yield server
    server.ended.set()
    await server.runner.cleanup()


@pytest.fixture
async def make_pool():
    pools = []

    def make(deadline=20.0, size=2, start=60.0, **options):
        pools.append(EnvironmentPool(environment_factory("openenv", options, start), size, deadline))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


async def play(pool, *actions, **row):
    async with pool.lease() as episode:
        first = await episode.reset({"prompt": "hi"} | row)
        return first, [await episode.step(action) for action in actions]


async def test_the_models_text_is_the_only_required_field_of_the_action(fake, make_pool):
    first, steps = await play(make_pool(url=fake.url), "left", seed=7, reset={"level": 2})
    assert (first, steps) == ("ready", [("ok", 0.5, False)])
    reset, step = fake.received
    assert reset == {"type": "reset", "data": {"seed": 7, "level": 2}}
    assert step == {"type": "step", "data": {"message": "left"}}


async def test_episodes_have_sessions_of_their_own_and_reuse_them(fake, make_pool):
    pool = make_pool(url=fake.url, size=3)
    await asyncio.gather(*(play(pool, "a", "b") for _ in range(12)))
    assert 1 <= fake.sessions <= 3 and len(fake.received) == 36
    await pool.close()
    await until(lambda: fake.open == 0)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"x": 1}', {"x": 1}),
        ('I go.\n```json\n{"x": 1, "y": {"z": 2}}\n``` Done {it}.', {"x": 1, "y": {"z": 2}}),
        ('first {"x": 2} then', {"x": 2}),
        ("x is 1", "it has no JSON object"),
        ("[1]", "it has no JSON object"),
        ('{"x": ' * 5000, "it has no JSON object"),
        ("{" * 100_000 + "}", "it has no JSON object"),
        ("", "it has no JSON object"),
    ],
)
async def test_an_action_of_several_fields_is_a_json_object(fake, make_pool, text, action):
    fake.schema = {"action": MOVES}
    first, ((observation, reward, done),) = await play(make_pool(url=fake.url), text)
    assert first.startswith("ready\n\nAnswer with a JSON object of this schema") and "metadata" not in first
    if isinstance(action, dict):
        assert fake.received[-1]["data"] == action and observation == "ok"
    else:
        assert [message["type"] for message in fake.received] == ["reset"]
        assert observation.startswith(f"That is no action: {action}. Answer with") and (reward, done) == (0.0, False)


async def test_an_action_that_the_server_refuses_is_an_observation(fake, make_pool):
    problems = [{"loc": ["x"], "msg": "Input should be a valid integer"}]
    fake.schema = {"action": MOVES}
    fake.answer = lambda message: (
        refused("VALIDATION_ERROR", "Invalid message", errors=problems)
        if message["type"] == "step" and message["data"]["x"] == "a"
        else observed({"text": "ok"}, 1, True)
    )
    pool = make_pool(url=fake.url)
    _, (no, yes) = await play(pool, '{"x": "a"}', '{"x": 1}')
    assert no[0].startswith("That is no action: x: Input should be a valid integer.") and no[1:] == (0.0, False)
    assert yes == ("ok", 1.0, True)


async def test_tools_of_an_mcp_environment_are_listed_and_called(fake, make_pool):
    fake.schema = {"action": {"title": "CallToolAction", "properties": {}}}

    def answer(message):
        if message["type"] == "reset":
            return observed({"metadata": {}})
        if message["data"]["type"] == "list_tools":
            return observed({"tools": TOOLS})
        return observed({"tool_name": message["data"]["tool_name"], "result": {"data": 4}, "error": None}, 1.0, True)

    fake.answer = answer
    first, (unknown, called) = await play(
        make_pool(url=fake.url), '{"name": "leap"}', 'I look: {"name": "look", "arguments": {"item": "nut"}}'
    )
    assert '"name": "look", "description": "Counts an item."' in first
    assert 'name="leap" and arguments={} call none of the tools' in unknown[0]
    assert fake.received[-1]["data"] == {"type": "call_tool", "tool_name": "look", "arguments": {"item": "nut"}}
    assert called == ('{"tool_name": "look", "result": {"data": 4}}', 1.0, True)


@pytest.mark.parametrize(
    ("observation", "options", "text"),
    [
        ({"text": "ok", "count": None, "metadata": {"a": 1}}, {}, "ok"),
        ({"text": "ok", "count": 0, "empty": []}, {}, '{"text": "ok", "count": 0}'),
        ({"count": 0}, {}, '{"count": 0}'),
        ({"text": "ok", "board": ["x", "ö"]}, {"observation": "board"}, '["x", "ö"]'),
        ("plain", {}, "plain"),
        ({}, {}, "{}"),
    ],
)
async def test_an_observation_is_shown_as_text(fake, make_pool, observation, options, text):
    fake.answer = lambda message: observed(observation)
    assert await play(make_pool(url=fake.url, **options), "a") == (text, [(text, 0.0, False)])


def fails_at(kind, answer):
    return lambda message: answer if message["type"] == kind else observed({"text": "ready"})


HUGE = json.dumps(observed({"text": "x" * (17 * 1024**2)}))


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (fails_at("reset", refused("CAPACITY_REACHED", "1 of 1")), ServerError, r"no session: 1 of 1; set .*\.pool"),
        (fails_at("reset", refused("FACTORY_ERROR")), ServerError, "no session"),
        (fails_at("step", None), ServerError, "closed the connection"),
        (fails_at("step", refused("EXECUTION_ERROR", "KeyError: rope")), DataError, "EXECUTION_ERROR: KeyError: rope"),
        (fails_at("reset", refused("VALIDATION_ERROR")), DataError, "answered reset with VALIDATION_ERROR"),
        (fails_at("step", "no json"), DataError, "in another form: no json"),
        (fails_at("step", "[" * 50_000), DataError, "in another form"),
        (fails_at("step", b"{}"), DataError, "sent bytes"),
        (fails_at("step", {"type": "state", "data": {}}), DataError, "in another form"),
        (fails_at("step", {"type": "observation", "data": {"reward": 1}}), DataError, "in another form"),
        (fails_at("step", {"type": "observation"}), DataError, "in another form"),
        (fails_at("step", observed(["a"])), DataError, r"an observation must be an object, not \['a'\]"),
        (fails_at("step", observed({"text": "a"}, "1")), DataError, "the reward '1', which is no finite number"),
        (fails_at("step", observed({"text": "a"}, float("nan"))), DataError, "the reward nan"),
        (fails_at("step", observed({"text": "a"}, float("inf"))), DataError, "the reward inf"),
        (fails_at("step", HUGE), DataError, "more than 16 MiB"),
    ],
)
async def test_a_failure_is_the_servers_or_the_environments_and_its_connection_is_not_used_again(
    fake, make_pool, answer, kind, words
):
    pool = make_pool(url=fake.url)
    fake.answer = answer
    with pytest.raises(kind, match=words):
        await play(pool, "a")
    await until(lambda: fake.open == 0)
    del fake.answer
    assert (await play(pool, "a"))[1] == [("ok", 0.5, False)]


async def test_a_call_that_hangs_is_given_up_with_its_session(fake, make_pool):
    fake.answer = lambda message: fake.ended.wait() if message["type"] == "step" else observed({"text": "ready"})
    pool = make_pool(url=fake.url, deadline=0.3)
    with pytest.raises(DataError, match=r"step did not answer within 0\.3 s; raise timeouts.environment"):
        await play(pool, "a")
    del fake.answer
    assert (await play(pool, "a"))[1] == [("ok", 0.5, False)] and fake.sessions == 2


async def test_a_session_that_the_server_has_closed_between_episodes_is_opened_again(fake, make_pool):
    pool = make_pool(url=fake.url, size=1)
    await play(pool, "a")
    for socket in list(fake.sockets):
        await socket.close()
    await until(lambda: fake.open == 0)
    await play(pool, "a")
    assert fake.sessions == 2


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"status": 500}, ServerError, "no connection"),
        ({"status": 404}, DataError, "status 404: it is no OpenEnv server"),
        ({"schema": "<html>"}, DataError, "schema is not JSON"),
        ({"schema": [1]}, DataError, "the server's schema must be an object"),
        ({"schema": {"action": None}}, DataError, "its action schema must be an object"),
    ],
)
async def test_what_is_no_openenv_server_is_said(fake, make_pool, change, kind, words):
    vars(fake).update(change)
    with pytest.raises(kind, match=words):
        await play(make_pool(url=fake.url))
    await until(lambda: fake.open == 0)


async def test_a_server_that_is_down_fails_episodes_as_infrastructure(fake, make_pool):
    await fake.runner.cleanup()
    with pytest.raises(ServerError, match="no connection to the OpenEnv server"):
        await play(make_pool(url=fake.url))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "takes a url or a command"),
        ({"url": "http://a", "command": "b"}, "takes a url or a command"),
        ({"url": "localhost:8000"}, "'localhost:8000'.* is no address"),
        ({"command": "a", "folder": "/absent"}, "folder='/absent'.*does not exist"),
        ({"url": "http://a", "port": 3}, "rejects its options.*port"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        environment_factory("openenv", options)


@pytest.mark.parametrize("field", [{"action": "none"}, {"observation": "none"}])
async def test_a_field_that_the_environment_does_not_have_is_refused(fake, make_pool, field):
    with pytest.raises(DataError, match=r"has no field 'none'; it has (message|text)"):
        await play(make_pool(url=fake.url, **field), "a")


@pytest.mark.processes
async def test_a_command_that_never_answers_is_refused_before_the_first_episode(make_pool, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = make_pool(command=[sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"])
    with pytest.raises(ConfigError, match=r"(?s)ended with status 3.*out of luck.*check rollout.environment.options"):
        await pool.ready()


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """OpenEnv's own example, as its command line makes it. It has one session."""
    program = Path(sys.prefix) / "openenv" / "bin" / "openenv"
    if not program.exists():
        pytest.skip("needs OpenEnv: megasync install openenv")
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([program, "init", "echo_env", "--output-dir", folder], check=True, capture_output=True)
    return folder / "echo_env"


@pytest.mark.extra
async def test_a_real_server_that_dies_in_an_episode_is_started_again(echo, make_pool, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = make_pool(
        command="uvicorn server.app:app --host {host} --port {port}", folder=str(echo), size=1, start=300.0
    )
    await pool.ready()
    shared = pool._factory.shared
    async with pool.lease() as episode:
        assert "environment ready!" in await episode.reset({"prompt": "hi"})
        observation, reward, done = await episode.step("hello")
        assert json.loads(observation) == {"echoed_message": "hello", "message_length": 5}
        assert (reward, done) == (0.5, False)
        with pytest.raises(ServerError, match="no session.*rollout.environment.pool"):
            await play(make_pool(url=shared.url))
        shared._owned.kill()
        with pytest.raises(ServerError, match="connection"):
            while True:
                await episode.step("hello")
    await until(lambda: not shared._owned.alive())
    assert (await play(pool, "hi"))[1][0].reward == 0.2
