"""The one form of a request that all dialects share, and how bodies are read and checked.

A dialect is an `Exchange`: it reads a body into a `Request`, and writes the `Answer` in its own form.

Invariant: a parameter that would change the answer and is not supported is refused by name. The types of the bodies
refuse unknown parameters; `check_neutral` refuses unsupported values of known ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import orjson

from megasync.concurrency.first_use import prepared
from megasync.data.messages import as_tool_schema
from megasync.errors import DataError
from megasync.gateway.answer import Answer
from megasync.gateway.errors import RequestError

T = TypeVar("T")

# Numbers that JSON encoders and servers can hold.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]

# Supported values of parameters besides null, and the reason why others are refused.
Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
PENALTY = "the trainer does not model penalties"


@prepared
class Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what a request consists of: unknown fields are refused."""


class Sampling(NamedTuple):
    """The sampling options of a request. `chosen` has its temperature, top_p and seed, without those left out."""

    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    chosen: Mapping[str, Any] = MappingProxyType({})

    def options(self, longest: int, chooses: bool) -> dict[str, Any]:
        """The options for the client, of at most `longest` new tokens. `chosen` applies if the request `chooses`."""
        options: dict[str, Any] = dict(self.chosen) if chooses else {}
        if self.max_new_tokens is not None:
            options["max_new_tokens"] = min(self.max_new_tokens, longest)
        if self.stop:
            options["stop"] = list(self.stop)
        if self.stop_token_ids:
            options["stop_token_ids"] = list(self.stop_token_ids)
        return options


class Request(NamedTuple):
    """A chat request in the common form.

    `sent` are the parts of the conversation as the dialect has them, which can be compared: equal ones of an earlier
    request take their place. `read` turns one of them into messages, as `data/messages.py` reads them. `tools` are
    those that the model sees; it must call one of `must_call`, if there are any. With `single_call`, the agent sees the
    first call of an answer only. `without_effect` names parameters that are ignored, but reported.
    """

    sent: list[Any]
    read: Callable[[Any], Iterable[Mapping[str, Any]]]
    tools: Sequence[dict[str, Any]] = ()
    must_call: Sequence[str] = ()
    sampling: Sampling = Sampling()
    stream: bool = False
    logprobs: bool = False
    single_call: bool = False
    without_effect: Sequence[str] = ()


@prepared
class Named(msgspec.Struct):
    """A function that a request allows."""

    name: str = ""


@prepared
class AllowedTool(Named):
    """A tool that a request allows: a function, bare or under its key."""

    function: Named | None = None


@prepared
class Allowed(msgspec.Struct):
    """The tools that a request allows."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] = []


@prepared
class AllowedTools(Allowed, kw_only=True, tag_field="type", tag="allowed_tools"):
    """OpenAI's `tool_choice` of some tools, in the form of Responses or, with a level more, of chat completions."""

    allowed_tools: Allowed | None = None


@prepared
class OneTool(AllowedTool, kw_only=True, tag_field="type", tag="function"):
    """OpenAI's `tool_choice` of one function, in the form of Responses or, under its key, of chat completions."""


NO_TOOLS = msgspec.Raw()


class Kept:
    """State that the requests of a session share: what later ones may name, and the latest tools."""

    def __init__(self) -> None:
        # Conversations by the ids of their last responses, and the items of responses by their own ids.
        self.responses: dict[str, list[Any]] = {}
        self.items: dict[str, Any] = {}
        self._tools: tuple[Any, bytes, list[dict[str, Any]]] = (None, b"", [])

    def tools(
        self,
        raw: msgspec.Raw,
        kind: Any = list[dict[str, Any]],
        functions: Callable[[Any], Iterable[Mapping[str, Any]]] = lambda tool: (tool,),
    ) -> list[dict[str, Any]]:
        """The schemas of a request's tools: JSON of this kind, of which each is turned into `functions` of OpenAI.

        Most requests repeat the tools of the one before, which are not read again. Raises RequestError that names the
        tool.
        """
        written = bytes(raw)
        if not written or written == b"null":
            return []
        if self._tools[:2] != (kind, written):
            tools = enumerate(decode_body(written, kind, "tools"))
            schemas = [schema for number, tool in tools for schema in _schemas(tool, number, functions)]
            self._tools = kind, written, schemas
        return self._tools[2]


