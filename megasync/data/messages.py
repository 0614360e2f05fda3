"""Chat messages and tools in one form: datasets, supervised rows, workflows and the gateway share it.

A message of this form is a new dict with text values that are valid Unicode:

    role               as given; names of other libraries become system, user, assistant or tool: "developer", "human"
    content            text, possibly empty; parts of text are joined
    reasoning_content  what a model thought before it wrote the content; left out if empty
    tool_calls         [{"id", "type": "function", "function": {"name", "arguments"}}]; left out if empty
    tool_call_id       the call that a tool's result belongs to
    name, and others   as given, without keys that are null

`arguments` is an object where the given text is a JSON object, and otherwise that text: a model writes what it writes.
Invariant: `as_messages` of its own result is an equal list, so messages may pass it several times. What has no such
form, such as an image, is a DataError that names the message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megasync.errors import DataError, raised_as

Message = dict[str, Any]

ASSISTANT = "assistant"
# Names by which datasets and APIs call a role that chat templates know under another one.
_ROLES = {
    role: known
    for known, names in (
        ("system", "system developer"),
        ("user", "user human"),
        (ASSISTANT, "assistant gpt chatgpt ai bot model"),
        ("tool", "tool function observation ipython tool_response tool_results function_response"),
    )
    for role in names.split()
}
# The keys of ShareGPT's messages.
_KEYS = {"from": "role", "value": "content"}
# The keys of a call's arguments, and of a tool's parameters.
_ARGUMENTS = ("arguments", "parameters", "input", "args")
_PARAMETERS = ("input_schema", "inputSchema")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"thinking", "reasoning"})
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Keys of a message that hold what a language model cannot read.
_MEDIA = frozenset({"image", "images", "audio", "audios", "video", "videos"})
_READ = frozenset({"role", "content", "refusal", "tool_calls", "function_call", "tool_call_id", *_REASONING, *_MEDIA})
# The depth of arguments and schemas. Templates and parsers recurse, and Python's stack is limited.
_DEPTH = 64


class ReadMessages(list[Message]):
    """Messages that `as_messages` has read, which it does not read again. Nothing else may be added to them."""


def as_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages in the form of this module. The given ones are not changed. Raises DataError."""
    if isinstance(messages, ReadMessages):
        return messages
    messages = messages.tolist() if hasattr(messages, "tolist") else messages  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise DataError(f"chat messages must be a list, got {messages!r:.80}")
    # Arrow gives all messages of a column the same keys, with null for those that a message does not have; the same
    # holds for the arguments of its calls. Elsewhere null is a value that somebody wrote.
    from_arrow = len(messages) > 1 and all(isinstance(m, Mapping) and m.keys() == messages[0].keys() for m in messages)
    read: list[Message] = []
    for number, written in enumerate(messages):
        add_message(read, as_message(written, number, from_arrow=from_arrow))
    return read


def add_message(messages: list[Message], message: Message) -> None:
    """Appends a message that was read. A result that names no call is that of the first one without a result."""
    if message["role"] == "tool" and "tool_call_id" not in message:
        message["tool_call_id"] = _open_call(messages)
    messages.append(message)


def _open_call(messages: Sequence[Message]) -> str:
    """The id of the first of the latest calls that has no result yet, or an id of its own."""
    answered = set[Any]()
    for message in reversed(messages):
        if "tool_calls" in message:
            open_calls = [call["id"] for call in message["tool_calls"] if call["id"] not in answered]
            return open_calls[0] if open_calls else f"call_{len(messages)}"
        answered.add(message.get("tool_call_id"))
    return f"call_{len(messages)}"


def as_message(message: Any, number: int, *, from_arrow: bool = False) -> Message:
    """The message with this number in its conversation. With `from_arrow`, null in a call's arguments means nothing.

    Raises DataError.
    """
    try:
        return _message(message, number, from_arrow)
    except DataError as error:
        raise DataError(f"message {number}: {error}") from None
    except RecursionError:
        raise DataError(f"message {number} is nested too deep") from None


