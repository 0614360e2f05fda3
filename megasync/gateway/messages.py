"""Anthropic's Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson

from megasync.concurrency.first_use import prepared
from megasync.gateway.answer import Answer
from megasync.gateway.errors import RequestError
from megasync.gateway.request import (
    NO_TOOLS,
    Count,
    Kept,
    Neutral,
    Request,
    Sampling,
    Strict,
    Temperature,
    TopK,
    TopP,
    callable_names,
    check_neutral,
    chosen,
    decode_body,
    event,
    stops,
    unsent,
    unsupported,
)

# The key of arguments that are no JSON object, which this dialect cannot have otherwise.
_NO_OBJECT = "arguments_that_are_no_json_object"


@prepared
class CacheControl(msgspec.Struct, frozen=True):
    """Where a cache ends, which changes nothing. All are equal, because agents move it from request to request."""


NO_CACHE = CacheControl()


@prepared
class TextBlock(Strict, tag="text"):
    """Text, of a message or of the system prompt."""

    text: str
    cache_control: CacheControl | None = NO_CACHE
    citations: list[None] | None = None


@prepared
class ThinkingBlock(Strict, tag="thinking"):
    """The reasoning of an earlier answer."""

    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = NO_CACHE


@prepared
class ToolUse(Strict, tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = NO_CACHE
    caller: Any = None
    toolset_name: None = None


@prepared
class ToolResult(Strict, tag="tool_result"):
    """The result of a tool. Chat templates know no errors, so the content of one must say that it is one."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = NO_CACHE
    toolset_name: None = None


@prepared
class Message(Strict):
    """A message as an agent sends it. The results of tools are blocks of a user's message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUse | ToolResult]


@prepared
class Tool(Strict):
    """A tool that the agent runs. Tools that Anthropic defines or runs have another type."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    # Ignored: constrained decoding, caching and streaming.
    strict: Any = None
    cache_control: CacheControl | None = NO_CACHE
    eager_input_streaming: Any = None
    allowed_callers: Any = None
    # Accepted only with values that change nothing; see _NEUTRAL_TOOL.
    defer_loading: Any = None
    input_examples: Any = None


@prepared
class ToolChoice(Strict):
    """Which tools the model may call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


@prepared
class CountBody(Strict):
    """A request for the number of tokens of a prompt. Unknown fields are refused."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    # Any name is accepted, because there is only one model.
    model: str = ""
    system: str | list[TextBlock] | None = None
    # A list of `Tool`.
    tools: msgspec.Raw = NO_TOOLS
    tool_choice: ToolChoice | None = None
    # Reported as having no effect.
    thinking: Any = None
    output_config: Any = None
    # Accepted only with values that change nothing; see _NEUTRAL.
    context_management: Any = None
    mcp_servers: Any = None
    # Accepted and ignored.
    cache_control: CacheControl | None = NO_CACHE
    speed: Any = None


@prepared
class MessagesBody(CountBody):
    """A request for a message. Unknown fields are refused."""

    max_tokens: Count | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: list[str] | None = None
    # Accepted only with values that change nothing; see _NEUTRAL.
    container: Any = None
    # Identity and billing: accepted and ignored.
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


# Keeping all thinking, which chat templates decide.
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_NEUTRAL: Neutral = {
    "context_management": (({}, {"edits": []}, _KEEP_ALL), "the gateway changes no messages"),
    "mcp_servers": (([],), "the agent must run its tools itself"),
}
_NEUTRAL_BODY: Neutral = {"container": ((), "the agent must run its tools itself")}
_NEUTRAL_TOOL: Neutral = {
    "defer_loading": ((False,), "the model sees all tools"),
    "input_examples": (([],), "chat templates show no examples; put them into the description"),
}


class MessagesExchange:
    """A message; see `Exchange`."""

    def __init__(self, raw: bytes, model: str, kept: Kept) -> None:
        body = decode_body(raw, MessagesBody)
        check_neutral(body, _NEUTRAL_BODY)
        self.request = _request(
            body,
            kept,
            Sampling(
                max_new_tokens=body.max_tokens,
                stop=stops(body.stop_sequences, "stop_sequences"),
                chosen=chosen(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
            ),
            stream=bool(body.stream),
        )
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body.model or model,
        }
        # Of the stream: the number of blocks that have begun.
        self._blocks = 0
        self._sent = ""

    def whole(self, answer: Answer) -> dict[str, Any]:
        content = [
            begun | {key: orjson.Fragment(text) if key == "input" else text} for begun, key, text in _blocks(answer)
        ]
        return {**self._head, "content": content, **_stop(answer), "usage": _usage(*answer.usage)}

    def begin(self) -> bytes:
        # The number of tokens of the prompt follows with the last event.
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(0, 0)}
        return _event("message_start", message=message)

    def text(self, piece: str) -> bytes:
        opened = b"" if self._blocks else self._opened({"type": "text", "text": ""})
        self._sent += piece
        return opened + self._delta("text", piece)

    def end(self, answer: Answer) -> bytes:
        events: list[bytes] = []
        if self._blocks:
            # Text is streamed only in answers that are nothing else.
            rest = unsent(answer.content, self._sent)
            events = [self._delta("text", rest)] if rest else []
            events.append(self._closed())
        else:
            for begun, key, text in _blocks(answer):
                events += [self._opened(begun), self._delta(key, text), self._closed()]
        events.append(_event("message_delta", delta=_stop(answer), usage=_usage(*answer.usage)))
        return b"".join([*events, _event("message_stop")])

    def failed(self, error: RequestError) -> bytes:
        return event(refusal(error), "error")

    def _opened(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, key: str, text: str) -> bytes:
        kind, name = {"input": ("input_json_delta", "partial_json")}.get(key, (f"{key}_delta", key))
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, name: text})

    def _closed(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)


