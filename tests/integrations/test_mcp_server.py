"""Tools of real MCP servers over both transports, and what servers with faults do to a sample."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("mcp", reason="megasync install mcp")
pytestmark = [pytest.mark.processes, pytest.mark.extra]

from processes import gone, lives  # noqa: E402
from waits import until  # noqa: E402

from megasync.errors import ConfigError, ServiceFailed  # noqa: E402
from megasync.integrations.mcp import server as module  # noqa: E402
from megasync.integrations.mcp import stdio  # noqa: E402
from megasync.integrations.mcp.server import McpServer  # noqa: E402
from megasync.rollout.tool_agent import tool_agent  # noqa: E402
from megasync.rollout.tools import Toolbox, ToolCall  # noqa: E402
from megasync.serving.process import free_port  # noqa: E402

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = [sys.executable, str(SUPPORT / "mcp_program.py")]


def faulty(fault, **options):
    return McpServer(fault, [sys.executable, str(SUPPORT / "mcp_faulty.py"), fault], shared=True, **options)


@pytest.fixture
async def opened():
    """Opens servers, and closes them with the test."""
    servers = []

    async def start(server):
        servers.append(server)
        await server.open()
        return server

    yield start
    for server in servers:
        await server.close()


@pytest.fixture(params=["stdio", "http"])
async def program(request, opened, tmp_path):
    """A shared server of the SDK, by each transport."""
    if request.param == "stdio":
        marks = {"MARKS": str(tmp_path / "marks")}
        yield await opened(McpServer("test", [*PROGRAM, "stdio"], environment=marks, shared=True))
        return
    process, server = await served(free_port(), opened)
    yield server
    process.kill()
    process.wait()


async def served(port, opened, **environment):
    """The process of a server at a port, and a connection to it."""
    command = [*PROGRAM, str(port)]
    process = await asyncio.to_thread(
        subprocess.Popen, command, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    while True:
        try:
            return process, await opened(McpServer("test", url=f"http://127.0.0.1:{port}/mcp", shared=True))
        except ServiceFailed:
            assert process.poll() is None


async def call(tools, tool, timeout=30.0, **arguments):
    toolbox = Toolbox(tools, timeout)
    (message,) = await toolbox.run([ToolCall("1", tool, arguments)])
    return message["content"], +toolbox.counts


async def called(server, tool, timeout=30.0, **arguments):
    async with server.session() as tools:
        return (await call(tools, tool, timeout, **arguments))[0]


async def test_a_server_is_called_by_the_schemas_that_it_gives(program):
    async with program.session() as tools:
        schema = next(tool.schema for tool in tools if tool.name == "add")
        assert schema["function"]["parameters"]["properties"]["a"] == {"title": "A", "type": "integer"}
        assert await call(tools, "add", a=2, b=3) == ("5", {"calls": 1})
        text, counts = await call(tools, "add", a="x")
        assert text.startswith("Error: ") and "valid integer" in text and counts == {"calls": 1, "errors": 1}
        text, counts = await call(tools, "fail")
        assert text.startswith("Error: ") and counts["errors"] == 1
        text, _ = await call(tools, "picture")
        assert text == "see:\n[image of type image/png left out: only text can be read]"
        text, _ = await call(tools, "nothing")
        assert text.startswith("Error: there is no tool 'nothing'")


async def test_a_thousand_calls_are_in_progress_at_a_time(program):
    """Each takes a second: one after the other, they would take a quarter of an hour and meet the deadline."""
    async with program.session() as tools:
        toolbox = Toolbox(tools, timeout=200.0)
        calls = [ToolCall(str(number), "slow", {"seconds": 1.0}) for number in range(1000)]
        messages = await toolbox.run(calls)
    assert {message["content"] for message in messages} == {"done"} and not toolbox.counts["timeouts"]


async def test_a_late_call_is_the_models_to_see_while_the_server_answers(program):
    async with program.session() as tools:
        text, counts = await call(tools, "slow", timeout=0.5, seconds=1000.0)
        assert text == "Error: slow did not answer within 0.5 s." and counts["timeouts"] == 1
        assert (await call(tools, "add", a=1, b=1))[0] == "2"


async def test_tools_that_change_are_those_of_the_next_sample(program):
    async with program.session() as tools:
        await call(tools, "grow")
        assert "extra" not in [tool.name for tool in tools]
    await until(lambda: program._schemas is None)
    assert await called(program, "extra") == "new"


async def test_a_shared_server_that_dies_in_a_call_is_started_again_and_the_call_is_not_repeated(opened, tmp_path):
    marks = tmp_path / "marks"
    server = await opened(McpServer("test", [*PROGRAM, "stdio"], environment={"MARKS": str(marks)}, shared=True))
    first = await called(server, "pid")
    async with server.session() as tools:
        with pytest.raises(ServiceFailed, match=r"the MCP server 'test': it ended.* during a call"):
            await call(tools, "die")
        assert marks.read_text() == "die\n"
        # The next call has not begun, so it is the new server's.
        assert (await call(tools, "count"))[0] == "1"
        assert (await call(tools, "pid"))[0] != first


async def test_a_killed_server_fails_only_the_calls_in_progress(opened, tmp_path):
    marks = tmp_path / "marks"
    server = await opened(McpServer("test", [*PROGRAM, "stdio"], environment={"MARKS": str(marks)}, shared=True))
    pid = int(await called(server, "pid"))
    running = [asyncio.create_task(called(server, "slow", seconds=1000.0)) for _ in range(20)]
    await until(lambda: marks.exists() and marks.read_text().count("slow") == 20)
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.gather(*running, return_exceptions=True)
    assert {type(result) for result in results} == {ServiceFailed}
    assert int(await called(server, "pid")) != pid


async def test_a_server_that_answers_nothing_any_more_is_killed_and_started_again(opened, monkeypatch):
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.5)
    server = await opened(McpServer("test", [*PROGRAM, "stdio"], shared=True))
    pid = int(await called(server, "pid"))
    with pytest.raises(ServiceFailed, match=r"it answered neither a call within 0\.5 s nor a request after it"):
        await called(server, "hang", timeout=0.5)
    assert int(await called(server, "pid")) != pid
    await until(lambda: not lives(pid))


async def test_a_killed_server_over_http_fails_the_calls_in_progress_and_serves_again_when_it_is_back(opened, tmp_path):
    port, marks = free_port(), tmp_path / "marks"
    process, server = await served(port, opened, MARKS=str(marks))
    try:
        running = [asyncio.create_task(called(server, "slow", seconds=1000.0)) for _ in range(20)]
        await until(lambda: marks.exists() and marks.read_text().count("slow") == 20)
        process.kill()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert {type(result) for result in results} == {ServiceFailed}
        with pytest.raises(ServiceFailed):
            await called(server, "add", a=1, b=2)
        process.wait()
        process, _ = await served(port, opened)
        assert await called(server, "add", a=1, b=2) == "3"
    finally:
        process.kill()
        process.wait()


async def test_each_sample_has_a_server_of_its_own_by_default_which_ends_with_it(opened):
    server = await opened(McpServer("test", [*PROGRAM, "stdio"], pool=2))

    async def sample():
        async with server.session() as tools:
            assert (await call(tools, "count"))[0] == "1"
            return int((await call(tools, "pid"))[0])

    pids = await asyncio.gather(*(sample() for _ in range(3)))
    assert len(set(pids)) == 3
    await until(lambda: not any(map(lives, pids)))


async def test_the_state_of_a_sample_is_lost_with_its_server(opened):
    server = await opened(McpServer("test", [*PROGRAM, "stdio"]))
    async with server.session() as tools:
        with pytest.raises(ServiceFailed):
            await call(tools, "die")
        with pytest.raises(ServiceFailed, match="and with it the state of the sample"):
            await call(tools, "count")


async def test_a_server_gets_no_variable_of_the_worker_but_those_that_are_named(opened, monkeypatch):
    monkeypatch.setenv("ADMIN_KEY", "secret")
    server = await opened(McpServer("test", [*PROGRAM, "stdio"], environment={"GIVEN": "yes"}, shared=True))
    assert await called(server, "variable", name="ADMIN_KEY") == "none"
    assert await called(server, "variable", name="GIVEN") == "yes"


async def test_a_server_that_ignores_its_end_is_killed_with_its_children(opened):
    server = await opened(faulty("deaf"))
    pids = [int(pid) for pid in (await called(server, "tool")).split()]
    assert all(map(lives, pids))
    await server.close()
    assert not any(map(lives, pids))


WORKER = """
import asyncio, sys
from megasync.integrations.mcp.server import McpServer
async def main():
    server = McpServer("deaf", sys.argv[1:], shared=True)
    await server.open()
    async with server.session() as tools:
        print(await tools[0].call({}, 60.0), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def test_servers_and_their_children_end_with_a_killed_worker():
    command = [sys.executable, "-c", WORKER, sys.executable, str(SUPPORT / "mcp_faulty.py"), "deaf"]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    servers = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
    assert len(servers) == 2
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert gone(lambda: servers)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "it ended; the end of its standard error: 'no licence'"),
        ("silent", "it did not start within 2 s"),
    ],
)
async def test_a_server_that_does_not_start_is_named_with_what_it_said(opened, monkeypatch, fault, message):
    monkeypatch.setattr(module, "START_SECONDS", 2.0)
    with pytest.raises(ServiceFailed, match=f"the MCP server '{fault}': {message}"):
        await opened(faulty(fault))


