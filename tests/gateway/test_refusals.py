"""Whatever a client sends, the gateway answers with a result or an error that names the client's fault.

Errors are those that the `openai` package raises for what the gateway answers.
"""

from __future__ import annotations

import json
import random
from typing import Any

import aiohttp
import openai as package
import pytest
from fake_sglang import Break, refuse
from gateway_rig import HI, openai
from mutations import mutated
from tiny_models import byte_tokenizer

from megasync.config.schema import ChatConfig
from megasync.errors import DataError, ServerError

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = json.loads("[" * 99 + "]" * 99)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def history(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


async def send(rig, *bodies: bytes, path: str = "/chat/completions", keys: Any = ("{key}",)) -> list[tuple[int, Any]]:
    """(status, JSON) of each body, sent with each key; the sample can continue afterwards."""
    answers = []

    async def agent(base_url, api_key, sample, model):
        async with aiohttp.ClientSession() as session:
            for key in keys:
                header = f"Bearer {key.format(key=api_key)}" if "Bearer" not in key else key
                for body in bodies:
                    url = base_url.replace("/s/", path) if path.startswith("/s/") else base_url + path
                    async with session.post(url, data=body, headers={"Authorization": header}) as answer:
                        answers.append((answer.status, await answer.json()))
        rig.write("x")
        async with openai(base_url, api_key) as client:
            await client.chat.completions.create(model=model, messages=HI)

    await rig.play(agent)
    return answers


async def refused(rig, kind, **request):
    """The exception of one request. Also checks that the sample can continue afterwards."""
    rig.write("x")
    caught = []

    async def conversation(create):
        with pytest.raises(kind) as error:
            await create(**({"messages": HI} | request))
        caught.append(error.value)
        await create(messages=HI)

    before = len(rig.fake.requests)
    await rig.converse(conversation)
    assert len(rig.fake.requests) == before + 1, "only the second request may have reached a server"
    return caught[0]


# Bodies


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("{", "invalid_json"),
        (f'{{"messages": {DEEP}}}', None),
        (f'{{"messages": {json.dumps(HI)}, "metadata": {DEEP}}}', "invalid_json"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
        ('{"messages": [{"role": "user", "content": null}]}', None),
        (json.dumps({"messages": HI, "tools": [{"type": "function", "function": {"name": 3}}]}), None),
        (json.dumps({"messages": HI, "tools": [ADD | {"function": {"name": "f", "x": NESTED}}]}), None),
        ("\ud800".encode("utf-8", "surrogatepass"), "invalid_json"),
        (b"\xff", "invalid_json"),
    ],
    ids=range(9),
)
async def test_bodies_that_cannot_be_read_are_the_clients_fault(rig, body, code):
    ((status, answer),) = await send(rig, body if isinstance(body, bytes) else body.encode())
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
    assert code is None or answer["error"]["code"] == code


@pytest.mark.parametrize("arguments", ["[" * 3000, '{"x": ', "[1]", '{"\u00e9": {"\u00fc": [null]}}', ""])
async def test_arguments_of_any_text_may_stand_in_the_history(rig, arguments):
    rig.write("fine")
    ((status, answer),) = await send(rig, json.dumps({"messages": history(arguments)}).encode())
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "fine")


