"""A tokenizer's chat template: the one place where it is called, and what was found out about it.

Messages come in the form of `data/messages.py`. Templates want the same things in different forms, which `render` finds
by trying: a call's arguments as an object or as text, null for the missing content of a message with calls, ids of nine
letters, reasoning under another key. Rendered text is guarded (`OutsideText`): names of special tokens in messages and
tools are marked, so that only the template's own special tokens are encoded as such. Messages are guarded by the
caller, once each.

Invariant: whatever a template raises is a TemplateRefused, a DataError that says what the template refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from megasync.concurrency.foreign import explain, invoke
from megasync.data.messages import ASSISTANT, Message
from megasync.data.outside_text import OutsideText
from megasync.data.tokenizer import TextCodec
from megasync.errors import DataError, TemplateRefused

log = logging.getLogger(__name__)

T = TypeVar("T")

# How a template marks what the assistant writes.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Words that are looked for in rendered text. Letters and digits, which templates do not escape.
_WORD, _KEY, _NEXT = "probeW7Q3V", "probeK7Q3V", "probeX7Q3V"
_ASKED: Message = {"role": "user", "content": "q"}
_ID = "call_0"
_CALL = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": {_KEY: _WORD}}}
_CALLING: Message = {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]}
_RESULT: Message = {"role": "tool", "tool_call_id": _ID, "content": _NEXT}
# Each takes some renderings per tool to find.
_BEGINS_KEPT = 256
# A message that has nothing else has one form in all templates.
_ONE_FORM = frozenset({"role", "content"})
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class _Form:
    """The form in which a template takes messages with calls, and their results."""

    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False

    def of(self, message: Message) -> Message:
        changed = dict(message)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = [self._call(call) for call in calls]
            if self.null_content and not message["content"]:
                changed["content"] = None
        if self.short_ids and "tool_call_id" in message:
            changed["tool_call_id"] = _short(message["tool_call_id"])
        return changed

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.arguments_as_text and not isinstance(function["arguments"], str):
            function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return call | {"function": function} | ({"id": _short(call["id"])} if self.short_ids else {})


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer.

    `options` are passed to the template, such as `enable_thinking`.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        """Raises DataError without a tokenizer or if it has no chat template."""
        if tokenizer is None:
            raise DataError("chat() needs a tokenizer, and this client has none; use generate() with token ids")
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; use generate() with "
                f"token ids, data.prompt.format=raw, or a model with a chat template"
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._outside = OutsideText(tokenizer)
        self._codec = TextCodec(tokenizer)
        self._shows_tools: bool | None = None
        # What was found out about answers with and without calls, and about prompts with and without tools.
        self._ends: dict[bool, tuple[list[int], list[int]]] = {}
        self._forms: dict[bool, _Form] = {}
        # How demanded calls begin, by the calls and whether there are tools. The latest ones: agents choose the names.
        self._begins: OrderedDict[tuple[Any, ...], list[int]] = OrderedDict()
        _flatten_globals(tokenizer)

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks what the assistant writes with `{% generation %}`."""
        return bool(_GENERATION.search(str(self._tokenizer.chat_template)))

    def guard(self, message: T) -> T:
        """Mark the names of special tokens in a message or a list. Returns the value itself if it has none."""
        return self._outside.guard(message)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, answer: bool) -> str:
        """Render guarded messages as guarded text. With `answer`, append the prompt for the assistant's turn.

        Raises TemplateRefused if the template rejects the messages.
        """
        if tools and self._shows_tools is None:
            self._shows_tools = self._render(messages, tools, answer) != self._render(messages, [], answer)
            if not self._shows_tools:
                log.warning("The chat template does not show tools to the model; describe them in the system message")
        return self._render(messages, tools, answer)

    def check_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """Warns if the template does not show tools. Raises TemplateRefused if it cannot write the result of a call."""
        self.render([_ASKED], tools, answer=True)
        if _NEXT not in self._render([_ASKED, _CALLING, _RESULT], tools, True):
            raise TemplateRefused("the chat template leaves out the results of calls")

    def call_begin(self, calls: Mapping[str, str], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The tokens, after the prompt for an answer, with which a call begins whichever of these tools it calls.

        `calls` has the id of a call by the name of its tool. The tokens are what calls of each tool with several
        arguments have in common, up to the first token that differs. Raises TemplateRefused if there are none.
        """
        key = *calls.items(), bool(tools)
        if key not in self._begins:
            # Which tools a template lists does not change how it writes a call.
            self._begins[key] = self._found_begin(calls, tools[:1])
            if len(self._begins) > _BEGINS_KEPT:
                self._begins.popitem(last=False)
        return self._begins[key]

    def _found_begin(self, calls: Mapping[str, str], tools: Sequence[dict[str, Any]]) -> list[int]:
        names = [*calls]
        asked = self._render([_ASKED], tools, True)
        written: list[list[int]] = []
        for name, arguments in [(names[0], {_KEY: _WORD}), (names[0], {_NEXT: 1}), *((name, {}) for name in names)]:
            call = {"id": calls[name], "type": "function", "function": {"name": name, "arguments": arguments}}
            text = self._render([_ASKED, self.guard({**_CALLING, "tool_calls": [call]})], tools, False)
            if not text.startswith(asked) or name not in text[len(asked) :]:
                raise TemplateRefused("a call cannot be demanded: the chat template begins no answer with one")
            written.append(self.encode(text[len(asked) :]))
        begin = [same[0] for same in itertools.takewhile(lambda ids: len({*ids}) == 1, zip(*written, strict=False))]
        if not begin:
            raise TemplateRefused(f"a call cannot be demanded: those of {', '.join(names)} begin with different tokens")
        return begin

    def marked(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
        """Pieces of the guarded text of guarded messages, and whether the template marks them as the assistant's.

        They alternate, and the first and the last are not marked. Any of them may be empty. Raises TemplateRefused.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer, shown = self._tokenizer, self._outside.guard(list(tools)) or None

        def call() -> Any:
            return render_jinja_template(
                conversations=[self._formed(messages, tools)],
                tools=shown,
                chat_template=tokenizer.get_chat_template(tools=shown),
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **{**tokenizer.special_tokens_map, **self._options},
            )

        (text,), (spans,) = _called(call, len(messages))
        pieces: list[tuple[str, bool]] = []
        at = 0
        for start, end in spans:
            pieces += [(text[at:start], False), (text[start:end], True)]
            at = end
        return [*pieces, (text[at:], False)]

    def encode(self, text: str) -> list[int]:
        """Encode rendered text. No special token is added, because the template writes its own."""
        return self._outside.encode(text)

    def starts(self, text: str) -> list[int] | None:
        """Return where each token of rendered text begins, in characters. None if unknown."""
        return self._outside.starts(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the ids, special tokens included, because they delimit tool calls and reasoning."""
        return self._codec.decode(ids)

    # What begins and ends a turn

    @cached_property
    def header(self) -> str:
        """The text that the template ends a prompt with to ask for an answer; empty if it cannot be told."""
        try:
            asked, plain = (self._render([_ASKED], [], answer) for answer in (True, False))
        except TemplateRefused:
            return ""
        return asked[len(plain) :] if asked.startswith(plain) else ""

    def turn_end(self, stops: Collection[int] = ()) -> int | None:
        """The token with which the template ends an answer; None if it writes no special token there.

        That is the first special token after the text of a last answer, unless one of `stops` comes before the next
        message: then it is that, which may be the first token of the next message.
        """
        last, between = self._after_answer(calls=False)
        if last and last[0] in stops:
            return last[0]
        return next((token for token in between if token in stops), (last + between or [None])[0])

    def next_turn_end(self, stops: Collection[int], *, calls: bool) -> int | None:
        """The stop token with which the message after an answer begins, for templates that end no answer themselves.

        With `calls`, the message is the result of a call.
        """
        return next((token for token in self._after_answer(calls=calls)[1] if token in stops), None)

    def _after_answer(self, *, calls: bool) -> tuple[list[int], list[int]]:
        """The special tokens after a last answer, and those between an answer and the text of the next message.

        With `calls`, the answer is a call, and the next message is its result.
        """
        if calls not in self._ends:
            answer: Message = {"role": ASSISTANT, "content": _WORD}
            following: Message = _ASKED | {"content": _NEXT}
            if calls:
                answer, following = _CALLING, _RESULT
            ends: list[list[int]] = []
            for messages in ([_ASKED, answer], [_ASKED, answer, following]):
                try:
                    text = self._render(messages, [], False)
                except TemplateRefused:
                    text = ""
                shown, _, after = text.rpartition(_WORD)
                after = after.partition(_NEXT)[0] if shown else ""
                ends.append([token for token in self.encode(after) if token in self._own_tokens])
            # A template that writes no calls ends such an answer as any other.
            self._ends[calls] = (ends[0], ends[1]) if any(ends) or not calls else self._after_answer(calls=False)
        return self._ends[calls]

    @cached_property
    def _own_tokens(self) -> frozenset[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        return frozenset({*self._tokenizer.all_special_ids, *added})

    # The form of messages

    def _calls_form(self, tools: Sequence[dict[str, Any]]) -> _Form:
        # Some tokenizers have another template for prompts with tools.
        if (form := self._forms.get(bool(tools))) is None:
            form = self._forms[bool(tools)] = self._found_form(tools)
        return form

    def _found_form(self, tools: Sequence[dict[str, Any]]) -> _Form:
        messages = [_ASKED, _CALLING, _RESULT]
        for short_ids, null_content, as_text in itertools.product((False, True), repeat=3):
            form = _Form(as_text, null_content, short_ids)
            try:
                text = self._call_template([form.of(message) for message in messages], tools, False)
            except TemplateRefused:
                continue
            # Neither Python's way to write an object, nor JSON in quotes.
            if _KEY in text and _WORD in text and not re.search(rf"'{_KEY}'|\\\"{_KEY}", text):
                return form
        # It does not write calls at all, or rejects them.
        return _Form()

    @cached_property
    def _reasoning_key(self) -> str:
        for key in ("reasoning_content", "thinking", "reasoning"):
            try:
                shown = self._call_template([_ASKED, {"role": ASSISTANT, "content": "a", key: _WORD}], [], False)
            except TemplateRefused:
                continue
            if _WORD in shown:
                return key
        return "reasoning_content"

    def _formed(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        return [message if message.keys() <= _ONE_FORM else self._formed_one(message, tools) for message in messages]

    def _formed_one(self, message: Message, tools: Sequence[dict[str, Any]]) -> Message:
        if "tool_calls" in message or "tool_call_id" in message:
            message = self._calls_form(tools).of(message)
        if "reasoning_content" in message and (key := self._reasoning_key) != "reasoning_content":
            message = dict(message)
            message[key] = message.pop("reasoning_content")
        return message

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], answer: bool) -> str:
        return self._call_template(self._formed(messages, tools), tools, answer)

    def _call_template(self, messages: list[Message], tools: Sequence[dict[str, Any]], answer: bool) -> str:
        return _called(
            lambda: self._tokenizer.apply_chat_template(
                messages,
                tools=self._outside.guard(list(tools)) or None,
                add_generation_prompt=answer,
                tokenize=False,
                **self._options,
            ),
            len(messages),
        )


def _called(call: Callable[[], T], messages: int) -> T:
    try:
        return invoke(call)
    except Exception as error:  # templates are programs that may raise anything
        problem = str(error) if type(error).__name__ == "TemplateError" else explain(error)
        raise TemplateRefused(f"the chat template rejected {messages} messages: {problem}") from error


def _short(call_id: str) -> str:
    """An id of nine letters and digits, the same for the same id."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _flatten_globals(tokenizer: Any) -> None:
    """Replaces the globals of the compiled template, a chain of dictionaries, by one dictionary.

    Jinja copies them for each rendering, and the copy of a chain takes longer than rendering a short conversation.
    """
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = _compile_jinja_template(tokenizer.get_chat_template())
        template.globals = dict(template.globals)
    except Exception as error:  # noqa: BLE001 - rendering works without it, or reports what is wrong
        log.debug("The chat template's globals remain a chain: %r", error)
