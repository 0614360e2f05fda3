"""Three dialects over one gateway, spoken by the unchanged clients of OpenAI and Anthropic.

Whatever the dialect, the model sees the same tokens, and each trajectory has exactly what the servers sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai as package
import pytest
from gateway_rig import HI, TEMPLATE
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from megasync.config.schema import ChatConfig, SamplingConfig
from megasync.errors import DataError
from megasync.gateway.chat_completions import ChatExchange
from megasync.gateway.messages import MessagesExchange
from megasync.gateway.request import Kept, Request
from megasync.gateway.responses import ResponsesExchange
from megasync.gateway.transcript import Transcript
from megasync.rollout.conversation import AnswerTemplate, Conversation

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
NAMES = ["add", "subtract"]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
QUESTION = "hi"


@pytest.fixture
def anthropic():
    return pytest.importorskip("anthropic", reason="needs Anthropic's client: megasync install anthropic")


# Agents: each asks, runs the calls of `add`, and returns the texts of its answers. `stream` is how.


async def chat_agent(base_url, api_key, stream) -> list[str]:
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
    texts = []
    async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            if stream:
                async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                    async for _ in events:
                        pass
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (
                    (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0].message
                )
            texts.append(message.content or "")
            sent = message.model_dump(exclude_none=True)
            for call in sent.get("tool_calls", ()):
                call["function"].pop("parsed_arguments", None)
            messages.append({key: value for key, value in sent.items() if key != "parsed"})
            if not message.tool_calls:
                return texts
            for call in message.tool_calls:
                result = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses_agent(by: Literal["items", "response", "references"] = "items") -> Callable[..., Any]:
    async def agent(base_url, api_key, stream) -> list[str]:
        tools: Any = [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}]
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        texts, given = [], {}
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            while True:
                options: Any = {"model": "m", "input": items, "tools": tools, "instructions": "Be kind."} | given
                if stream:
                    async with client.responses.stream(**options) as events:
                        async for _ in events:
                            pass
                        response = await events.get_final_response()
                else:
                    response = await client.responses.create(**options)
                texts.append(response.output_text)
                output = [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
                for item in output:
                    for part in item.get("content") or ():
                        part.pop("parsed", None)
                calls = [item for item in output if item["type"] == "function_call"]
                if not calls:
                    return texts
                results = [
                    {
                        "type": "function_call_output",
                        "call_id": call["call_id"],
                        "output": str(sum(json.loads(call["arguments"]).values())),
                    }
                    for call in calls
                ]
                given = {"previous_response_id": response.id} if by == "response" else {}
                if by == "references":
                    output = [{"type": "item_reference", "id": item["id"]} for item in output]
                items = results if by == "response" else [*items, *output, *results]

    return agent


async def messages_agent(base_url, api_key, stream) -> list[str]:
    from anthropic import AsyncAnthropic

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: Any = {
        "model": "m",
        "max_tokens": 300,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    }
    texts = []
    async with AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
        while True:
            if stream:
                async with client.messages.stream(messages=messages, **options) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(messages=messages, **options)
            texts.append("".join(block.text for block in message.content if block.type == "text"))
            counted = await client.messages.count_tokens(
                messages=messages, **{key: value for key, value in options.items() if key != "max_tokens"}
            )
            assert counted.input_tokens == message.usage.input_tokens
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                assert message.stop_reason == "end_turn"
                return texts
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})


AGENTS = {
    "chat": chat_agent,
    "responses": responses_agent(),
    "responses by id": responses_agent(by="response"),
    "responses by references": responses_agent(by="references"),
    "messages": messages_agent,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", AGENTS)
async def test_an_agent_of_each_dialect_trains_the_same_tokens_in_one_trajectory(make_rig, request, dialect, stream):
    if dialect == "messages":
        request.getfixturevalue("anthropic")
    texts = []

    async def agent(base_url, api_key, sample, model):
        texts.extend(await AGENTS[dialect](base_url, api_key, stream))

    chat = ChatConfig(tool_format="hermes", reasoning_format="qwen3")
    async with make_rig(chat=chat, stream_interval=3) as rig:
        written = [f"<think>hm</think>So {CALL}{CALL}", f"<think>a</think>{CALL}", "<think>b</think>three"]
        rig.write(*written)
        (trajectory,) = await rig.play(agent)
        assert texts == ["So ", "", "three"]
        mask = trajectory.loss_mask.expand() > 0
        assert rig.tokenizer.decode(trajectory.response_ids[mask]) == "".join(f"{text}<eos>" for text in written)
        assert (trajectory.metrics["turns"], trajectory.metrics["turns_forked"]) == (3.0, 0.0)
        assert [(turn.role, turn.name) for turn in trajectory.turns] == [
            ("answer", ""), ("tool", "add"), ("tool", "add"), ("answer", ""), ("tool", "add"), ("answer", ""),
        ]  # fmt: skip
        tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
        messages = [{"role": "system", "content": "Be kind."}, *HI]
        assert trajectory.prompt_ids.tolist() == prompt_ids(messages, tools)


def prompt_ids(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
    template = AnswerTemplate(byte_tokenizer(TEMPLATE), {})
    return list(Conversation().prompt(template, messages, tools).ids)


async def test_one_session_may_change_its_dialect_with_every_request(rig, anthropic):
    rig.write("one " + CALL, "two", "three", "four")

    async def agent(base_url, api_key, sample, model):
        tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
        async with (
            package.AsyncOpenAI(base_url=base_url, api_key=api_key) as openai,
            anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as claude,
        ):
            messages: list[Any] = [*HI]
            first = (await openai.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0].message
            (call,) = first.tool_calls
            use = {"type": "tool_use", "id": call.id, "name": "add", "input": json.loads(call.function.arguments)}
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": first.content}, use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]},
            ]
            tool: Any = {"name": "add", "input_schema": SCHEMA}
            second = await claude.messages.create(model="m", max_tokens=99, messages=messages, tools=[tool])
            items: list[Any] = [
                *HI,
                {"role": "assistant", "content": first.content},
                {"type": "function_call", "call_id": call.id, "name": "add", "arguments": '{"b":2, "a":1}'},
                {"type": "function_call_output", "call_id": call.id, "output": "3"},
                {"role": "assistant", "content": second.content[0].text},
                {"role": "user", "content": "more"},
            ]
            function: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
            third = await openai.responses.create(model="m", input=items, tools=[function])
            messages += [
                {"role": "assistant", "content": second.content},
                {"role": "user", "content": "more"},
                {"role": "assistant", "content": third.output_text},
                {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "more"}]},
            ]
            await claude.messages.create(model="m", max_tokens=99, messages=messages, tools=[tool])

    (trajectory,) = await rig.play(agent)
    mask = trajectory.loss_mask.expand() > 0
    assert rig.tokenizer.decode(trajectory.response_ids[mask]) == f"one {CALL}<eos>two<eos>three<eos>four<eos>"


# Any history, said in each dialect

words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
arguments = st.dictionaries(st.sampled_from("ab"), st.integers(-9, 9) | words | st.lists(words, max_size=2), max_size=2)
answers = st.tuples(words, words, st.lists(arguments, max_size=2))
turns = st.lists(st.tuples(st.lists(words, min_size=1, max_size=2), answers, words), max_size=4)


def said(system: str, history: list[Any], last: str) -> dict[str, dict[str, Any]]:
    """A history in each dialect; `history` are the user's messages, an answer, and the result of each of its calls."""
    chat: list[Any] = [{"role": "system", "content": system}] if system else []
    items: list[Any] = []
    messages: list[Any] = []
    number = 0
    for asked, (thoughts, text, calls), result in history:
        for content in asked:
            chat.append({"role": "user", "content": content})
            items.append({"role": "user", "content": [{"type": "input_text", "text": content}]})
            messages.append({"role": "user", "content": content})
        ids = [f"call{number + at}" for at in range(len(calls))]
        number += len(calls)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        blocks: list[Any] = [{"type": "text", "text": text}] if text else []
        if thoughts:
            message["reasoning_content"] = thoughts
            blocks.insert(0, {"type": "thinking", "thinking": thoughts, "signature": ""})
            content = [{"type": "reasoning_text", "text": thoughts}]
            items.append({"type": "reasoning", "id": "r", "summary": [], "content": content})
        items.append({"role": "assistant", "content": text})
        if calls:
            message["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": "f", "arguments": json.dumps(call)}}
                for name, call in zip(ids, calls, strict=True)
            ]
        for name, call in zip(ids, calls, strict=True):
            items.append({"type": "function_call", "call_id": name, "name": "f", "arguments": json.dumps(call)})
            blocks.append({"type": "tool_use", "id": name, "name": "f", "input": call})
        chat.append(message)
        messages.append({"role": "assistant", "content": blocks})
        if calls:
            chat += [{"role": "tool", "tool_call_id": name, "content": result} for name in ids]
            items += [{"type": "function_call_output", "call_id": name, "output": result} for name in ids]
            results = [{"type": "tool_result", "tool_use_id": name, "content": result} for name in ids]
            messages.append({"role": "user", "content": results})
    user = {"role": "user", "content": last}
    instructed = {"instructions": system} if system else {}
    return {
        "chat": {"messages": [*chat, user]},
        "responses": {"input": [*items, user]} | instructed,
        "messages": {"messages": [*messages, user]} | ({"system": system} if system else {}),
    }