# A sound request to each door.
SCHEMA = ADD["function"]["parameters"]
SOUND: dict[str, Any] = {
    "/chat/completions": {
        "model": "m", "messages": history('{"a": 1}'), "tools": [ADD], "stop": ["x"], "max_tokens": 4, "seed": 1,
    },
    "/responses": {
        "model": "m", "instructions": "x", "include": [], "metadata": {"a": "b"}, "max_output_tokens": 4,
        "input": [
            *HI,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    },
    "/messages": {
        "model": "m", "max_tokens": 4, "stop_sequences": ["x"], "metadata": {"a": "b"},
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "x"},
                    {"type": "text", "text": "x"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]},
                    {"type": "text", "text": "x"},
                ],
            },
        ],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
    },
    "/inference/v1/generate": {
        "model": "m", "token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "seed": 1, "stop": ["x"], "n": 1},
    },
}  # fmt: skip
DOORS = [*SOUND]
RESULT = {"type": "tool_result", "tool_use_id": "x"}


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 30))])
async def test_no_change_of_a_request_is_an_internal_error(make_rig, seed, path):
    async with make_rig(chat=ChatConfig(tool_format="hermes")) as rig:
        rig.gateway.sampling = "request"
        rig.write(*["x"] * 150)
        chance = random.Random(seed)
        bodies = [
            json.dumps(mutated(SOUND[path], chance), ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
            for _ in range(150)
        ]
        answers = await send(rig, *bodies, path=path)
        wrong = [pair for pair in zip(bodies, answers, strict=True) if pair[1][0] not in (200, 400)]
        assert not wrong, wrong[0]
        assert {status for status, _ in answers} == {200, 400}


LONG_NUMBER = 10**30
HOSTILE: dict[str, Any] = {
    "not JSON": b"{",
    "not UTF-8": b'{"model": "\xff"}',
    "half a character": '{"model": "\ud800"}'.encode("utf-8", "surrogatepass"),
    "too deep": ('{"metadata": ' + DEEP + "}").encode(),
    "no object": b"[]",
    "nothing": b"",
    "a number that is infinite": b'{"temperature": 1e999}',
}


@pytest.mark.parametrize("path", DOORS)
async def test_hostile_bodies_are_refused_in_the_form_of_each_dialect(rig, path):
    answers = await send(rig, *HOSTILE.values(), path=path)
    for name, (status, answer) in zip(HOSTILE, answers, strict=True):
        kind = answer["error"]["type"]
        assert (status, kind, path != "/messages" or answer["type"] == "error") == (
            400,
            "invalid_request_error",
            True,
        ), (name, answer)


@pytest.mark.parametrize("path", DOORS)
async def test_unknown_fields_and_long_numbers_are_never_an_internal_error(rig, path):
    tool = {"type": "function", "name": "f", "function": {"name": "f", "parameters": {"maximum": LONG_NUMBER}}}
    tools = [tool if "chat" in path else {"name": "f", "parameters": {"maximum": LONG_NUMBER}, "type": "function"}]
    if path == "/messages":
        tools = [{"name": "f", "input_schema": {"maximum": LONG_NUMBER}}]
    rig.write("x")
    unknown, long = await send(
        rig,
        json.dumps(SOUND[path] | {"logit_processor": 1}).encode(),
        json.dumps(SOUND[path] | {"tools": tools}).encode(),
        path=path,
    )
    assert unknown[0] == 400 and "logit_processor" in unknown[1]["error"]["message"]
    assert long[0] in (200, 400), long


# Parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("tool_choice", {"type": "custom", "custom": {"name": "add"}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("logit_bias", {"5": 10}),
        ("top_logprobs", 3),
        ("reasoning_effort", "high"),
        ("functions", [{"name": "add"}]),
        ("temperature", 3.0),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("stop", [""]),
        ("stream_options", {"include_usage": True}),
    ],
)
async def test_unsupported_request_parameters_are_rejected_by_name(rig, name, value):
    error = await refused(rig, package.BadRequestError, **{name: value})
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("tool_choice", "auto"),
        ("parallel_tool_calls", True),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "text"}),
        ("frequency_penalty", 0),
        ("logit_bias", {}),
        ("metadata", {"a": "b"}),
        ("store", False),
        ("service_tier", "auto"),
        ("prompt_cache_key", "k"),
        ("safety_identifier", "s"),
    ],
)
async def test_parameters_without_effect_are_accepted(rig, name, value):
    rig.write("x")
    completion, _ = await rig.ask(**{name: value})
    assert completion.choices[0].message.content == "x"


