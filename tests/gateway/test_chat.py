"""Chat completions over HTTP with the real `openai` package: its responses, and the trajectories that are trained."""

import asyncio

import pytest
from aiohttp import web
from fake_sglang import event
from gateway_rig import HI, openai
from openai import BadRequestError

from megasync.config.schema import SamplingConfig

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def trained(rig, trajectory):
    pairs = zip(trajectory.response_ids, trajectory.loss_mask, strict=True)
    return rig.tokenizer.decode([token for token, mask in pairs if mask])


async def test_a_chat_completion_has_the_openai_response_format(rig):
    rig.write("hello")
    found, (trajectory,) = await rig.ask(logprobs=True, user="me")
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason, found.model) == ("hello", "stop", "tiny")
    assert found.usage.completion_tokens == 6
    assert found.usage.total_tokens == found.usage.prompt_tokens + 6
    assert [entry.logprob for entry in choice.logprobs.content] == trajectory.logprobs.tolist()
    assert [entry.token for entry in choice.logprobs.content] == [*"hello", ""]
    assert trained(rig, trajectory) == "hello<eos>"
    assert (trajectory.text, trajectory.reward) == ("hello", None)


async def test_a_truncated_completion_has_finish_reason_length(rig):
    rig.write("hel", cut=True)
    found, (trajectory,) = await rig.ask()
    assert found.choices[0].finish_reason == trajectory.finish_reason == "length"


@pytest.mark.parametrize("exact", [True, False])
async def test_a_call_that_the_template_writes_otherwise_continues_turns_that_it_writes_as_they_are(rig, exact):
    other = CALL.replace(": ", ":").replace(", ", ",")
    written = [CALL if exact else other, other, "three"]
    rig.write(*written)
    choices = []

    async def conversation(create):
        messages = list(HI)
        for _ in written:
            choice = (await create(messages=messages, tools=[ADD])).choices[0]
            choices.append(choice)
            message = choice.message
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls or ()]
            messages += [message.model_dump(), *results]

    (trajectory,) = await rig.converse(conversation)
    assert trained(rig, trajectory) == "".join(f"{text}<eos>" for text in written)
    assert trajectory.metrics["turns_realigned"] == (1.0 if exact else 2.0)
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "tool_calls", "stop"]
    assert len({call.id for choice in choices for call in choice.message.tool_calls or ()}) == 2


async def test_sampling_follows_the_configuration_and_the_shorter_token_limit_applies(rig):
    rig.write("x")
    await rig.ask(temperature=0.1, top_p=0.5, seed=3, max_tokens=7, stop="END")
    params = rig.fake.requests[-1]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["stop"]) == (1.0, 1.0, ["END"])
    assert params["max_new_tokens"] == 7
    assert params["sampling_seed"] != 3
    rig.write("x")
    await rig.ask(max_completion_tokens=100_000, stop=["a", "b"])
    params = rig.fake.requests[-1]["sampling_params"]
    assert (params["max_new_tokens"], params["stop"]) == (300, ["a", "b"])


async def test_sampling_settings_of_the_sample_client_override_the_request(rig):
    rig.write("x")

    async def conversation(create):
        await create(messages=HI, temperature=0.9)

    await rig.converse(conversation, client=rig.sample_client(temperature=0.0))
    assert rig.fake.requests[-1]["sampling_params"]["temperature"] == 0.0


async def test_requests_set_sampling_parameters_if_the_configuration_allows_it(rig):
    rig.gateway.sampling = "request"
    rig.write("x")
    await rig.ask(temperature=0.1, top_p=0.5, seed=3)
    params = rig.fake.requests[-1]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["sampling_seed"]) == (0.1, 0.5, 3)


async def test_a_training_request_may_set_its_seed_but_not_change_the_sampling_distribution(rig):
    rig.gateway.sampling = "request"
    rig.write("x")

    async def conversation(create):
        await create(messages=HI, seed=3, temperature=1.0)
        with pytest.raises(BadRequestError, match="top_p=0.5.*the trainer scores"):
            await create(messages=HI, top_p=0.5)

    await rig.converse(conversation, client=rig.sample_client(batch=0))
    assert len(rig.fake.requests) == 1


