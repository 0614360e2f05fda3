"""Tools: functions to schemas, and every way in which a call can end."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

import pytest
from passing_time import pass_time
from waits import PATIENCE

from megasync.concurrency.threads import DaemonThreads
from megasync.errors import ConfigError, ServerError
from megasync.rollout import tools
from megasync.rollout.tools import Toolbox, ToolCall, as_tool


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def look_up(word: str, kind: Literal["noun", "verb"] = "noun") -> dict:
    """Looks a word up.

    Args:
        word: the word
        kind: what it is
    """
    return {"word": word, "kind": kind, "é": [1]}


def call(name, arguments, number=0):
    return ToolCall(f"call_{number}", name, arguments, "raw")


async def observe(toolbox, *calls):
    return [message["content"] for message in await toolbox.run(calls)]


def test_a_function_becomes_the_schema_that_chat_templates_know():
    assert as_tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second"},
                },
                "required": ["a"],
            },
        },
    }


def test_a_function_that_does_not_describe_its_arguments_is_refused():
    def bare(x):
        return x

    with pytest.raises(ConfigError, match=r"bare cannot be a tool: .*line under 'Args:'"):
        as_tool(bare)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        Toolbox([add, add])


async def test_calls_of_sync_and_async_tools_come_back_in_their_order():
    messages = await Toolbox([add, look_up]).run([call("add", {"a": 1}, 0), call("look_up", {"word": "é"}, 1)])
    assert messages == [
        {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "2"},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "name": "look_up",
            "content": '{"word": "é", "kind": "noun", "é": [1]}',
        },
    ]


async def test_calls_run_at_the_same_time():
    meeting = threading.Barrier(2)

    def meet() -> str:
        """Backoff for the other one."""
        meeting.wait(PATIENCE)
        return "met"

    assert await observe(Toolbox([meet], timeout=PATIENCE), call("meet", {}), call("meet", {}, 1)) == ["met", "met"]


async def test_arguments_are_brought_to_their_types_and_refused_when_they_do_not_fit():
    toolbox = Toolbox([add, look_up])
    texts = await observe(
        toolbox,
        call("add", {"a": "4"}),
        call("add", {"a": "four"}),
        call("add", {"b": 1}),
        call("add", {"a": 1, "c": 2}),
        call("look_up", {"word": "x", "kind": "adverb"}),
        call("add", None),
    )
    assert texts[0] == "5"
    for text, words in zip(
        texts[1:],
        [
            "argument 'a' of add",
            "missing a required",
            "unexpected keyword",
            "argument 'kind'",
            "not a JSON object: raw",
        ],
        strict=True,
    ):
        assert text.startswith("Error: ")
        assert words in text
    assert toolbox.metrics()["tool_malformed"] == 5.0


@pytest.mark.parametrize(
    "error", [ValueError("no"), StopIteration("no"), TimeoutError("no"), asyncio.CancelledError("no")]
)
async def test_whatever_a_tool_raises_is_an_observation(error):
    def broken() -> str:
        """Fails."""
        raise error

    async def broken_too() -> str:
        """Fails."""
        raise error

    toolbox = Toolbox([broken, broken_too])
    texts = await observe(toolbox, call("broken", {}), call("broken_too", {}))
    assert all(text.startswith("Error: ") for text in texts)
    assert texts[0].endswith(": no")
    assert (toolbox.counts["errors"], toolbox.counts["timeouts"]) == (2, 0)


async def test_an_outage_is_no_observation_and_leaves_no_call_running():
    both, ended = asyncio.Barrier(2), []

    async def down() -> str:
        """Asks a service that is not there."""
        await both.wait()
        raise KeyError("results") from ServerError("no retriever answers")

    async def slow() -> str:
        """Takes longer than the other."""
        await both.wait()
        await asyncio.sleep(0.01)
        ended.append(True)
        return "done"

    toolbox = Toolbox([down, slow])
    with pytest.raises(KeyError, match="results") as raised:
        await toolbox.run([call("down", {}), call("slow", {})])
    assert isinstance(raised.value.__cause__, ServerError)
    assert (ended, toolbox.counts["errors"]) == ([True], 0)


async def test_a_call_that_takes_too_long_is_abandoned():
    release = threading.Event()

    def slow() -> str:
        """Backoff."""
        release.wait(PATIENCE)
        return "late"

    async def stubborn() -> str:
        """Does not end when it is told to."""
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "late"

    toolbox = Toolbox([slow, stubborn], timeout=0.1)
    try:
        texts = await observe(toolbox, call("slow", {}), call("stubborn", {}))
    finally:
        release.set()
    assert texts == ["Error: slow did not answer within 0.1 s.", "Error: stubborn did not answer within 0.1 s."]
    assert toolbox.counts["timeouts"] == 2


async def test_a_tool_that_never_returns_takes_no_thread_of_another(monkeypatch):
    monkeypatch.setattr(tools, "_threads", DaemonThreads(2))
    monkeypatch.setattr(tools, "THREADS", 2)
    release, both = threading.Event(), threading.Barrier(3)

    def stuck() -> str:
        """Never answers."""
        both.wait(PATIENCE)
        release.wait(PATIENCE)
        return "late"

    toolbox = Toolbox([stuck, add], timeout=30.0)
    stuck_calls = asyncio.create_task(observe(toolbox, *(call("stuck", {}, n) for n in range(3))))
    try:
        await asyncio.to_thread(both.wait, PATIENCE)
        assert await observe(toolbox, call("add", {"a": 1}, 9)) == ["2"]
        while not stuck_calls.done():
            pass_time(30.0)
            await asyncio.sleep(0)
        texts = await stuck_calls
    finally:
        release.set()
    late = "Error: stuck did not answer within 30 s."
    assert texts == [late, late, "Error: stuck is not available: none of its 2 earlier calls has ended."]
    assert toolbox.counts["timeouts"] == 3


async def test_a_call_made_before_is_counted_whatever_the_order_of_its_arguments():
    toolbox = Toolbox([add])
    await observe(toolbox, call("add", {"a": 1, "b": 2}))
    await observe(toolbox, call("add", {"b": 2, "a": 1}, 1), call("add", {"a": 2, "b": 2}, 2))
    assert toolbox.metrics() == {
        "tool_calls": 3.0,
        "tool_errors": 0.0,
        "tool_timeouts": 0.0,
        "tool_unknown": 0.0,
        "tool_malformed": 0.0,
        "tool_repeated": 1.0,
    }