EXCHANGES: dict[str, Any] = {"chat": ChatExchange, "responses": ResponsesExchange, "messages": MessagesExchange}


def parsed(dialect: str, body: dict[str, Any]) -> Request:
    return EXCHANGES[dialect](json.dumps(body).encode(), "tiny", Kept()).request


@settings(deadline=None, max_examples=100)
@given(words, turns, words)
def test_a_history_has_the_same_messages_and_tokens_in_every_dialect(system, history, last):
    bodies = said(system, history, last)
    found = {dialect: Transcript().restore(parsed(dialect, body)) for dialect, body in bodies.items()}
    assert found["responses"] == found["chat"]
    assert found["messages"] == found["chat"]
    ids = [prompt_ids(messages, []) for messages in found.values()]
    assert ids[0] == ids[1] == ids[2]
    # One transcript recognises what it has read in another dialect: nothing but the form differs.
    shared = Transcript()
    for dialect, body in bodies.items():
        assert shared.restore(parsed(dialect, body)) == found["chat"]


# Streams


async def test_the_events_of_a_response_come_in_the_order_of_the_api(make_rig):
    kinds: list[str] = []

    async def agent(base_url, api_key, sample, model):
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            stream = await client.responses.create(model="m", input="hi", stream=True)
            numbers = []
            async for event in stream:
                kinds.append(event.type)
                numbers.append(event.sequence_number)
            assert numbers == list(range(len(numbers)))
            assert event.response.output_text == "hello there"

    async with make_rig(stream_interval=3) as rig:
        rig.write("hello there")
        await rig.play(agent)
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip


