"""Requests that the gateway refuses, and the exceptions that the `openai` package raises for them."""

import aiohttp
import openai as package
import pytest
from fake_sglang import Break, refuse
from gateway_rig import HI, openai

from megasync.config.schema import ChatConfig
from megasync.errors import DataError, ServerError

BAD_MESSAGES = [
    ([], "messages"),
    ([{"role": "function", "content": "x"}], "messages"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages"),
    ([{"role": "user", "content": "x", "cache_control": {}}], "cache_control"),
]


async def refused(rig, kind, **request):
    """The exception of one request. Also checks that the sample can continue afterwards."""
    rig.write("x")
    caught = []

    async def agent(base_url, api_key, sample, model):
        async with openai(base_url, api_key) as client:
            try:
                await client.chat.completions.create(**({"model": model, "messages": HI} | request))
            except kind as error:
                caught.append(error)
            await client.chat.completions.create(model=model, messages=HI)

    before = len(rig.fake.requests)
    await rig.play(agent)
    assert len(rig.fake.requests) == before + 1, "only the second request may have reached a server"
    return caught[0]


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
    found, _ = await rig.ask(**{name: value})
    assert found.choices[0].message.content == "x"


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
async def test_unsupported_messages_are_rejected(rig, messages, param):
    error = await refused(rig, package.BadRequestError, messages=messages)
    assert param in error.param


@pytest.mark.parametrize("tool", [{"type": "custom", "custom": {"name": "x"}}, {"type": "function", "function": {}}])
async def test_tools_that_are_not_functions_are_rejected(rig, tool):
    error = await refused(rig, package.BadRequestError, tools=[tool])
    assert error.param == "tools[0]"


async def test_a_prompt_beyond_the_context_length_has_the_openai_error_code(rig):
    error = await refused(rig, package.BadRequestError, messages=[{"role": "user", "content": "x" * 5000}])
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_missing_tool_format_is_reported_before_streaming_begins(make_rig, streamed):
    async with make_rig(chat=ChatConfig(tool_format=None)) as rig:
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        error = await refused(rig, package.BadRequestError, tools=[tool], stream=streamed)
        assert "rollout.chat.tool_format" in error.message


async def post(url, key, **options):
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/chat/completions", headers={"Authorization": key}, **options) as response,
    ):
        return response.status, (await response.json())["error"]


async def test_every_request_requires_the_api_key_of_its_session(rig):
    found = []

    async def agent(base_url, api_key, sample, model):
        for wrong in ("sk-wrong", api_key[:-1], api_key + "x"):
            async with openai(base_url, wrong) as client:
                with pytest.raises(package.AuthenticationError, match="api_key"):
                    await client.chat.completions.create(model=model, messages=HI)
        for header in ("", api_key, f"Basic {api_key}", "Bearer \u00e9"):
            found.append((await post(base_url, header, json={"messages": HI}))[0])
        rig.write("x")
        async with openai(base_url, api_key) as client:
            await client.chat.completions.create(model=model, messages=HI)

    await rig.play(agent)
    assert found == [401] * 4
    assert len(rig.fake.requests) == 1


async def test_unsupported_paths_and_bodies_return_openai_style_errors(rig):
    rig.gateway.body_mb = 1
    rig.write("x")
    found = {}

    async def agent(base_url, api_key, sample, model):
        key = f"Bearer {api_key}"
        found["nobody"] = await post(base_url.replace("/s/", "/s/x"), key, json={})
        found["json"] = await post(base_url, key, data=b"{")
        found["large"] = await post(base_url, key, data=b" " * (1024**2 + 1))
        async with openai(base_url, api_key) as client:
            with pytest.raises(package.NotFoundError, match=r"POST /v1/completions is not supported"):
                await client.completions.create(model=model, prompt="x")
            await client.chat.completions.create(model=model, messages=HI)

    await rig.play(agent)
    assert {name: (status, error["code"]) for name, (status, error) in found.items()} == {
        "nobody": (404, "session_not_found"),
        "json": (400, "invalid_json"),
        "large": (413, "body_too_large"),
    }
    assert "rollout.gateway.body_mb" in found["large"][1]["message"]


@pytest.mark.parametrize("swallows", [True, False])
async def test_a_server_failure_fails_the_attempt_even_if_the_agent_handles_the_error(make_rig, swallows):
    async with make_rig(timeout=0.3) as rig:
        rig.fake.script += [refuse(503)] * 10
        seen = []

        async def agent(base_url, api_key, sample, model):
            async with openai(base_url, api_key) as client:
                for _ in range(2):
                    try:
                        await client.chat.completions.create(model=model, messages=HI)
                    except package.InternalServerError as error:
                        seen.append(error.status_code)
                        if not swallows:
                            raise
            return 0.0

        with pytest.raises(ServerError, match="a request of the agent .* failed: no complete answer"):
            await rig.play(agent)
        assert seen == ([503, 503] if swallows else [503])


async def test_an_interrupted_stream_raises_an_api_error_in_the_agent(make_rig):
    async with make_rig(stream_interval=3, timeout=1.0) as rig:
        rig.fake.script += [Break(((3, 0), (3, 0))), *[refuse(400)] * 5]
        rig.fake.continuation = lambda body, count: rig.tokenizer.encode("abcdef")
        caught = []

        async def agent(base_url, api_key, sample, model):
            async with openai(base_url, api_key) as client:
                with pytest.raises(package.APIError, match="refused a prompt") as error:
                    async for chunk in await client.chat.completions.create(model=model, messages=HI, stream=True):
                        caught.append(chunk.choices[0].delta.content)
                assert type(error.value) is package.APIError

        with pytest.raises(DataError, match="before any of its requests was answered"):
            await rig.play(agent)
        assert caught == ["", "abc", "def"]