def count_request(raw: bytes, kept: Kept) -> Request:
    """The request whose prompt is to be counted. Raises RequestError (400)."""
    return _request(decode_body(raw, CountBody), kept, Sampling())


# The error type of each status.
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    499: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
}


def refusal(error: RequestError) -> dict[str, Any]:
    """An error in this dialect's form."""
    message = str(error)
    if error.code == "context_length_exceeded":
        # By these words agents know that they must shorten the conversation.
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": _KINDS.get(error.status, "api_error"), "message": message}}


def _request(body: CountBody, kept: Kept, sampling: Sampling, stream: bool = False) -> Request:
    check_neutral(body, _NEUTRAL)
    config = body.output_config
    if config and (not isinstance(config, dict) or config.keys() - {"effort"}):
        raise unsupported("output_config", config, "answers are not constrained to a format")
    choice = body.tool_choice or ToolChoice("auto")
    tools = [] if choice.type == "none" else kept.tools(body.tools, list[Tool], _functions)
    named = [choice.name or ""] if choice.type == "tool" else None
    prompt = body.system
    system = [Message("system", prompt if isinstance(prompt, str) else [*prompt])] if prompt else []
    return Request(
        sent=[*system, *body.messages],
        read=_read,
        tools=tools,
        must_call=callable_names(tools, named) if choice.type in ("any", "tool") else (),
        sampling=sampling,
        stream=stream,
        single_call=bool(choice.disable_parallel_tool_use),
        without_effect=[name for name in ("thinking", "output_config") if getattr(body, name)],
    )


def _functions(tool: Tool) -> Iterator[dict[str, Any]]:
    check_neutral(tool, _NEUTRAL_TOOL)
    described = {} if tool.description is None else {"description": tool.description}
    yield {"name": tool.name, **described, "parameters": tool.input_schema}


def _read(message: Message) -> Iterator[Mapping[str, Any]]:
    """The messages of one: results of tools are messages of their own, before or after the text around them."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    written: dict[str, Any] = {}
    for block in message.content:
        if isinstance(block, ToolResult):
            if message.role != "user":
                raise RequestError(400, f"a message of the role {message.role} has a tool_result", param="messages")
            if written:
                yield written
                written = {}
            yield {"role": "tool", "content": _text(block.content), "tool_call_id": block.tool_use_id}
            continue
        written = written or {"role": message.role, "content": ""}
        match block:
            case TextBlock():
                written["content"] += block.text
            case ThinkingBlock() | ToolUse() if message.role != "assistant":
                raise RequestError(
                    400, f"a message of the role {message.role} has a block of an answer", param="messages"
                )
            case ThinkingBlock():
                written["reasoning_content"] = written.get("reasoning_content", "") + block.thinking
            case ToolUse():
                arguments = block.input.get(_NO_OBJECT, block.input) if len(block.input) == 1 else block.input
                call = {"id": block.id, "function": {"name": block.name, "arguments": arguments}}
                written.setdefault("tool_calls", []).append(call)
    if written or not message.content:
        yield written or {"role": message.role, "content": ""}


def _text(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


def _blocks(answer: Answer) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Each block of an answer as it begins, and the key and text of its value. That of a call's input is JSON."""
    if answer.reasoning:
        yield {"type": "thinking", "thinking": "", "signature": ""}, "thinking", answer.reasoning
    if answer.content:
        yield {"type": "text", "text": ""}, "text", answer.content
    for call in answer.calls:
        arguments = {_NO_OBJECT: call.raw_arguments} if call.arguments is None else call.arguments
        text = json.dumps(arguments, ensure_ascii=False)
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, "input", text


def _stop(answer: Answer) -> dict[str, Any]:
    reason = "tool_use" if answer.calls else "max_tokens" if answer.truncated else "end_turn"
    if answer.stopped_by is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


def _usage(asked: int, sampled: int) -> dict[str, Any]:
    caches = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": asked, **caches, "output_tokens": sampled}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
