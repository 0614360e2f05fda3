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


# One change of a sound request each.
SPOILERS = (None, 3, -1, 10**30, 1e308, True, "", "\u00e9", [], {}, [[]], {"\u00e9": None}, "x" * 999)


def spoiled(chance: random.Random) -> bytes:
    """A sound request in which one value anywhere is replaced, removed or repeated."""
    body = {"model": "m", "messages": history('{"a": 1}'), "tools": [ADD], "stop": ["x"], "max_tokens": 4, "seed": 1}
    body = json.loads(json.dumps(body))
    place: Any = body
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key]) or chance.random() < 0.2:
            break
        place = place[key]
    match chance.randrange(3):
        case 0:
            place[key] = chance.choice(SPOILERS)
        case 1:
            del place[key]
        case _ if isinstance(place, dict):
            place[chance.choice(["x", "content", "name", "reasoning"])] = place[key]
        case _:
            place.append(place[key])
    return json.dumps(body, ensure_ascii=chance.random() < 0.5).encode()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 30))])
async def test_no_change_of_a_request_is_an_internal_error(make_rig, seed):
    async with make_rig(chat=ChatConfig(tool_format="hermes")) as rig:
        rig.gateway.sampling = "request"
        rig.write(*["x"] * 150)
        chance = random.Random(seed)
        bodies = [spoiled(chance) for _ in range(150)]
        answers = await send(rig, *bodies)
        wrong = [pair for pair in zip(bodies, answers, strict=True) if pair[1][0] not in (200, 400)]
        assert not wrong, wrong[0]
        assert {status for status, _ in answers} == {200, 400}


# Parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("parallel_tool_calls", False),
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


async def test_every_request_requires_the_api_key_of_its_session(rig):
    wrong = ("sk-wrong", "{key}x", "", "Basic {key}", "Bearer \u00e9", "Bearer \udcff\udcfe")
    answers = await send(rig, json.dumps({"messages": HI}).encode(), keys=wrong)
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