async def test_the_events_of_a_message_come_in_the_order_of_the_api(make_rig, anthropic):
    kinds: list[str] = []

    async def agent(base_url, api_key, sample, model):
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            async for event in await client.messages.create(model="m", max_tokens=99, messages=HI, stream=True):
                kinds.append(event.type)
            assert event.type == "message_stop"

    async with make_rig(stream_interval=3) as rig:
        rig.write("hello there")
        await rig.play(agent)
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_how_an_answer_ended_is_told_in_the_words_of_each_dialect(make_rig, anthropic, stream):
    ends = []

    async def agent(base_url, api_key, sample, model):
        async with (
            package.AsyncOpenAI(base_url=base_url, api_key=api_key) as openai,
            anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as claude,
        ):
            options: Any = {"model": "m", "max_tokens": 5, "messages": HI}
            if stream:
                async with openai.responses.stream(model="m", input="hi", max_output_tokens=5) as events:
                    response = [event async for event in events][-1].response
                async with claude.messages.stream(**options) as events:
                    message = await events.get_final_message()
            else:
                response = await openai.responses.create(model="m", input="hi", max_output_tokens=5)
                message = await claude.messages.create(**options)
            ends.append((response.status, response.incomplete_details.reason, response.usage.output_tokens))
            ends.append((message.stop_reason, message.usage.output_tokens))

    async with make_rig(stream_interval=2) as rig:
        rig.write("hello", "hello", cut=True)
        await rig.play(agent)
    assert ends == [("incomplete", "max_output_tokens", 5), ("max_tokens", 5)]