async def test_a_command_or_a_url_without_a_server_is_named(opened, tmp_path):
    with pytest.raises(ServiceFailed, match="cannot run '/no/such/program'"):
        await opened(McpServer("gone", ["/no/such/program"]))
    with pytest.raises(ServiceFailed, match="the MCP server 'gone'"):
        await opened(McpServer("gone", url=f"http://127.0.0.1:{free_port()}/mcp"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flood", "it wrote more than 1000 lines that are no messages, such as 'xxx"),
        ("endless_line", "it wrote a line of more than 1 MiB"),
        ("other_id", "it answered neither a call within 1 s nor a request after it"),
        ("invalid", "a call of tool failed"),
        ("internal", "no database"),
    ],
)
async def test_a_faulty_answer_is_the_servers_failure(opened, monkeypatch, fault, message):
    monkeypatch.setattr(stdio, "LINE_BYTES", 2**20)
    server = await opened(faulty(fault))
    if fault == "other_id":
        # It answers lists; here it answers nothing.
        monkeypatch.setattr(module._Connection, "_answers", no_answer)
    with pytest.raises(ServiceFailed, match=message):
        await called(server, "tool", timeout=1.0 if fault == "other_id" else 60.0)


async def no_answer(self, client):
    return False


async def test_lines_that_are_no_messages_are_passed_over(opened):
    assert await called(await opened(faulty("noise")), "tool") == "done"