def as_tools(tools: Any) -> list[dict[str, Any]]:
    """Tool schemas from a column of a dataset: a list, the JSON text of one, or null. Raises DataError.

    Keys that are null at any depth are left out of a list, because Arrow adds them.
    """
    if tools is None or tools == "":
        return []
    written = isinstance(tools, str)
    if written:
        try:
            tools = _parsed(tools)
        except ValueError as error:
            raise DataError(f"tools are text that is not JSON ({error}): {tools!r:.80}") from None
    tools = [tools] if isinstance(tools, Mapping) else tools.tolist() if hasattr(tools, "tolist") else tools
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise DataError(f"tools must be a list of functions, got {tools!r:.80}")
    return [as_tool_schema(tool, number, drop_null=not written) for number, tool in enumerate(tools)]


def as_tool_schema(written: Any, number: int, *, drop_null: bool = False) -> dict[str, Any]:
    """A tool in OpenAI's format; a bare function is wrapped. Raises DataError that names the tool's number."""
    if isinstance(written, str):
        try:
            written = _parsed(written)
        except ValueError:
            raise DataError(f"tools[{number}] must be a function with a name, got {written!r:.80}") from None
    try:
        tool = plain_value(written, drop_null=drop_null)
    except DataError as error:
        raise DataError(f"tools[{number}] {error}") from None
    if isinstance(tool, dict) and "function" not in tool and "name" in tool and tool.get("type", "function") in _BARE:
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise DataError(f"tools[{number}] must be a function with a name, got {written!r:.80}")
    # Anthropic's name, and MCP's, of what templates read as parameters.
    schema = next((function[key] for key in _PARAMETERS if key in function), None)
    if schema is not None and "parameters" not in function:
        kept = {key: value for key, value in function.items() if key not in _PARAMETERS}
        tool = tool | {"function": kept | {"parameters": schema}}
    return {"type": "function"} | tool


# The types of a tool whose name and parameters are not under "function".
_BARE = ("function", "object")


def parse_arguments(text: str) -> dict[str, Any] | str:
    """The object that a call's arguments spell in JSON; text that spells no usable object is returned as it is."""
    value: Any = text
    # Some datasets hold the JSON text of a JSON text.
    for _ in range(2):
        try:
            value = plain_value(_parsed(value))
        except (ValueError, DataError):
            break
        if not isinstance(value, str):
            break
    return value if isinstance(value, dict) else valid_text(text)


def valid_text(text: str) -> str:
    """The text with pairs of surrogates joined to their characters, and U+FFFD for each lone surrogate."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def plain_value(value: Any, *, drop_null: bool = False, depth: int = _DEPTH) -> Any:
    """A copy of a JSON value with valid text; `drop_null` leaves out keys that are null. Raises DataError."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"has the number {value}, which JSON does not know")
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth == 0:
        raise DataError(f"is nested more than {_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {
            valid_text(str(key)): plain_value(item, drop_null=drop_null, depth=depth - 1)
            for key, item in value.items()
            if not (drop_null and item is None)
        }
    if isinstance(value, list | tuple):
        return [plain_value(item, drop_null=drop_null, depth=depth - 1) for item in value]
    raise DataError(f"has the {type(value).__name__} {value!r:.80}, which JSON does not know")