async def test_the_stop_sequence_that_ended_a_message_is_named(rig, anthropic):
    rig.write("Let me see. END")
    # As servers do, which cut the text and keep the tokens.
    rig.fake.words = lambda ids: rig.tokenizer.decode(ids, skip_special_tokens=True).partition("END")[0]
    seen = []

    async def agent(base_url, api_key, sample, model):
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            options: Any = {"model": "m", "max_tokens": 50, "messages": HI}
            message = await client.messages.create(stop_sequences=["STOP", "END"], **options)
            seen.append((message.stop_reason, message.stop_sequence, message.content[0].text))

    await rig.play(agent)
    assert seen == [("stop_sequence", "END", "Let me see. ")]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_an_agent_that_wants_single_calls_sees_the_first_and_goes_on(rig, request, dialect):
    claude = request.getfixturevalue("anthropic") if dialect == "messages" else None
    rig.write(CALL + CALL, "done")
    names = []

    async def agent(base_url, api_key, sample, model):
        functions: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            match dialect:
                case "chat":
                    ask = client.chat.completions.create
                    options: Any = {"model": "m", "tools": functions, "parallel_tool_calls": False}
                    message = (await ask(messages=HI, **options)).choices[0].message
                    names.extend(call.id for call in message.tool_calls)
                    result: Any = {"role": "tool", "tool_call_id": names[0], "content": "3"}
                    await ask(messages=[*HI, message, result], **options)
                case "responses":
                    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": None}]
                    options = {"model": "m", "tools": tools, "parallel_tool_calls": False}
                    response = await client.responses.create(input="hi", **options)
                    names.extend(item.call_id for item in response.output)
                    result = {"type": "function_call_output", "call_id": names[0], "output": "3"}
                    await client.responses.create(input=[result], previous_response_id=response.id, **options)
                case _:
                    choice = {"type": "auto", "disable_parallel_tool_use": True}
                    tool = {"name": "add", "input_schema": SCHEMA}
                    options = {"model": "m", "max_tokens": 300, "tools": [tool], "tool_choice": choice}
                    async with claude.AsyncAnthropic(base_url=base_url, api_key=api_key) as other:
                        message = await other.messages.create(messages=HI, **options)
                        names.extend(block.id for block in message.content)
                        result = {"type": "tool_result", "tool_use_id": names[0], "content": "3"}
                        answer = {"role": "assistant", "content": message.content}
                        more = [*HI, answer, {"role": "user", "content": [result]}]
                        await other.messages.create(messages=more, **options)

    (trajectory,) = await rig.play(agent)
    assert len(names) == 1
    assert rig.tokenizer.decode(trajectory.response_ids) == (
        f"{CALL}{CALL}<eos><bos>tool: 3<eos><bos>assistant: done<eos>"
    )


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("one", [True, False])
async def test_a_demanded_call_is_begun_for_the_model(rig, dialect, one):
    claude = pytest.importorskip("anthropic") if dialect == "messages" else None
    begin = CALL[: CALL.index('"a"' if one else "add")]
    rig.write(CALL.removeprefix(begin))
    called: list[tuple[str, Any]] = []

    async def agent(base_url, api_key, sample, model):
        named: dict[str, Any] = {"type": "function", "name": "add"}
        functions: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
        flat: Any = [each["function"] | {"type": "function", "strict": None} for each in functions]
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            match dialect:
                case "chat":
                    choice: Any = {"type": "function", "function": {"name": "add"}} if one else "required"
                    ask = client.chat.completions.create
                    answer = await ask(model="m", messages=HI, tools=functions, tool_choice=choice)
                    (call,) = answer.choices[0].message.tool_calls
                    called.append((call.function.name, json.loads(call.function.arguments)))
                case "responses":
                    choice = named if one else "required"
                    response = await client.responses.create(model="m", input="hi", tools=flat, tool_choice=choice)
                    (item,) = response.output
                    called.append((item.name, json.loads(item.arguments)))
                    assert response.to_dict()["tool_choice"] == choice
                case _:
                    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
                    choice = {"type": "tool", "name": "add"} if one else {"type": "any"}
                    async with claude.AsyncAnthropic(base_url=base_url, api_key=api_key) as other:
                        ask = other.messages.create
                        message = await ask(model="m", max_tokens=300, messages=HI, tools=tools, tool_choice=choice)
                        (block,) = message.content
                        called.append((block.name, block.input))

    (trajectory,) = await rig.play(agent)
    assert called == [("add", {"a": 1, "b": 2})]
    assert rig.tokenizer.decode(trajectory.prompt_ids).endswith(f"assistant: {begin}")
    assert rig.tokenizer.decode(trajectory.response_ids) == f"{CALL.removeprefix(begin)}<eos>"
    assert all(trajectory.loss_mask)


