"""Nothing is ever sampled behind the end of an answer, whatever happens between its last token and its use."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from fake_sglang import FakeSGLang, event, finish, refuse
from passing_time import late_after
from tiny_models import byte_tokenizer
from waits import until

from megasync.config.schema import ChatConfig
from megasync.errors import ServerError
from megasync.rollout.inflight import RequestGate
from megasync.rollout.partials import PartialResponses
from megasync.rollout.workflow import SampleClient
from megasync.trajectory import ANSWER, Turn

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# Of the byte tokenizer.
EOS = 2


@pytest.fixture
async def fake():
    async with FakeSGLang(vocab=300) as server:
        yield server


@pytest.fixture
def client_options():
    return {
        "context_length": 200,
        "tokenizer": byte_tokenizer(),
        "stop_ids": [EOS],
        "chat": ChatConfig(tool_format="hermes"),
    }


def sample(client, partials: PartialResponses) -> SampleClient:
    """As for one attempt of the rollout."""
    return SampleClient(client, RequestGate(), routing_key="0:0", responses=partials.sample("0:0", 0))


def resumed(partials: PartialResponses) -> PartialResponses:
    """What another life of the run gets back of what is saved now."""
    later = PartialResponses()
    later.restore("0:0", {key[1:]: partial for piece in partials.unsaved() for key, partial in piece.items()})
    return later


async def test_a_response_whose_parsing_failed_is_reused_by_the_next_attempt(fake, client, monkeypatch):
    partials = PartialResponses()
    fake.script += [finish(3, "stop")]
    fake.parser_status = 503
    with monkeypatch.context() as late, pytest.raises(ServerError, match="no server parsed an answer"):
        late.setattr(client.servers[0], "post", late_after(client.servers[0].post))
        await sample(client, partials).chat(MESSAGES, tools=[TOOL])
    fake.parser_status = 200
    again = sample(client, partials)
    reply = await again.chat(MESSAGES, tools=[TOOL])
    assert len(fake.requests) == 1
    assert len(reply.generation.token_ids) == 3
    assert (reply.finish_reason, reply.text) == ("stop", fake.words(reply.generation.token_ids))
    assert again.conversation.trajectories()[0].response_ids.tolist() == reply.generation.token_ids


async def test_a_response_saved_during_parsing_is_complete_in_the_resumed_run(fake, client):
    partials = PartialResponses()
    fake.script += [finish(3, "stop")]
    fake.parser_status = 503
    turn = asyncio.create_task(sample(client, partials).chat(MESSAGES, tools=[TOOL]))
    await until(lambda: fake.requests and any(parts.finished for _, parts in partials._groups["0:0"].values()))
    later = resumed(partials)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    fake.parser_status = 200
    reply = await sample(client, later).chat(MESSAGES, tools=[TOOL])
    assert len(fake.requests) == 1
    assert (len(reply.generation.token_ids), reply.finish_reason) == (3, "stop")
    assert reply.text == fake.words(reply.generation.token_ids)


async def test_finished_turns_are_replayed_and_the_unfinished_turn_continues(fake, client, endless_pause):
    partials = PartialResponses()
    first = sample(client, partials)
    fake.script += [finish(3, "stop"), finish(2, "abort"), refuse(503)]
    one = await first.generate([1])
    with pytest.raises(ServerError, match="after 2 tokens"):
        await first.generate([1, *one.token_ids, 50])
    again = sample(client, resumed(partials))
    asked = len(fake.requests)
    assert (await again.generate([1])).token_ids == one.token_ids
    two = await again.generate([1, *one.token_ids, 50])
    assert [r["input_ids"] for r in fake.requests[asked:]] == [[1, 2, 3, 4, 50, 51, 52]]
    assert two.token_ids == list(range(51, 59))
    (trajectory,) = again.conversation.trajectories()
    assert trajectory.response_ids.tolist() == [2, 3, 4, 50, *two.token_ids]
    assert trajectory.turns == (Turn(0, 3, ANSWER), Turn(3, 4), Turn(4, 12, ANSWER))


@pytest.mark.parametrize(
    "change", [{"max_new_tokens": 2}, {"max_new_tokens": 20}, {"stop": ["x"]}, {"temperature": 0.5}]
)
async def test_a_changed_request_is_generated_from_scratch_with_its_own_budget(fake, client, change):
    partials = PartialResponses()
    fake.script += [finish(3, "stop")]
    await sample(client, partials).generate([1])
    got = await sample(client, partials).generate([1], **change)
    assert [r["input_ids"] for r in fake.requests] == [[1], [1]]
    assert len(got.token_ids) == change.get("max_new_tokens", 8)


async def test_a_response_that_exhausted_its_budget_stays_truncated_after_a_resume(fake, client):
    partials = PartialResponses()
    await sample(client, partials).generate([1])
    got = await sample(client, resumed(partials)).generate([1])
    assert (len(got.token_ids), got.finish_reason, len(fake.requests)) == (8, "length", 1)


def ends(ids: list[int], reason: str = "abort", text: str = ""):
    async def behave(fake, body):
        spans = [{"version": "0", "start": 0, "end": len(ids)}]
        piece = fake.piece(body, ids, 0, {"finish_reason": {"type": reason}, "weight_versions": spans})
        piece["text"] = text
        if not body["stream"]:
            return web.json_response(piece)
        return web.Response(text=event(piece), content_type="text/event-stream")

    return behave


async def test_an_abort_in_the_step_that_samples_eos_is_reported_as_stop(fake, client):
    fake.script += [finish(2, "abort"), ends([9, EOS])]
    got = await client.generate([1])
    assert (got.token_ids, got.finish_reason, len(fake.requests)) == ([2, 3, 9, EOS], "stop", 2)


async def test_an_abort_at_a_stop_token_or_stop_string_is_reported_as_stop(fake, client):
    fake.script += [ends([9, 7])]
    assert (await client.generate([1], stop_token_ids=[7])).finish_reason == "stop"
    fake.script += [ends([9, 8], text="so END.")]
    got = await client.generate([1], stop="END")
    assert (got.token_ids, got.finish_reason, got.text) == ([9, 8], "stop", "so ")
    assert len(fake.requests) == 2


async def test_an_abort_after_eos_continues_the_request_with_ignore_eos(fake, client):
    fake.script += [ends([9, EOS])]
    got = await client.generate([1], ignore_eos=True)
    assert (len(got.token_ids), got.finish_reason, len(fake.requests)) == (8, "length", 2)