async def test_tool_choice_none_leaves_tools_out_of_the_prompt(rig):
    rig.write(CALL)
    found, _ = await rig.ask(tools=[ADD], tool_choice="none")
    assert "add" not in rig.sent()
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].message.content == CALL


async def test_a_malformed_tool_call_is_returned_as_text(rig):
    rig.write('<tool_call>{"name": </tool_call>')
    found, _ = await rig.ask(tools=[ADD])
    assert found.choices[0].message.content == '<tool_call>{"name": </tool_call>'
    assert found.choices[0].finish_reason == "stop"


async def test_content_parts_and_the_developer_role_are_accepted(rig):
    rig.write("x")
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    await rig.ask(messages=[{"role": "developer", "content": parts}, *HI])
    assert rig.sent().startswith("<bos>system: Be kind.<eos>")


async def test_the_model_is_listed_by_name_and_accepts_any_model_name(rig):
    rig.write("x")
    names = []

    async def agent(base_url, api_key, sample, model):
        async with openai(base_url, api_key) as client:
            names.extend([entry.id async for entry in client.models.list()])
            names.append((await client.models.retrieve("org/other")).id)
            names.append((await client.chat.completions.create(model="gpt-9", messages=HI)).model)

    await rig.play(agent)
    assert names == ["tiny", "org/other", "gpt-9"]


@pytest.mark.parametrize("stream_interval", [0, 3])
@pytest.mark.parametrize("text", ["hello there", "größe ☃ ünd", ""])
async def test_a_streamed_response_has_the_same_content_as_the_completion(make_rig, stream_interval, text):
    async with make_rig(stream_interval=stream_interval) as rig:
        rig.write(text)
        chunks, trajectories = await stream(rig, stream_options={"include_usage": True}, logprobs=True)
        *parts, usage = chunks
        contents = [c.choices[0].delta.content for c in parts if c.choices[0].delta.content]
        assert "".join(contents) == text
        assert len(contents) > 1 or not (stream_interval and text)
        assert parts[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert usage.choices == [] and usage.usage.completion_tokens == len(trajectories[0].response_ids)
        assert [e.logprob for e in parts[-1].choices[0].logprobs.content] == trajectories[0].logprobs.tolist()
        assert len({c.id for c in chunks}) == 1


async def stream(rig, **request):
    chunks = []

    async def conversation(create):
        chunks.extend([chunk async for chunk in await create(messages=HI, stream=True, **request)])

    return chunks, await rig.converse(conversation)


async def test_text_is_streamed_before_generation_finishes(make_rig):
    """The server continues only after the agent has received the first piece."""
    async with make_rig(stream_interval=3) as rig:
        seen = asyncio.Event()

        async def slow(fake, body):
            ids = rig.tokenizer.encode("abcdef")
            span = {"finish_reason": {"type": "length"}, "weight_versions": [{"version": "0", "start": 0, "end": 6}]}
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(fake.http)
            await response.write(event(fake.piece(body, ids[:3], 0)).encode())
            await seen.wait()
            await response.write((event(fake.piece(body, ids[3:], 0, span)) + "data: [DONE]\n\n").encode())
            return response

        loop = asyncio.get_running_loop()
        rig.fake.script.append(slow)
        contents = []

        async def conversation(create):
            async for chunk in await create(messages=HI, stream=True):
                if content := chunk.choices[0].delta.content:
                    contents.append(content)
                    loop.call_soon_threadsafe(seen.set)

        await rig.converse(conversation)
        assert contents == ["abc", "def"]


async def test_text_is_not_streamed_incrementally_when_stop_strings_are_set(make_rig):
    async with make_rig(stream_interval=3) as rig:
        rig.write("hello")
        chunks, _ = await stream(rig, stop=["lo"])
        assert [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content] == ["hello"]
        rig.sampling = SamplingConfig(max_new_tokens=300, stop=["lo"])
        rig.write("hello")
        chunks, _ = await stream(rig)
        assert [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content] == ["hello"]


@pytest.mark.parametrize("text", ["ab", "a\u00e9\U0001f600b", "\u1234" * 3])
async def test_the_bytes_of_all_tokens_are_the_utf8_of_the_content(rig, text):
    rig.write(text)
    found, _ = await rig.ask(logprobs=True)
    parts = found.choices[0].logprobs.content
    assert bytes(byte for part in parts for byte in part.bytes).decode() == found.choices[0].message.content == text