async def test_functions_of_a_namespace_are_called_by_both_names(rig):
    rig.write('<tool_call>{"name": "math.add", "arguments": {"a": 1}}</tool_call>', "done")
    called = []

    async def agent(base_url, api_key, sample, model):
        function = {"type": "function", "name": "add", "parameters": SCHEMA}
        tools: Any = [{"type": "namespace", "name": "math", "description": "Sums.", "tools": [function]}]
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            response = await client.responses.create(model="m", input="hi", tools=tools)
            (call,) = [item.model_dump() for item in response.output]
            called.append((call["namespace"], call["name"]))
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
            items: Any = [{"role": "user", "content": "hi"}, call, result]
            await client.responses.create(model="m", input=items, tools=tools)

    (trajectory,) = await rig.play(agent)
    assert called == [("math", "add")]
    assert trajectory.metrics["turns"] == 2.0


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_sync_clients_work_in_sync_agents(rig, request, dialect):
    claude = request.getfixturevalue("anthropic") if dialect == "messages" else None
    rig.write("hello")
    texts = []

    def agent(base_url, api_key, sample, model):
        if dialect == "messages":
            with claude.Anthropic(base_url=base_url, api_key=api_key) as client:
                with client.messages.stream(model="m", max_tokens=50, messages=HI) as stream:
                    texts.append("".join(stream.text_stream))
                texts.extend(model.id for model in client.models.list())
            return
        with package.OpenAI(base_url=base_url, api_key=api_key) as client:
            if dialect == "chat":
                parts = client.chat.completions.create(model="m", messages=HI, stream=True)
                texts.append("".join(part.choices[0].delta.content or "" for part in parts))
            else:
                with client.responses.stream(model="m", input="hi") as stream:
                    texts.append("".join(e.delta for e in stream if e.type == "response.output_text.delta"))
            texts.extend(model.id for model in client.models.list())

    await rig.play(agent)
    assert texts == ["hello", "tiny"]


# Errors


