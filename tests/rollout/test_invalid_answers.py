"""Whatever a server or router answers, whoever reads it raises no other error than ServerError, or gives None."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from fake_sglang import event

from megasync.config.schema import RewardModelConfig, SamplingConfig
from megasync.errors import InvalidAnswer, ServerError
from megasync.rewards.model_reward import ClassifierScore, WrittenNumber, YesProbability
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.inflight import ServerLoad
from megasync.rollout.partials import EMPTY_PIECES
from megasync.rollout.reply_parser import ParsedAnswer, ReplyParser
from megasync.serving import control as control_module
from megasync.serving.control import ServerControl
from megasync.serving.frozen_client import FrozenModelClient
from megasync.serving.plugin_control import PluginControl
from megasync.serving.router import Router, RouterMembers
from megasync.sync.disk.sync import DiskServer

SECONDS = 0.05
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class Liar:
    """Answers everything alike."""

    body = b""

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.control = ServerControl(self.url)
        return self

    async def __aexit__(self, *exc):
        await self.control.close()
        await self._runner.cleanup()

    async def _answer(self, request):
        return web.Response(body=self.body, content_type="application/json")


@pytest.fixture
async def liar():
    async with Liar() as server:
        yield server


async def workers(liar, tmp_path):
    port = int(liar.url.rpartition(":")[2])
    assert await Router([], "random", "127.0.0.1", port, tmp_path / "log").listed_servers() is None
    raise ServerError("as it should be")


async def members(liar, tmp_path):
    router = RouterMembers(liar.control)
    try:
        await router.adjust(["http://a"])
    finally:
        await router.close()


async def generate(liar, tmp_path, stream=0):
    client = RolloutClient(
        liar.url, [], ServedModel(100, 64), RequestSettings(SamplingConfig(), SECONDS, stream_interval=stream)
    )
    try:
        await client.generate([1])
    finally:
        await client.close()


async def score(liar, tmp_path):
    await RolloutClient(liar.url, [], ServedModel(100, 64), RequestSettings(SamplingConfig(), SECONDS)).score(
        liar.control, [1, 2]
    )


def parse(tools, reasoning):
    async def ask(liar, tmp_path):
        parser = ReplyParser(lambda: [liar.control], SECONDS)
        found = await parser.parse("text", [TOOL], tools, reasoning)
        assert isinstance(found, ParsedAnswer)

    return ask


def reward(verdict):
    async def ask(liar, tmp_path):
        client = FrozenModelClient("reward model 'grader'", 1, SECONDS)
        client.add_server(liar.control)
        await client.ask(verdict.path, verdict.body([1]), verdict.read)

    return ask


READERS = {
    "weight version": lambda liar, tmp_path: liar.control.weight_version(),
    "loads": lambda liar, tmp_path: _load(liar),
    "router's workers": workers,
    "router's members": members,
    "whole answer": generate,
    "streamed answer": lambda liar, tmp_path: generate(liar, tmp_path, 3),
    "scores": score,
    "tool calls": parse("hermes", None),
    "reasoning": parse(None, "qwen3"),
    "plugin's hello": lambda liar, tmp_path: PluginControl(liar.control).hello(),
    "plugin's layout": lambda liar, tmp_path: PluginControl(liar.control).trace([("w", (4, 3))]),
    "kind of a server": lambda liar, tmp_path: DiskServer(liar.control, "abort", 5.0).ask_kind(),
    "classifier": reward(ClassifierScore(1)),
    "number": reward(WrittenNumber(RewardModelConfig("m", kind="generative"))),
    "yes or no": reward(YesProbability(3, 4)),
}


async def _load(liar):
    ServerLoad.parse(await liar.control.get("/v1/loads"))


def plugin(*answers: object) -> bytes:
    return json.dumps({"ranks": [{"checksums": {"megasync": answer}} for answer in answers]}).encode()


BODIES = [
    *(b"", b"null", b"true", b"5", b'"text"', b"[]", b"[[]]", b"{", b"<html>", b"\xff\xfe", b"[" * 2000),
    *(
        b'{"weight_version": []}',
        b'{"weight_version": "new"}',
        b'{"loads": 1}',
        b'{"loads": [{}]}',
        b'{"loads": [null]}',
    ),
    *(b'{"workers": {}}', b'{"workers": [5]}', b'{"workers": [{}]}', b'{"workers": [{"url": 7}]}'),
    *(b'{"meta_info": []}', b'{"meta_info": {"finish_reason": 4}}', b'{"meta_info": {"input_token_logprobs": [[]]}}'),
    *(b'{"calls": 1}', b'{"calls": [1], "normal_text": ""}', b'{"text": 1}', b'{"text": [], "reasoning_text": {}}'),
    *(b'{"embedding": 1}', b'{"embedding": [0]}', b'{"embedding": {"1": 2}}', b'{"nnodes": "two"}', b'{"error": "no"}'),
    *(
        b'{"ranks": 1}',
        b'{"ranks": [{}]}',
        b'{"ranks": [{"checksums": []}]}',
        b'{"ranks": [{"checksums": {"a": "b"}}]}',
    ),
    *(plugin("zlib:?"), plugin("zlib:aaaa"), plugin("{"), plugin("[]"), plugin("5"), plugin('{"ok": true}'), plugin(5)),
    plugin('{"ok": true, "rank": 0, "result": []}'),
    plugin('{"ok": true, "rank": 0, "result": {"protocol": []}}'),
    plugin('{"ok": true, "rank": 0, "result": {"slots": [1], "fills": [], "dtypes": 1, "sizes": 1, "unwritten": 1}}'),
    plugin('{"ok": true, "rank": "first", "result": {}}', '{"ok": true, "rank": 1, "result": {}}'),
]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
async def test_readers_raise_only_server_errors_on_invalid_answers(liar, tmp_path, read, endless_pause):
    for body in BODIES:
        liar.body = body
        try:
            await read(liar, tmp_path)
        except ServerError:
            continue
        # Some of these are right answers to some of the questions.
        assert body.startswith((b"{}", b'{"nnodes"', b'{"')), body


async def test_reading_stops_when_an_answer_exceeds_the_size_limit(liar, monkeypatch):
    monkeypatch.setattr(control_module, "_MOST_BYTES", 1000)
    liar.body = b"[" + b"1," * 1000 + b"1]"
    with pytest.raises(InvalidAnswer, match=f"GET {liar.url}/model_info: it has more than 1000 bytes"):
        await liar.control.weight_version()


async def test_a_server_with_invalid_parser_answers_is_skipped(liar):
    async with Liar() as honest:
        liar.body, honest.body = b'{"calls": 1}', b'{"calls": [{"name": "f", "parameters": "{}"}], "normal_text": ""}'
        parser = ReplyParser(lambda: [liar.control, honest.control], 600.0)
        found = await parser.parse("<tool_call>f</tool_call>", [TOOL], "hermes", None)
        assert [call.name for call in found.calls] == ["f"]


async def stream_of(fake, make_client, pieces):
    """(the client's tokens, invalid answers, prompts) where the first stream has pieces of these ids, and no end."""

    async def behave(fake, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(fake.http)
        count = 0
        for ids in pieces:
            count += len(ids)
            spans = [{"version": "0", "start": 0, "end": 2}]
            end = {"finish_reason": {"type": "length"}, "weight_versions": spans} if count == 2 else {}
            await response.write(event(fake.piece(body, ids, 0, end)).encode())
            if end:
                return response
        await asyncio.Event().wait()

    fake.script += [behave]
    client = make_client(stream_interval=1, sampling=SamplingConfig(max_new_tokens=2))
    got = await client.generate([1])
    return got.token_ids, client.metrics()["rollout/invalid_answers"], [body["input_ids"] for body in fake.requests]


async def test_a_stream_of_empty_chunks_is_rejected_and_retried(fake, make_client):
    """Nothing of the stream without an end is used."""
    pieces = [[9], *[[]] * EMPTY_PIECES]
    assert await stream_of(fake, make_client, pieces) == ([2, 3], 1.0, [[1], [1]])


async def test_a_few_consecutive_empty_chunks_are_accepted(fake, make_client):
    few = [[]] * (EMPTY_PIECES - 1)
    assert await stream_of(fake, make_client, [*few, [9], *few, [4]]) == ([9, 4], 0.0, [[1]])
