"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.gateway.answer import Answer
from megasync.gateway.errors import RequestError
from megasync.gateway.request import (
    NO_TOOLS,
    PENALTY,
    Count,
    Kept,
    Neutral,
    Request,
    Sampling,
    Seed,
    Strict,
    Temperature,
    TopP,
    check_neutral,
    chosen,
    decode_body,
    event,
    stops,
    tool_choice,
    unsent,
)


@prepared
class TextPart(Strict):
    """A text part of a message's content."""

    text: str
    type: Literal["text"] = "text"


@prepared
class CalledFunction(Strict):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str = ""


@prepared
class Call(Strict):
    """A tool call in an assistant message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    # Sent back by agents that assemble streamed chunks.
    index: int | None = None


@prepared
class Message(Strict):
    """A chat message as an agent sends it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Text of an answer without a content.
    refusal: str | None = None
    # Empty fields of an answer, which the `openai` package sends back with the others.
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None


@prepared
class StreamOptions(Strict):
    """The options of a streamed response."""

    # Asks for a final chunk with token counts.
    include_usage: bool | None = None
    # Accepted and ignored.
    include_obfuscation: bool | None = None


@prepared
class ChatBody(Strict):
    """A chat completion request. Unknown fields are refused."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    # Any name is accepted, because there is only one model.
    model: str = ""
    # A list of objects.
    tools: msgspec.Raw = NO_TOOLS
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    logprobs: bool | None = None
    # Accepted only with values that change nothing; see _NEUTRAL.
    n: Any = None
    response_format: Any = None
    modalities: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    top_logprobs: Any = None
    # Identity, billing, storage and caching: accepted and ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


_NEUTRAL: Neutral = {
    "n": ((1,), "each request returns one answer; send several requests"),
    "response_format": (({"type": "text"},), "answers are not constrained to a format"),
    "modalities": ((["text"],), "only text is supported"),
    "frequency_penalty": ((0,), PENALTY),
    "presence_penalty": ((0,), PENALTY),
    "logit_bias": (({},), "the trainer does not model biases"),
    "top_logprobs": ((0,), "only the sampled tokens' log-probs are kept"),
}


class ChatExchange:
    """A chat completion; see `Exchange`."""

    def __init__(self, raw: bytes, model: str, kept: Kept) -> None:
        body = decode_body(raw, ChatBody)
        check_neutral(body, _NEUTRAL)
        if body.stream_options is not None and not body.stream:
            raise RequestError(400, "stream_options needs stream=true", param="stream_options")
        limits = [count for count in (body.max_completion_tokens, body.max_tokens) if count is not None]
        self.request = Request(
            sent=body.messages,
            read=_read,
            **tool_choice(kept.tools(body.tools), body.tool_choice),
            sampling=Sampling(
                max_new_tokens=min(limits, default=None),
                stop=stops(body.stop),
                chosen=chosen(temperature=body.temperature, top_p=body.top_p, seed=body.seed),
            ),
            stream=bool(body.stream),
            logprobs=bool(body.logprobs),
            single_call=body.parallel_tool_calls is False,
        )
        self._usage_follows = bool(body.stream_options and body.stream_options.include_usage)
        self._sent = ""
        # What all chunks of an answer share.
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or model,
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw_arguments}}
                for call in answer.calls
            ]
        choice = {"index": 0, "message": message, "logprobs": _logprobs(answer), "finish_reason": _finish(answer)}
        return {"object": "chat.completion", **self._head, "choices": [choice], "usage": _usage(answer)}

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, piece: str) -> bytes:
        self._sent += piece
        return self._chunk({"content": piece})

    def end(self, answer: Answer) -> bytes:
        chunks = [self._chunk(delta) for delta in _deltas(answer, self._sent)]
        chunks.append(self._chunk({}, _finish(answer), _logprobs(answer)))
        if self._usage_follows:
            last = {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": _usage(answer)}
            chunks.append(event(last))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def failed(self, error: RequestError) -> bytes:
        return event(error.body())

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        # If a usage chunk follows, all earlier chunks have `"usage": null`.
        return event(chunk | {"usage": None} if self._usage_follows else chunk)


def _read(message: Message) -> tuple[Mapping[str, Any]]:
    written = msgspec.to_builtins(message)
    written.pop("annotations", None)
    return (written,)


def _deltas(answer: Answer, sent: str) -> Iterator[dict[str, Any]]:
    """The rest of an answer to stream, after the part `sent` of its content."""
    if answer.reasoning:
        yield {"reasoning_content": answer.reasoning}
    if rest := unsent(answer.content, sent):
        yield {"content": rest}
    for index, call in enumerate(answer.calls):
        opened = {"index": index, "id": call.id, "type": "function"}
        yield {"tool_calls": [opened | {"function": {"name": call.name, "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call.raw_arguments}}]}


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.calls else answer.generation.finish_reason


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    return None if answer.logprobs is None else {"content": answer.logprobs, "refusal": None}


def _usage(answer: Answer) -> dict[str, int]:
    asked, sampled = answer.usage
    return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}