async def test_anthropics_client_raises_its_own_exceptions(make_rig, anthropic):
    """None of them is retried, because the gateway says that it is of no use."""
    from fake_sglang import refuse

    raised: dict[str, Any] = {}

    async def agent(base_url, api_key, sample, model):
        async def ask(name, kind, url=base_url, key=api_key, **changes):
            options: Any = {"model": "m", "max_tokens": 50, "messages": HI} | changes
            async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
                with pytest.raises(kind) as error:
                    await client.messages.create(**options)
                raised[name] = error.value.body["error"]["type"], error.value.message

        await ask("key", anthropic.AuthenticationError, key="sk-wrong")
        await ask("session", anthropic.NotFoundError, url=base_url.replace("/s/", "/s/x"))
        await ask("role", anthropic.BadRequestError, messages=[{"role": "tool", "content": "x"}])
        await ask("long", anthropic.BadRequestError, messages=[{"role": "user", "content": "x" * 5000}])
        await ask("large", anthropic.APIStatusError, messages=[{"role": "user", "content": "x" * 2**20}])
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
        await ask("image", anthropic.BadRequestError, messages=[{"role": "user", "content": [image]}])
        await ask("down", anthropic.InternalServerError)

    async with make_rig(timeout=0.3) as rig:
        rig.gateway.body_mb = 1
        rig.fake.script += [refuse(503)] * 20
        with pytest.raises(Exception, match="a request of the agent"):
            await rig.play(agent)
    assert {name: kind for name, (kind, _) in raised.items()} == {
        "key": "authentication_error",
        "session": "not_found_error",
        "role": "invalid_request_error",
        "long": "invalid_request_error",
        "large": "request_too_large",
        "image": "invalid_request_error",
        "down": "overloaded_error",
    }
    assert "prompt is too long" in raised["long"][1]
    assert "only text is supported" in raised["image"][1]


@pytest.mark.parametrize("dialect", ["responses", "messages"])
async def test_an_error_in_the_middle_of_a_stream_is_raised(make_rig, request, dialect):
    from fake_sglang import Break, refuse

    claude = request.getfixturevalue("anthropic") if dialect == "messages" else None
    pieces: list[str] = []

    async def agent(base_url, api_key, sample, model):
        if dialect == "messages":
            async with claude.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
                with pytest.raises(claude.APIError, match="refused a prompt"):
                    async with client.messages.stream(model="m", max_tokens=50, messages=HI) as stream:
                        pieces.extend([text async for text in stream.text_stream])
            return
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            with pytest.raises(package.APIError, match="refused a prompt"):
                async for event in await client.responses.create(model="m", input="hi", stream=True):
                    pieces.append(event.type)

    async with make_rig(stream_interval=3) as rig:
        rig.fake.script += [Break(((3, 0), (3, 0))), *[refuse(400)] * 5]
        rig.fake.continuation = lambda body, count: rig.tokenizer.encode("abcdef")
        with pytest.raises(DataError, match="before any of its requests was answered"):
            await rig.play(agent)
    assert dialect == "messages" or pieces.count("response.output_text.delta") == 2


async def test_a_response_of_another_session_cannot_be_continued(rig):
    ids: list[str] = []
    items: list[str] = []

    async def agent(base_url, api_key, sample, model):
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for earlier in ids:
                with pytest.raises(package.BadRequestError, match="is no response of this session") as error:
                    await client.responses.create(model="m", input="x", previous_response_id=earlier)
                assert error.value.param == "previous_response_id"
            for item in items:
                named: Any = [{"type": "item_reference", "id": item}]
                with pytest.raises(package.BadRequestError, match="no item of a response of this session") as error:
                    await client.responses.create(model="m", input=named)
                assert error.value.param == "input"
            for store in (True, False):
                response = await client.responses.create(model="m", input="x", store=store)
                ids.append(response.id)
                items.append(response.output[0].id)

    rig.write(*"abcd")
    await rig.play(agent)
    await rig.play(agent)
    assert len(set(ids)) == 4


async def test_sampling_settings_of_each_dialect_apply_where_the_configuration_says_so(rig, anthropic):
    rig.gateway.sampling = "request"
    rig.sampling = SamplingConfig(max_new_tokens=300)
    rig.write("x", "x")

    async def agent(base_url, api_key, sample, model):
        async with package.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.responses.create(model="m", input="x", temperature=0.5, top_p=0.9, max_output_tokens=7)
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            await client.messages.create(
                model="m", max_tokens=8, messages=HI, extra_body={"temperature": 0.25, "top_p": 0.75, "top_k": 5}
            )

    await rig.play(agent)
    found = [request["sampling_params"] for request in rig.fake.requests]
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    assert [tuple(params[name] for name in names) for params in found] == [(0.5, 0.9, -1, 7), (0.25, 0.75, 5, 8)]
