"""One chat turn: builds the next prompt's tokens, generates, and parses the answer into a message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megasync.config.schema import ChatConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.messages import as_messages, as_tool_schema
from megasync.rollout.conversation import Conversation, Reply
from megasync.rollout.generation import Generation
from megasync.rollout.reply_formats import reasoning_format, tool_format
from megasync.rollout.reply_parser import ParsedAnswer, ReplyParser
from megasync.rollout.tools import Tool, as_tool
from megasync.trajectory.turns import Call

# A tool as callers pass it: a function, or a JSON schema in OpenAI's format.
ToolLike = Callable[..., Any] | Tool | dict[str, Any]


class AnswerTemplate(ChatTemplate):
    """A chat template, and the token with which an answer ends."""

    def unended(self, text: str) -> list[str]:
        """Return rendered text without the end that some templates write only behind the last message, if it has it."""
        end = self._tokenizer.eos_token
        return [text.removesuffix(end)] if end and text.endswith(end) else []

    def closing(self, generation: Generation) -> str:
        """Return the special token that ended the answer. Empty if it was truncated or ended by a stop string."""
        answered = len(generation.tokens) > len(generation.prompt)
        if generation.finish_reason != "stop" or not answered:
            return ""
        last = generation.tokens[-1]
        return self.decode([last]) if last in self._outside.special_ids or last == self.turn_end() else ""

    def closings(self, generation: Generation, *, calls: bool) -> list[tuple[str, bool]]:
        """Return the texts that may end this answer in the rendered conversation, and whether its tokens have them.

        `calls` is whether it is rendered with calls. Its tokens also stand for the template's end if the model ended
        the answer with another token. A template that writes no end of its own begins the next message with a special
        token.
        """
        closing = self.closing(generation)
        last, between = self._after_answer(calls=calls)
        # What ends an answer that is not the last message: the last of these, after which a message begins. The first
        # ones may be parts of a call.
        ends = [a for a, b in zip(last, between, strict=False) if a == b] or (between[:1] if last else [])
        end = ends[-1:] if closing or calls else ends[:1]
        marks = {closing: True} if closing else {}
        if not (closing and generation.tokens[-1] in ends):
            marks |= {self.decode(end): bool(closing)} if end else {}
        marks |= {eos: bool(closing)} if (eos := self._tokenizer.eos_token) else {}
        starts = [] if last else self._tokenizer.all_special_tokens
        return list({**dict.fromkeys(starts, False), **marks}.items())

    def answer_text(self, generation: Generation) -> str:
        """Return what the model wrote, with special tokens but without the one that closes the answer."""
        return self.decode(generation.token_ids).removesuffix(self.closing(generation))


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
        **options: Any,
    ) -> Reply:
        """Generate the assistant's turn and record it in the conversation. `options` are passed to `generate`."""
        schemas = [
            as_tool_schema(tool, number) if isinstance(tool, dict) else as_tool(tool).schema
            for number, tool in enumerate(tools)
        ]
        calls_as = tool_format(self._config.tool_format, self._source) if schemas else None
        messages = as_messages(messages)
        prompt = conversation.prompt(self._template, messages, schemas, realign_rewritten=self._realign)
        generation = conversation.record(await generate(prompt.ids, **options))
        called = sum(len(message.get("tool_calls", ())) for message in messages)
        parsed = await self._parsed(generation, schemas, calls_as, called)
        (message,) = as_messages([_message(parsed)])
        generation.added = prompt.added
        generation.calls = tuple(Call(call.name, call.raw_arguments) for call in parsed.calls)
        conversation.answered(self._template, prompt, generation, message)
        return Reply([*prompt.messages, message], generation, conversation, list(parsed.calls), parsed.malformed)

    async def _parsed(
        self, generation: Generation, schemas: Sequence[dict[str, Any]], calls_as: str | None, called: int
    ) -> ParsedAnswer:
        if calls_as is None and self._reasoning is None:
            return ParsedAnswer(generation.text)
        text = self._template.answer_text(generation)
        return await self._parser.parse(text, schemas, calls_as, self._reasoning, called=called)


def _message(parsed: ParsedAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [call.message() for call in parsed.calls]
    return message
