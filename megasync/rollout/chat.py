"""One chat turn: builds the next prompt's tokens, generates, and parses the answer into a message."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megasync.config.schema import ChatConfig
from megasync.data.messages import as_messages, as_tool_schema
from megasync.errors import DataError
from megasync.rollout.conversation import AnswerTemplate, Conversation, Generation, Reply
from megasync.rollout.reply_parser import ParsedAnswer, ReplyParser, call_id, reasoning_format, tool_format
from megasync.rollout.tools import Tool, as_tool
from megasync.trajectory import Call

# A tool as callers pass it: a function, or a JSON schema in OpenAI's format.
ToolLike = Callable[..., Any] | Tool | dict[str, Any]


class Chat:
    """Chat with one tokenizer and parser. Raises DataError without a tokenizer or if it has no chat template."""

    def __init__(self, tokenizer: Any, config: ChatConfig, parser: ReplyParser) -> None:
        self._template = AnswerTemplate(tokenizer, config.template_options)
        self._source = str(tokenizer.chat_template)
        self._config = config
        self._parser = parser
        self._realign = config.rewritten_turns == "realign"
        self._reasoning = reasoning_format(config.reasoning_format, self._source, self._template.render)

    @property
    def sets_reasoning_apart(self) -> bool:
        return self._reasoning is not None

    async def answer(
        self,
        generate: Callable[..., Awaitable[Generation]],
        conversation: Conversation,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[ToolLike],
        must_call: Sequence[str] = (),
        **options: Any,
    ) -> Reply:
        """Generate the assistant's turn and record it in the conversation. `options` are passed to `generate`.

        With `must_call`, the prompt ends with the beginning of a call of one of these tools, which is thus not trained.
        """
        schemas = _schemas(tools)
        calls_as = tool_format(self._config.tool_format, self._source) if schemas else None
        messages = as_messages(messages)
        prompt = conversation.prompt(self._template, messages, schemas, realign_rewritten=self._realign)
        called = 0 if calls_as is None else sum(len(message.get("tool_calls", ())) for message in messages)
        begun = ""
        if must_call:
            known = [schema["function"]["name"] for schema in schemas]
            if missing := [name for name in must_call if name not in known]:
                raise DataError(
                    f"must_call={missing[0]!r} is none of the tools: {', '.join(known) or 'there are none'}"
                )
            ids = {name: call_id(calls_as or "", name, called) for name in must_call}
            begin = self._template.call_begin(ids, schemas)
            begun = self._template.decode(begin)
            prompt = prompt.begun(begin, begun)
        generation = conversation.record(await generate(prompt.ids, **options))
        parsed = await self._parsed(generation, begun, schemas, calls_as, called)
        (message,) = as_messages([_message(parsed)])
        generation.added = prompt.added
        generation.calls = tuple(Call(call.name, call.raw_arguments) for call in parsed.calls)
        messages = conversation.answered(self._template, prompt, generation, message)
        return Reply(messages, generation, conversation, list(parsed.calls), parsed.malformed)

    def count(self, conversation: Conversation, messages: Sequence[dict[str, Any]], tools: Sequence[ToolLike]) -> int:
        """The number of tokens of the prompt that `answer` would generate from. The conversation stays as it is."""
        prompt = copy.copy(conversation).prompt(
            self._template, as_messages(messages), _schemas(tools), realign_rewritten=self._realign
        )
        return len(prompt.ids)

    async def _parsed(
        self, generation: Generation, begun: str, schemas: Sequence[dict[str, Any]], calls_as: str | None, called: int
    ) -> ParsedAnswer:
        if calls_as is None and self._reasoning is None:
            return ParsedAnswer(generation.text)
        text = begun + self._template.answer_text(generation)
        return await self._parser.parse(text, schemas, calls_as, self._reasoning, called=called)


def _schemas(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    return [
        as_tool_schema(tool, number) if isinstance(tool, dict) else as_tool(tool).schema
        for number, tool in enumerate(tools)
    ]


def _message(parsed: ParsedAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [call.message() for call in parsed.calls]
    return message
