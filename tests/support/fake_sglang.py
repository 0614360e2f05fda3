"""An HTTP server in the test's event loop that answers as SGLang does and records its requests."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from aiohttp import web

from megasync.serving.plugin_protocol import FLAT_TOP, ROUTES_FROM, SEEDS, WITH_SUPPORT

# Tokens in a piece of a streamed answer.
PIECE = 3

Behaviour = Callable[["FakeSGLang", dict], Awaitable[web.Response]]


async def DROP(fake: FakeSGLang, body: dict) -> web.Response:
    """Marks a request whose connection is closed without an answer."""
    raise AssertionError("handled before it is called")


@dataclass(frozen=True)
class Break:
    """A streamed request whose connection is closed after pieces of (tokens, version at their sending)."""

    pieces: tuple[tuple[int, int], ...]


class FakeSGLang:
    """The next token is always the last one plus one (mod `vocab`), its log-prob is -id/128, exact in float32.

    `script` holds what happens to the next `/generate` requests, in order; after that they are answered in full.
    """

    def __init__(self, vocab: int = 100) -> None:
        self.vocab = vocab
        self.version = 0
        self.script: deque[Behaviour] = deque()
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.peers: list[tuple] = []
        # Paths of all POST requests, and requests whose caller disconnected.
        self.calls: list[str] = []
        self.disconnected = 0
        self.parser_status = 200
        # Number of layers in the routes of an answer whose request asks for them; 0 for a server that reports none.
        self.route_layers = 3
        # The support of a token, in an answer whose request asks for it; None for a server that reports none.
        self.support: Callable[[int], list[int]] | None = lambda token: [token, (token + 1) % self.vocab]
        # Decodes token ids to text.
        self.words: Callable[[list[int]], str] = lambda ids: "".join(f"<{i}>" for i in ids)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/parse_function_call", self._parse_calls)
        app.router.add_post("/separate_reasoning", self._separate_reasoning)
        for path in ("/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self._info)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    def continuation(self, body: dict, count: int) -> list[int]:
        last = body["input_ids"][-1]
        return [(last + 1 + i) % self.vocab for i in range(count)]

    def answer(
        self, body: dict, count: int, finish: str, versions: list[tuple[int, int]] | None = None
    ) -> web.Response:
        """`versions` is (version, tokens) pairs; by default all tokens have the present version."""
        ids = self.continuation(body, count)
        spans, at = [], 0
        for version, tokens in versions if versions is not None else [(self.version, count)]:
            spans.append({"version": str(version), "start": at, "end": at + tokens})
            at += tokens
        last = {"finish_reason": {"type": finish}, "weight_versions": spans}
        if (start := body.get("custom_labels", {}).get(ROUTES_FROM)) and self.route_layers:
            last["routed_experts"] = self.routes(body, int(start), count)
        if not body.get("stream"):
            answers = [self.piece(body, ids, self.version, last)] * responses(body)
            return web.json_response(answers if SEEDS in body.get("custom_labels", {}) else answers[0])
        # Only the last piece says which version wrote which tokens.
        pieces = [self.piece(body, ids[at : at + PIECE], self.version) for at in range(0, max(0, count - PIECE), PIECE)]
        pieces.append(self.piece(body, ids[PIECE * len(pieces) :], self.version, last))
        pieces = [each | {"index": index} for each in pieces for index in range(responses(body))]
        return web.Response(text="".join(map(event, pieces)) + "data: [DONE]\n\n", content_type="text/event-stream")

    def routes(self, body: dict, start: int, count: int) -> str:
        """In each layer a position goes to the experts of its own number, and to 100 plus the number of the request."""
        positions = range(start, len(body["input_ids"]) + count - 1)
        rows = [[[position, 100 + len(self.requests)]] * self.route_layers for position in positions]
        return base64.b64encode(np.array(rows, np.int32).tobytes()).decode()

    def scores(self, body: dict) -> dict:
        """Of each position the log-prob of id i is -i/128; the likeliest ids are those from 0 on, with -i/32."""
        ids, named, top = body["input_ids"][body["logprob_start_len"] :], body.get("token_ids_logprob"), 0
        if body.get("custom_labels", {}).get(FLAT_TOP) == "1":
            top = body["top_logprobs_num"]
        likeliest = np.tile(np.arange(top, dtype=np.int32), (len(ids) - 1, 1))
        flat = [base64.b64encode(array.tobytes()).decode() for array in (likeliest, likeliest.astype(np.float32) / -32)]
        return {
            "cached_tokens": body["logprob_start_len"],
            # The last id of the vocabulary is called 0.
            "input_token_logprobs": [
                [None if at == 0 else -i / 128, 0 if i == self.vocab - 1 else i, None] for at, i in enumerate(ids)
            ],
            "input_token_ids_logprobs": [None, *([[[-i / 128, i, None] for i in named]] * (len(ids) - 1))]
            if named
            else None,
            "input_top_logprobs_idx_flat_b64": flat[0],
            "input_top_logprobs_val_flat_b64": flat[1],
        }

    def piece(self, body: dict, ids: list[int], version: int, last: dict | None = None) -> dict:
        meta = {
            "id": "0",
            "finish_reason": None,
            "weight_version": str(version),
            "output_token_logprobs": [[-i / 128, i, None] for i in ids],
        }
        if "lora_path" in body:
            meta["adapter"] = body["lora_path"]
        if "logprob_start_len" in body:
            meta |= self.scores(body)
        elif top := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [[[-k / 32, k, None] for k in range(top)] for _ in ids]
        if body.get("custom_labels", {}).get(WITH_SUPPORT) == "1" and self.support is not None:
            meta["output_token_sampling_mask"] = [self.support(token) for token in ids]
            meta["output_token_sampling_logprobs"] = [-i / 256 for i in ids]
        return {"text": self.words(ids), "output_ids": ids, "meta_info": meta | (last or {})}

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(request.path)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.peers.append(request.transport.get_extra_info("peername"))
        behave = self.script.popleft() if self.script else complete
        if behave is DROP:
            request.transport.close()
            return web.Response()
        if isinstance(behave, Break):
            return await self._break(request, body, behave)
        self.http = request
        try:
            return await behave(self, body)
        except asyncio.CancelledError:
            self.disconnected += 1
            raise

    async def _break(self, request: web.Request, body: dict, broken: Break) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids, at = self.continuation(body, sum(count for count, _ in broken.pieces)), 0
        for count, version in broken.pieces:
            await response.write(event(self.piece(body, ids[at : at + count], version)).encode())
            at += count
            # So that the next piece is sent in a separate packet.
            await asyncio.sleep(0.01)
        request.transport.close()
        return response

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "is_generation": True, "weight_version": str(self.version)})

    async def _parse_calls(self, request: web.Request) -> web.Response:
        """Parses tool calls in Hermes format only."""
        body = await request.json()
        if self.parser_status != 200:
            return web.Response(status=self.parser_status, text="the parser failed")
        calls = []
        for text in re.findall(r"<tool_call>(.*?)</tool_call>", body["text"]):
            try:
                call = json.loads(text)
            except ValueError:
                continue
            calls.append({"name": call["name"], "parameters": json.dumps(call["arguments"]), "tool_index": 0})
        return web.json_response({"normal_text": body["text"].split("<tool_call>")[0], "calls": calls})

    async def _separate_reasoning(self, request: web.Request) -> web.Response:
        body = await request.json()
        reasoning, _, text = body["text"].removeprefix("<think>").rpartition("</think>")
        return web.json_response({"reasoning_text": reasoning, "text": text})


def responses(body: dict) -> int:
    """The number of responses that a request asks for."""
    return len(body.get("custom_labels", {}).get(SEEDS, "").split(","))


def event(content: dict) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def complete(fake: FakeSGLang, body: dict) -> web.Response:
    return fake.answer(body, body["sampling_params"]["max_new_tokens"], "length")


def finish(count: int, reason: str, versions: list[tuple[int, int]] | None = None) -> Behaviour:
    async def behave(fake: FakeSGLang, body: dict) -> web.Response:
        return fake.answer(body, count, reason, versions)

    return behave


def refuse(status: int, text: str = "no") -> Behaviour:
    async def behave(fake: FakeSGLang, body: dict) -> web.Response:
        return web.Response(status=status, text=text)

    return behave


def hang(started: asyncio.Event | None = None) -> Behaviour:
    async def behave(fake: FakeSGLang, body: dict) -> web.Response:
        if started is not None:
            started.set()
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    return behave
