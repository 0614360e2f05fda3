"""OpenAI's Responses: `POST /v1/responses`.

The input is a list of items, of which several may be one message: reasoning, text and calls of one answer. `_grouped`
puts them together. An answer is kept as the items that its agent receives, so a request that names it by
`previous_response_id`, or its items by references, is the same as one that sends them back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import orjson

from megasync.concurrency.first_use import prepared
from megasync.errors import DataError
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
    TopP,
    check_neutral,
    chosen,
    decode_body,
    event,
    tool_choice,
    unsent,
    unsupported,
)


@prepared
class Part(Strict):
    """A part of a message's content, of a call's output, or of reasoning."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    # Sent back with an answer: ignored.
    annotations: Any = None
    logprobs: Any = None


Content = str | list[Part]


@prepared
class Item(Strict):
    """An item of the input. Which fields it needs depends on its type; see _NEEDED."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[Part] | None = None
    # What a reference names. Otherwise identity and state of an item that is sent back: ignored.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None
    caller: Any = None
    # Of the function that is called.
    namespace: str | None = None
    created_by: Any = None


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
# Where an item stands among those of its answer. Another one at the same place begins another answer.
_PLACES = {"reasoning": 0, "message": 1, "function_call": 2}

# The items of one message.
Group = tuple[Item, ...]


@prepared
class Format(Strict):
    """The format of answers."""

    type: Literal["text"] = "text"


@prepared
class Text(Strict):
    """The form of answers, which are plain text."""

    format: Format | None = None
    # Ignored.
    verbosity: Any = None


@prepared
class ResponsesBody(Strict):
    """A request for a response. Unknown fields are refused."""

    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    # Any name is accepted, because there is only one model.
    model: str = ""
    # A list of objects.
    tools: msgspec.Raw = NO_TOOLS
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_output_tokens: Count | None = None
    include: list[str] | None = None
    store: bool | None = None
    text: Text | None = None
    # Identity, which the response repeats.
    metadata: dict[str, str] | None = None
    # Reported as having no effect.
    reasoning: Any = None
    # Accepted only with values that change nothing; see _NEUTRAL.
    background: Any = None
    conversation: Any = None
    context_management: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    truncation: Any = None
    # Identity, billing, caching, and calls of tools that OpenAI runs itself: accepted and ignored.
    stream_options: Any = None
    max_tool_calls: Any = None
    user: Any = None
    client_metadata: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    safety_identifier: Any = None


_NEUTRAL: Neutral = {
    "background": ((False,), "a request is answered on its connection"),
    "conversation": ((), "use previous_response_id, or send the items again"),
    "context_management": (([],), "the gateway changes no messages"),
    "prompt": ((), "prompts are not stored; send the instructions"),
    "top_logprobs": ((0,), "only the sampled tokens' log-probs are kept"),
    "truncation": (("disabled",), "the gateway drops no messages"),
}
_LOGPROBS = "message.output_text.logprobs"
# What may be included in an answer. Reasoning is never encrypted.
_INCLUDED = frozenset({_LOGPROBS, "reasoning.encrypted_content"})


class ResponsesExchange:
    """A response; see `Exchange`. kept responses are the groups of their conversations, by id."""

    def __init__(self, raw: bytes, model: str, kept: Kept) -> None:
        body = decode_body(raw, ResponsesBody)
        check_neutral(body, _NEUTRAL)
        for name in body.include or ():
            if name not in _INCLUDED:
                raise unsupported("include", name, f"only {', '.join(sorted(_INCLUDED))} may be included")
        earlier = body.previous_response_id
        if earlier is not None and earlier not in kept.responses:
            raise RequestError(
                400,
                f"previous_response_id={earlier!r:.80} is no response of this session that was stored; send the items "
                f"again",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        items: list[Group] = [
            *(kept.responses[earlier] if earlier is not None else ()),
            *_grouped([Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input, kept),
        ]
        # Those of an earlier request are not carried over.
        instructions = [(Item(role="system", content=body.instructions),)] if body.instructions else []
        logprobs = _LOGPROBS in (body.include or ())
        self.request = Request(
            sent=[*instructions, *items],
            read=_read,
            **tool_choice(kept.tools(body.tools, functions=_functions), body.tool_choice),
            sampling=Sampling(
                max_new_tokens=body.max_output_tokens,
                chosen=chosen(temperature=body.temperature, top_p=body.top_p),
            ),
            stream=bool(body.stream),
            logprobs=logprobs,
            single_call=body.parallel_tool_calls is False,
            without_effect=("reasoning",) if body.reasoning else (),
        )
        choice = body.tool_choice
        if not isinstance(choice, str):
            must_call = self.request.must_call
            choice = {"type": "function", "name": must_call[0]} if len(must_call) == 1 else "auto"
        self._instructed = len(instructions)
        self._namespaces = b'"namespace"' in bytes(body.tools)
        self._id = f"resp_{secrets.token_hex(16)}"
        self._kept = None if body.store is False else kept
        self._head = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": earlier,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": choice,
            "tools": orjson.Fragment(bytes(body.tools or b"[]")),
            "top_p": body.top_p,
            "truncation": "disabled",
        }
        # Of the stream: the number of events, and the message that text is added to.
        self._events = 0
        self._message: dict[str, Any] | None = None
        self._sent = ""

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self._completed(answer, list(_output(answer, self._namespaces)))

    def begin(self) -> bytes:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, piece: str) -> bytes:
        opened = b""
        if self._message is None:
            self._message = _message("", None)
            opened = self._opened(0, self._message)
        self._sent += piece
        return opened + self._delta(0, self._message, piece)

    def end(self, answer: Answer) -> bytes:
        output, events = list(_output(answer, self._namespaces)), list[bytes]()
        for index, item in enumerate(output):
            if self._message is not None and item["type"] == "message":
                item["id"] = self._message["id"]
                part = item["content"][0]
                rest = unsent(part["text"], self._sent)
                part["text"] = self._sent + rest
                events += [self._delta(index, item, rest)] if rest else []
            else:
                events += [self._opened(index, item), self._delta(index, item)]
            events.append(self._closed(index, item))
        response = self._completed(answer, output)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def failed(self, error: RequestError) -> bytes:
        self._events += 1
        # As `error` alone, the `openai` package would return it as one of the events.
        fields = {"code": error.code, "message": str(error), "param": error.param, "sequence_number": self._events}
        return event({"type": "error", **fields, **error.body()}, "error")

    def _completed(self, answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The finished response, which later requests may continue."""
        if self._kept is not None:
            items = self.request.sent[self._instructed :]
            answered = msgspec.convert(output, list[Item])
            self._kept.items.update((str(item.id), item) for item in answered)
            self._kept.responses[self._id] = [*items, *_grouped(answered, self._kept)]
        asked, sampled = answer.usage
        usage = {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + sampled,
        }
        return self._response("incomplete" if answer.truncated else "completed", output) | {"usage": usage}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {"status": status, "incomplete_details": why, "output": output, "usage": None}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _opened(self, index: int, item: dict[str, Any]) -> bytes:
        """The events before an item's text."""
        begun = item | {"status": "in_progress"} | ({"arguments": ""} if "arguments" in item else {"content": []})
        added = self._event("response.output_item.added", output_index=index, item=begun)
        if "arguments" in item:
            return added
        part = item["content"][0] | {"text": ""}
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        return added + self._event("response.content_part.added", **where, part=part)

    def _delta(self, index: int, item: dict[str, Any], text: str | None = None) -> bytes:
        """The event of an item's text, or of a part of it."""
        where = {"item_id": item["id"], "output_index": index}
        if "arguments" in item:
            return self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
        text = item["content"][0]["text"] if text is None else text
        if not text:
            return b""
        kind, more = _STREAMED[item["content"][0]["type"]]
        return self._event(f"response.{kind}.delta", **where, content_index=0, delta=text, **more)

    def _closed(self, index: int, item: dict[str, Any]) -> bytes:
        """The events after an item's text."""
        where = {"item_id": item["id"], "output_index": index}
        if "arguments" in item:
            done = self._event(
                "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
            )
        else:
            part = item["content"][0]
            kind, more = _STREAMED[part["type"]]
            if "logprobs" in part:
                more = {"logprobs": part["logprobs"]}
            done = self._event(f"response.{kind}.done", **where, content_index=0, text=part["text"], **more)
            done += self._event("response.content_part.done", **where, content_index=0, part=part)
        return done + self._event("response.output_item.done", output_index=index, item=item)