class Exchange(Protocol):
    """A request of one dialect and its answer. The methods that stream return bytes of server-sent events.

    It is constructed as `Exchange(raw, model, kept)`, which raises RequestError.
    """

    request: Request

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one JSON object."""
        ...

    def begin(self) -> bytes:
        """The events before any text."""
        ...

    def text(self, piece: str) -> bytes:
        """The events of text that was sampled."""
        ...

    def end(self, answer: Answer) -> bytes:
        """The events that complete the answer, after the text so far."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """The event of an error in the middle of a stream, which the dialect's clients raise."""
        ...


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event with JSON data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def unsent(content: str, sent: str) -> str:
    """The rest of a content to stream after the part `sent`.

    Streamed text cannot be taken back. If the final content does not begin with it, no more content is sent, and the
    conversation forks when the agent continues from what it received.
    """
    return content[len(sent) :] if content.startswith(sent) else ""


def chosen(**values: Any) -> dict[str, Any]:
    """The values that a request sets, without those left out."""
    return {name: value for name, value in values.items() if value is not None}


def decode_body(raw: bytes, kind: type[T], name: str = "") -> T:
    """Decodes a body, or its parameter of this name. Raises RequestError (400) that names the parameter."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error).replace("`$", f"`$.{name}") if name else str(error)) from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deep", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


_MEDIA = re.compile(r"'\w*(image|audio|video|document|file)\w*'|`\w*(image|audio|video|file)\w*`")


def _invalid(problem: str) -> RequestError:
    """The refusal of a body that does not have the form of its type."""
    why = "; the gateway does not support it" if "unknown field" in problem else ""
    if _MEDIA.search(problem):
        why = "; only text is supported"
    match = re.search(r"field `(\w+)`", problem) or re.search(r"`\$\.([\w.\[\]]+)", problem)
    return RequestError(400, problem + why, param=match and match[1])


def check_neutral(body: Any, neutral: Neutral, within: str = "") -> None:
    """Refuses values that would change the answer. Raises RequestError (400) that names the parameter."""
    for name, (values, why) in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise unsupported(within + name, value, why)


def unsupported(name: str, value: Any, why: str) -> RequestError:
    return RequestError(400, f"{name}={value!r:.80} is not supported: {why}", code="unsupported_parameter", param=name)


def stops(stop: str | Sequence[str] | None, name: str = "stop") -> list[str]:
    """The stop texts of a request. Raises RequestError for an empty one."""
    texts = [stop] if isinstance(stop, str) else list(stop or ())
    if "" in texts:
        raise RequestError(400, f"{name} contains an empty text, which would end every answer immediately", param=name)
    return texts


def _schemas(
    tool: Any, number: int, functions: Callable[[Any], Iterable[Mapping[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """A tool in OpenAI's format. `strict` is dropped: it asks for constrained decoding, which is not supported."""
    name = f"tools[{number}]"
    try:
        for function in functions(tool):
            schema = as_tool_schema(function, number)["function"]
            schema = {"type": "function", "function": {key: value for key, value in schema.items() if key != "strict"}}
            # Servers, which parse the calls of an answer, read it as JSON.
            orjson.dumps(schema)
            yield schema
    except DataError as error:
        raise RequestError(400, str(error), param=name) from None
    except TypeError as error:
        raise RequestError(400, f"{name} cannot be sent to a server: {error}", param=name) from None
    except RequestError as error:
        raise RequestError(400, f"{name}.{error}", code=error.code, param=f"{name}.{error.param}") from None


def tool_choice(tools: list[dict[str, Any]], choice: Any) -> dict[str, Any]:
    """The fields `tools` and `must_call` of a request under OpenAI's `tool_choice`. Raises RequestError."""
    if choice in (None, "auto", "none", "required"):
        names, required = _names(tools), choice == "required"
        tools = [] if choice == "none" else tools
    else:
        try:
            found = msgspec.convert(choice, AllowedTools | OneTool)
        except msgspec.ValidationError:
            known = "auto, none, required, a function, or a list of allowed tools"
            raise unsupported("tool_choice", choice, f"it must be {known}") from None
        if isinstance(found, OneTool):
            names, required = [(found.function or found).name], True
        else:
            allowed = found.allowed_tools or found
            names, required = [(tool.function or tool).name for tool in allowed.tools], allowed.mode == "required"
            tools = [tool for tool in tools if tool["function"]["name"] in names]
    return {"tools": tools, "must_call": callable_names(tools, names) if required else ()}


def callable_names(tools: list[dict[str, Any]], names: Sequence[str] | None = None) -> Sequence[str]:
    """The names of tools of which one must be called, by default all. Raises RequestError for one without a tool."""
    known = _names(tools)
    names = known if names is None else names
    missing = [name for name in names if name not in known]
    if missing or not names:
        problem = f"{missing[0]!r}, which is not among the tools" if missing else "a tool, and there is none"
        raise RequestError(400, f"tool_choice demands a call of {problem}", param="tool_choice")
    return names


def _names(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]