def _parsed(text: str) -> Any:
    """Raises ValueError for anything but strict JSON that Python can hold."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _message(values: Any, number: int, from_arrow: bool) -> Message:
    if not isinstance(values, Mapping):
        raise DataError(f"must have a role and a content, got {values!r:.80}")
    if "role" not in values and "from" in values:
        values = {_KEYS.get(key, key): value for key, value in values.items()}
    role = values.get("role")
    if role == "function_call":
        values = {"role": ASSISTANT, "tool_calls": values.get("content")}
        role = ASSISTANT
    if not isinstance(role, str) or not role:
        raise DataError(
            f"has the role {role!r:.80}; it must be text, such as user; its keys are {sorted(map(str, values))}"
        )
    role = _ROLES.get(role.lower(), valid_text(role))
    for key in _MEDIA & values.keys():
        if values[key]:
            raise DataError(f"has {key}, but only text is supported")
    calls = list(_calls(values, number, from_arrow))
    thoughts = [text for key in _REASONING if values.get(key) and (text := _content(values[key], ASSISTANT, []))][:1]
    content = _content(values.get("content"), role, thoughts)
    if not content and isinstance(refusal := values.get("refusal"), str):
        content = valid_text(refusal)
    if content is None:
        if role not in (ASSISTANT, "tool"):
            raise DataError(f"has no content, which a message of the role {role!r} needs")
        content = ""
    message: Message = {"role": role, "content": content}
    if reasoning := "".join(thoughts):
        message["reasoning_content"] = valid_text(reasoning)
    if calls:
        message["tool_calls"] = calls
    if (call_id := values.get("tool_call_id")) not in (None, ""):
        message["tool_call_id"] = valid_text(str(call_id))
    for key, value in values.items():
        if key in _READ or value is None:
            continue
        try:
            # Only templates read these. A value such as a date is none of JSON's, and stays as it is.
            nested = isinstance(value, str | Mapping | list | tuple)
            message[valid_text(str(key))] = plain_value(value, drop_null=from_arrow) if nested else value
        except DataError as error:
            raise DataError(f"{key!r:.80} {error}") from None
    return message


def _content(content: Any, role: str, thoughts: list[str]) -> str | None:
    """The text of a content; None for null. Appends reasoning that stands among its parts to `thoughts`."""
    if content is None or isinstance(content, str):
        return content and valid_text(content)
    parts: Any = content if isinstance(content, Sequence) and not isinstance(content, bytes) else ()
    if content is parts and all(isinstance(part, str) or (isinstance(part, Mapping) and _kind(part)) for part in parts):
        return valid_text("".join(_part(part, thoughts) for part in parts))
    if role == "tool":
        # A result that is data, as tools return it.
        return json.dumps(plain_value(content), ensure_ascii=False)
    raise DataError(f"has a content that is neither text nor a list of parts: {content!r:.80}")


def _kind(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    if kind is None and isinstance(part.get("text"), str):
        return "text"
    return kind if isinstance(kind, str) else None


def _part(part: str | Mapping[str, Any], thoughts: list[str]) -> str:
    if isinstance(part, str):
        return part
    kind = _kind(part)
    if kind in _TEXT_PARTS:
        text = part["text"] if "text" in part else part.get("content", 0)
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"has a part whose text is {text!r:.80}" if text else f"has a part without a text: {part!r:.80}"
            )
        return text or ""
    if kind == "refusal" and isinstance(text := part.get("refusal"), str):
        return text
    if kind in _REASONING_PARTS:
        text = part.get(kind) or part.get("text") or ""
        thoughts.append(_content(text, ASSISTANT, []) or "")
        return ""
    raise DataError(f"has a part of the type {kind!r:.80}, but only text is supported")


def _calls(message: Mapping[str, Any], number: int, from_arrow: bool) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        # OpenAI's older form, of a single call.
        calls = [{"function": message["function_call"]}]
    if not calls:
        return
    if isinstance(calls, str):
        with raised_as(DataError, "has tool_calls that are text, but not JSON", of=ValueError):
            calls = _parsed(calls)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise DataError(f"has tool_calls that are no list: {calls!r:.80}")
    for place, call in enumerate(calls):
        where = f"tool_calls[{place}]"
        # Some datasets leave out the level of "function".
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
            raise DataError(f"{where} must have a function with a name, got {call!r:.80}")
        arguments = next((function[key] for key in _ARGUMENTS if key in function), None)
        if isinstance(arguments, str):
            arguments = parse_arguments(arguments) if arguments.strip() else {}
        elif arguments is None or isinstance(arguments, Mapping):
            try:
                arguments = plain_value(arguments or {}, drop_null=from_arrow)
            except DataError as error:
                raise DataError(f"{where}.function.arguments {error}") from None
        else:
            raise DataError(f"{where}.function.arguments must be an object or its JSON text, got {arguments!r:.80}")
        call_id = call.get("id")
        yield {
            "id": f"call_{number}_{place}" if call_id in (None, "") else valid_text(str(call_id)),
            "type": "function",
            "function": {"name": valid_text(name), "arguments": arguments},
        }
