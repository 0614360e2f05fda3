"""The body of a chat completion request: which parameters are supported, refused or ignored.

Invariant: a parameter that would change the answer and is not supported is refused by name. `ChatBody` refuses unknown
parameters; `_check_neutral` refuses unsupported values of known ones.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.data.messages import as_tool_schema
from megasync.errors import DataError
from megasync.gateway.errors import RequestError

Count = Annotated[int, msgspec.Meta(ge=1)]
# A number that JSON encoders and servers can hold.
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


@prepared
class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


@prepared
class TextPart(_Strict):
    """A text part of a message's content."""

    text: str
    type: Literal["text"] = "text"


@prepared
class CalledFunction(_Strict):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str = ""


@prepared
class Call(_Strict):
    """A tool call in an assistant message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    # Sent back by agents that assemble streamed chunks.
    index: int | None = None


@prepared
class Message(_Strict):
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
class StreamOptions(_Strict):
    """The options of a streamed response."""

    # Asks for a final chunk with token counts.
    include_usage: bool | None = None
    # Accepted and ignored.
    include_obfuscation: bool | None = None


@prepared
class ChatBody(_Strict):
    """A chat completion request. Unknown fields are refused."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    # Any name is accepted, because there is only one model.
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    logprobs: bool | None = None
    # Accepted only with values that change nothing; see _NEUTRAL.
    n: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
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


# Supported values besides null, and the reason why others are refused.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "each request returns one answer; send several requests"),
    "tool_choice": (("auto", "none"), "the model decides which tools it calls"),
    "parallel_tool_calls": ((True,), "the model decides how many tools it calls"),
    "response_format": (({"type": "text"},), "answers are not constrained to a format"),
    "modalities": ((["text"],), "only text is supported"),
    "frequency_penalty": ((0,), "the trainer does not model penalties"),
    "presence_penalty": ((0,), "the trainer does not model penalties"),
    "logit_bias": (({},), "the trainer does not model biases"),
    "top_logprobs": ((0,), "only the sampled tokens' log-probs are kept"),
}


def parse_chat(raw: bytes) -> ChatBody:
    """Parses and validates a request body. Raises RequestError (400) that names the parameter."""
    try:
        body = msgspec.json.decode(raw, type=ChatBody)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"{error}{_unsupported(str(error))}", param=_parameter_in(str(error))) from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deep", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    _check_neutral(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options needs stream=true", param="stream_options")
    if "" in _stops(body):
        raise RequestError(400, "stop contains an empty text, which would end every answer immediately", param="stop")
    for number, tool in enumerate(body.tools or ()):
        try:
            as_tool_schema(tool, number)
        except DataError as error:
            raise RequestError(400, str(error), param=f"tools[{number}]") from None
    return body


def tool_schemas(body: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model sees. `strict` is dropped: it asks for constrained decoding, which is not supported."""
    if body.tool_choice == "none":
        return []
    return [
        {"type": "function", "function": {key: value for key, value in tool["function"].items() if key != "strict"}}
        for tool in body.tools or ()
    ]


def sampling_options(body: ChatBody, longest: int, chooses: bool) -> dict[str, Any]:
    """The request's sampling options for `client.chat`, limited to `longest` new tokens.

    The request's temperature, top_p and seed apply only with `chooses`.
    """
    options: dict[str, Any] = {}
    limits = [count for count in (body.max_completion_tokens, body.max_tokens) if count is not None]
    if limits:
        options["max_new_tokens"] = min(*limits, longest)
    if stops := _stops(body):
        options["stop"] = stops
    if chooses:
        chosen = {"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed}
        options |= {name: value for name, value in chosen.items() if value is not None}
    return options


def _stops(body: ChatBody) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or ())


def _check_neutral(body: ChatBody) -> None:
    for name, (values, why) in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise RequestError(
                400, f"{name}={value!r} is not supported: {why}", code="unsupported_parameter", param=name
            )


def _parameter_in(problem: str) -> str | None:
    """The parameter that a msgspec error message names."""
    match = re.search(r"field `(\w+)`", problem) or re.search(r"`\$\.([\w.\[\]]+)", problem)
    return match and match[1]


def _unsupported(problem: str) -> str:
    return "; the gateway does not support it" if "unknown field" in problem else ""