# The events of a part's text, and what they have besides it.
_STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "output_text": ("output_text", {"logprobs": []}),
    "reasoning_text": ("reasoning_text", {}),
}


def _functions(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions of a tool. The model sees those of a namespace as `namespace.name`."""
    if tool.get("type") != "namespace":
        return [tool]
    inner = tool.get("tools")
    if not isinstance(inner, list) or not all(isinstance(function, dict) for function in inner):
        raise DataError(f"the namespace {tool.get('name')!r:.80} must have a list of functions as its tools")
    return [function | {"name": f"{tool.get('name')}.{function.get('name')}"} for function in inner]


def _output(answer: Answer, namespaces: bool) -> Iterator[dict[str, Any]]:
    if answer.reasoning:
        part = {"type": "reasoning_text", "text": answer.reasoning}
        yield {"id": f"rs_{secrets.token_hex(16)}", "type": "reasoning", "summary": [], "content": [part]}
    if answer.content or not answer.calls:
        yield _message(answer.content, answer.logprobs)
    for call in answer.calls:
        namespace, _, name = call.name.rpartition(".") if namespaces else ("", "", call.name)
        yield {
            "id": f"fc_{secrets.token_hex(16)}",
            "type": "function_call",
            "call_id": call.id,
            "name": name,
            "arguments": call.raw_arguments,
            "status": "completed",
        } | ({"namespace": namespace} if namespace else {})


def _message(text: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    head = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "status": "completed"}
    return head | {"content": [part]}


def _grouped(items: Iterable[Item], kept: Kept) -> Iterator[Group]:
    """Items in groups of one message each, with those that references name in their places.

    Raises RequestError for an item that lacks a field, and for a reference to nothing that is kept.
    """
    group: list[Item] = []
    for number, item in enumerate(items):
        for name in _NEEDED[item.type]:
            if getattr(item, name) is None:
                raise RequestError(400, f"input[{number}] of the type {item.type} needs {name}", param="input")
        if item.type == "item_reference":
            named = kept.items.get(str(item.id))
            if named is None:
                raise RequestError(
                    400,
                    f"input[{number}] refers to {item.id!r:.80}, which is no item of a response of this session that "
                    f"was stored; send the item itself",
                    param="input",
                )
            item = named
        answers = item.type in _PLACES and item.role in (None, "assistant")
        if group and not (answers and _continues(group[-1], item)):
            yield tuple(group)
            group = []
        group.append(item)
        if not answers:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)


def _continues(item: Item, following: Item) -> bool:
    """Whether two items of a model are of one answer, which may have several calls."""
    place, after = _PLACES[item.type], _PLACES[following.type]
    return place < after or (place == after != _PLACES["message"])


def _read(group: Group) -> tuple[Mapping[str, Any]]:
    first = group[0]
    if first.type == "function_call_output":
        return ({"role": "tool", "content": _text(first.output), "tool_call_id": first.call_id},)
    if first.type == "message" and first.role != "assistant":
        return ({"role": first.role, "content": _text(first.content)},)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in group:
        match item.type:
            case "reasoning":
                # An agent may send the text back or not.
                thoughts = _text(item.content) or _text(item.summary)
                message["reasoning_content"] = message.get("reasoning_content", "") + thoughts
            case "message":
                message["content"] = _text(item.content)
            case _:
                name = f"{item.namespace}.{item.name}" if item.namespace else item.name
                call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
                message.setdefault("tool_calls", []).append(call)
    return (message,)


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal or "" for part in content)