@pytest.mark.parametrize(
    ("path", "changes", "name"),
    [
        ("/responses", {"background": True}, "background"),
        ("/responses", {"conversation": "conv_1"}, "conversation"),
        ("/responses", {"truncation": "auto"}, "truncation"),
        ("/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ("/responses", {"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ("/responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
        ("/responses", {"include": ["file_search_call.results"]}, "include"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ("/responses", {"input": [{"type": "item_reference"}]}, "input[0]"),
        ("/responses", {"input": [{"type": "custom_tool_call", "id": "x"}]}, "input[0]"),
        ("/responses", {"input": [{"role": "user"}]}, "input"),
        ("/responses", {"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ("/responses", {"previous_response_id": "resp_x"}, "previous_response_id"),
        ("/messages", {"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ("/messages", {"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ("/messages", {"tool_choice": {"type": "tool"}}, "tool_choice"),
        ("/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ("/messages", {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "defer_loading"),
        ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config"),
        ("/messages", {"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]}, "mcp_servers"),
        ("/messages", {"container": "x"}, "container"),
        ("/messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ("/messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("/messages", {"messages": [{"role": "assistant", "content": [RESULT]}]}, "tool_result"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "answer"),
        ("/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/messages", {"max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
async def test_what_other_dialects_ask_for_and_cannot_have_is_refused_by_name(rig, path, changes, name):
    ((status, answer),) = await send(rig, json.dumps(SOUND[path] | changes).encode(), path=path)
    assert status == 400
    assert name in answer["error"]["message"], answer
    assert len(rig.fake.requests) == 1, "only the request after it"


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/responses", {"reasoning": {"effort": "high", "summary": "auto"}, "store": False, "user": "me"}),
        ("/responses", {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}}),
        ("/responses", {"prompt_cache_key": "x", "truncation": "disabled", "background": False}),
        ("/messages", {"thinking": {"type": "enabled", "budget_tokens": 9999}, "service_tier": "auto"}),
        ("/messages", {"output_config": {"effort": "high"}, "context_management": {"edits": []}}),
        ("/messages?beta=true", {"mcp_servers": []}),
    ],
)
async def test_what_changes_nothing_is_accepted_in_other_dialects(make_rig, path, changes):
    # The template knows hermes' tools.
    async with make_rig() as rig:
        rig.write("x")
        body = SOUND[path.partition("?")[0]] | changes
        ((status, answer),) = await send(rig, json.dumps(body).encode(), path=path)
        assert status == 200, answer


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {}}]}, "cache_control"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
    ],
)
async def test_unsupported_messages_and_tools_are_rejected(rig, request_, param):
    error = await refused(rig, package.BadRequestError, **request_)
    assert param in error.param


async def test_a_prompt_beyond_the_context_length_has_the_openai_error_code(rig):
    error = await refused(rig, package.BadRequestError, messages=[{"role": "user", "content": "x" * 5000}])
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_missing_tool_format_is_reported_before_streaming_begins(make_rig, streamed):
    async with make_rig(chat=ChatConfig(tool_format=None)) as rig:
        error = await refused(rig, package.BadRequestError, tools=[ADD], stream=streamed)
        assert "rollout.chat.tool_format" in error.message


# Keys, paths and sizes


@pytest.mark.parametrize("path", DOORS)
async def test_every_request_requires_the_api_key_of_its_session(rig, path):
    wrong = ("sk-wrong", "{key}x", "", "Basic {key}", "Bearer \u00e9", "Bearer \udcff\udcfe")
    answers = await send(rig, json.dumps(SOUND[path]).encode(), path=path, keys=wrong)
    assert [(status, "api_key" in answer["error"]["message"]) for status, answer in answers] == [(401, True)] * 6
    assert len(rig.fake.requests) == 1, "the last one, with the key"


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        ("/s/x", b"{}", 404, "session_not_found", "there is no session"),
        ("/completions", b"{}", 404, "not_supported", "POST /v1/completions is not supported"),
        ("/chat/completions", b" " * (1024**2 + 1), 413, "body_too_large", "rollout.gateway.body_mb"),
    ],
)
async def test_unsupported_paths_and_bodies_return_openai_style_errors(rig, path, body, status, code, words):
    rig.gateway.body_mb = 1
    ((answered_status, answer),) = await send(rig, body, path=path)
    assert (answered_status, answer["error"]["code"]) == (status, code)
    assert words in answer["error"]["message"]


# Failures


@pytest.mark.parametrize("swallows", [True, False])
async def test_a_server_failure_fails_the_attempt_even_if_the_agent_handles_the_error(make_rig, swallows):
    async with make_rig(timeout=0.3) as rig:
        rig.fake.script += [refuse(503)] * 10
        seen = []

        async def conversation(create):
            for _ in range(2):
                try:
                    await create(messages=HI)
                except package.InternalServerError as error:
                    seen.append(error.status_code)
                    if not swallows:
                        raise
            return 0.0

        with pytest.raises(ServerError, match="a request of the agent .* failed: no complete answer"):
            await rig.converse(conversation)
        assert seen == ([503, 503] if swallows else [503])


async def test_an_interrupted_stream_raises_an_api_error_in_the_agent(make_rig):
    async with make_rig(stream_interval=3) as rig:
        rig.fake.script += [Break(((3, 0), (3, 0))), *[refuse(400)] * 5]
        rig.fake.continuation = lambda body, count: rig.tokenizer.encode("abcdef")
        caught = []

        async def conversation(create):
            with pytest.raises(package.APIError, match="refused a prompt") as error:
                async for chunk in await create(messages=HI, stream=True):
                    caught.append(chunk.choices[0].delta.content)
            assert type(error.value) is package.APIError

        with pytest.raises(DataError, match="before any of its requests was answered"):
            await rig.converse(conversation)
        assert caught == ["", "abc", "def"]


ONE_QUESTION = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<bos>{{ m.role }}: "
    "{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_response_that_cannot_be_followed_by_its_result_is_trained(make_rig, goes_on):
    chat = ChatConfig(tool_format="hermes")
    async with make_rig(tokenizer=byte_tokenizer(ONE_QUESTION), chat=chat) as rig:
        rig.write(CALL, "later")

        async def conversation(create):
            message = (await create(messages=HI, tools=[ADD])).choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            try:
                await create(messages=[*HI, message.model_dump(), result], tools=[ADD])
            except package.BadRequestError as error:
                assert "no tools" in str(error)
                if not goes_on:
                    raise
            await create(messages=HI)
            raise OSError("the agent's own fault")

        if goes_on:
            with pytest.raises(OSError, match="own fault"):
                await rig.converse(conversation)
            return
        (trajectory,) = await rig.converse(conversation)
        assert trajectory.reward is None
        assert trajectory.metrics["template_refused"] == 1.0
        assert rig.tokenizer.decode(trajectory.response_ids) == f"{CALL}<eos>"