async def test_a_result_under_another_id_is_nobodys(opened):
    server = await opened(faulty("other_id"))
    assert await called(server, "tool", timeout=0.5) == "Error: tool did not answer within 0.5 s."


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("many", r"'many' has 10,000 tools, more than the 128 .* name those .* such as tool0, tool1, tool2"),
        ("wide", r"the schema of wide has 100,\d+ characters"),
        ("blank", r"'two words', which a model cannot call"),
        ("endless", r"lists more than 20,000 tools or 1,000 pages"),
    ],
)
async def test_tools_that_no_prompt_can_hold_are_refused(opened, fault, message):
    with pytest.raises(ConfigError, match=message):
        await opened(faulty(fault))


async def test_of_many_tools_those_that_are_named_are_offered(opened):
    server = await opened(faulty("many", tools=["tool9999", "tool3"], prefix="m_"))
    assert [tool.name for tool in server.offered] == ["m_tool9999", "m_tool3"]
    assert await called(server, "m_tool3") == "done"
    with pytest.raises(ConfigError, match=r"'many' has no tool 'lost'; it has 10000: tool0, "):
        await opened(faulty("many", tools=["lost"]))


async def test_unusual_schemas_are_passed_on_and_long_descriptions_are_cut(opened):
    odd, bare = (tool.schema["function"] for tool in (await opened(faulty("odd"))).offered)
    assert odd["parameters"]["properties"] == {"at": {"$ref": "#/$defs/point"}}
    assert odd["parameters"]["$defs"]["point"]["anyOf"][1] == {"$ref": "#/$defs/point"}
    assert len(odd["description"]) < 5000
    assert bare["parameters"] == {"type": "object", "properties": {}}


