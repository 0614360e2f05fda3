"""Whatever a client sends, the gateway answers with a result or an error that names the client's fault."""

from __future__ import annotations

import json
import random
from typing import Any

import aiohttp
import pytest
from gateway_rig import HI, openai
from tiny_models import byte_tokenizer

from megasync.config.schema import ChatConfig

DEEP = "[" * 100_000 + "]" * 100_000
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ANSWER = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def history(arguments: str) -> list[dict[str, Any]]:
    call = ANSWER | {"function": {"name": "f", "arguments": arguments}}
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c",
            "content": "x"}]  # fmt: skip


async def send(rig, *bodies: bytes, key: bytes | None = None) -> list[tuple[int, dict[str, Any]]]:
    found = []

    async def agent(base_url, api_key, sample, model):
        header = (b"Bearer " + api_key.encode() if key is None else key).decode("utf-8", "surrogateescape")
        async with aiohttp.ClientSession() as session:
            for body in bodies:
                url = f"{base_url}/chat/completions"
                async with session.post(url, data=body, headers={"Authorization": header}) as answer:
                    found.append((answer.status, await answer.json()))
        rig.write("x")
        async with openai(base_url, api_key) as client:
            await client.chat.completions.create(model=model, messages=HI)

    await rig.play(agent)
    return found


@pytest.mark.parametrize(
    "body",
    [
        f'{{"messages": {DEEP}}}',
        f'{{"messages": [], "metadata": {DEEP}}}',
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        json.dumps({"messages": HI, "tools": [{"type": "function", "function": {"name": 3}}]}),
        json.dumps(
            {"messages": HI, "tools": [ADD | {"function": {"name": "f", "x": json.loads("[" * 99 + "]" * 99)}}]}
        ),
        "\ud800".encode("utf-8", "surrogatepass"),
        b"\xff",
    ],
    ids=range(8),
)
async def test_bodies_that_cannot_be_read_are_the_clients_fault(rig, body):
    ((status, answer),) = await send(rig, body if isinstance(body, bytes) else body.encode())
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"


async def test_a_key_of_any_bytes_is_refused(rig):
    ((status, _),) = await send(rig, b"{}", key=b"Bearer \xff\xfe")
    assert status == 401


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
        found = await send(rig, *bodies)
        wrong = [
            (body, answer) for body, (status, answer) in zip(bodies, found, strict=True) if status not in (200, 400)
        ]
        assert not wrong, wrong[0]
        assert {status for status, _ in found} == {200, 400}


@pytest.mark.parametrize("text", ["ab", "a\u00e9\U0001f600b", "\u1234" * 3])
async def test_the_bytes_of_all_tokens_are_the_utf8_of_the_content(rig, text):
    rig.write(text)
    found, _ = await rig.ask(logprobs=True)
    parts = found.choices[0].logprobs.content
    assert bytes(byte for part in parts for byte in part.bytes).decode() == found.choices[0].message.content == text


ONE_QUESTION = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<bos>{{ m.role }}: "
    "{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_response_that_cannot_be_followed_by_its_result_is_trained(make_rig, goes_on):
    chat = ChatConfig(tool_format="hermes")
    async with make_rig(tokenizer=byte_tokenizer(ONE_QUESTION), chat=chat) as rig:
        rig.write(CALL, "later")

        async def agent(base_url, api_key, sample, model):
            async with openai(base_url, api_key) as client:
                ask = client.chat.completions.create
                message = (await ask(model=model, messages=HI, tools=[ADD])).choices[0].message
                result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
                try:
                    await ask(model=model, messages=[*HI, message.model_dump(), result], tools=[ADD])
                except Exception as error:
                    assert "no tools" in str(error)
                    if not goes_on:
                        raise
                await ask(model=model, messages=HI)
                raise OSError("the agent's own fault")

        if goes_on:
            with pytest.raises(OSError, match="own fault"):
                await rig.play(agent)
            return
        (trajectory,) = await rig.play(agent)
        assert trajectory.reward is None
        assert trajectory.metrics["template_refused"] == 1.0
        assert rig.tokenizer.decode(trajectory.response_ids) == f"{CALL}<eos>"