async def test_two_servers_with_a_tool_of_one_name_are_refused_with_both_names(opened):
    first, second = await opened(faulty("noise")), await opened(faulty("internal"))
    with pytest.raises(ConfigError, match=r"'tool'.*the MCP server 'noise' and of the MCP server 'internal'.*prefix"):
        Toolbox([*first.offered, *second.offered])


async def test_a_server_that_fails_for_everybody_pauses(opened, monkeypatch):
    server = await opened(faulty("internal"))
    server._breaker._clock = iter(range(0, 10**6, 10)).__next__
    for _ in range(3):
        with pytest.raises(ServiceFailed):
            await called(server, "tool")
    assert server._breaker.paused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs `command` .* or `url` .* and has neither"),
        ({"command": ["a"], "url": "http://a"}, "and has both"),
        ({"url": "a:80"}, "begin it with http:// or https://"),
        ({"command": ["a"], "headers": {"a": "b"}}, "has `headers`, which only a server with `url` reads"),
        ({"url": "http://a", "environment": {"a": "b"}}, "has `environment`, which only a server with `command`"),
    ],
)
def test_contradictory_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"the MCP server 'x' {message}|the MCP server 'x'.*{message}"):
        McpServer("x", **options)


async def test_a_copy_for_a_worker_connects_itself(opened):
    server = await opened(McpServer("test", [*PROGRAM, "stdio"], tools=["pid"], prefix="p_", shared=True))
    copy = await opened(pickle.loads(pickle.dumps(server)))
    assert await called(server, "p_pid") != await called(copy, "p_pid")


class Client:
    """Answers with these calls, then with none."""

    def __init__(self, *calls):
        self.calls = list(calls)

    async def chat(self, messages, tools):
        self.messages, self.offered = messages, [tool.name for tool in tools]
        calls = [self.calls.pop(0)] if self.calls else []
        return SimpleNamespace(tool_calls=calls, malformed_calls=0, messages=[*messages], trajectories=dict)


async def test_the_tool_agent_offers_functions_and_the_tools_of_servers():
    def double(number: int) -> int:
        """Doubles.

        Args:
            number: what to double
        """
        return 2 * number

    server = McpServer("test", [*PROGRAM, "stdio"], tools=["add"], shared=True)
    agent = tool_agent([double, server])
    try:
        await agent.open()
        client = Client(ToolCall("1", "add", {"a": 1, "b": 2}), ToolCall("2", "double", {"number": 4}))
        played = await agent(client, {"messages": [{"role": "user", "content": "?"}]})
        assert client.offered == [tool.name for tool in agent.offered] == ["double", "add"]
        assert [message["content"] for message in client.messages] == ["?", "3", "8"]
        assert (played["metrics"]["tool_calls"], played["metrics"]["turn_limit"]) == (2.0, 0.0)
    finally:
        await agent.close()


async def test_the_tool_agent_refuses_tools_of_one_name_before_the_run_begins():
    agent = tool_agent([faulty("noise"), faulty("internal")])
    try:
        with pytest.raises(ConfigError, match=r"of the MCP server 'noise' and of the MCP server 'internal'"):
            await agent.open()
    finally:
        await agent.close()
