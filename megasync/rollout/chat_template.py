"""A tokenizer's chat template: messages to text, text to token ids and back, and how it closes an answer.

Rendered text is guarded (`OutsideText`): special tokens' names in messages and tools are marked, so that only the
template's own are encoded as special tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.data.outside_text import OutsideText
from megasync.errors import DataError
from megasync.rollout.generation import Generation

log = logging.getLogger(__name__)


class ChatTemplate:
    """`tokenizer` is a Hugging Face tokenizer; `options` go to its template (`enable_thinking` and the like)."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        """Raises DataError without a tokenizer, or when it has no chat template."""
        if tokenizer is None:
            raise DataError("chat() needs a tokenizer, and this client has none; use generate() with token ids")
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', 'the model')!r} has no chat template; "
                f"use generate() with token ids, or data.prompt.format=raw"
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._special = set(tokenizer.all_special_ids)
        self._outside = OutsideText(tokenizer)
        self._shows_tools: bool | None = None

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, answer: bool) -> str:
        """The conversation as the model sees it, guarded; with `answer`, up to where the assistant begins.

        Raises DataError when the template refuses the messages.
        """
        if tools and self._shows_tools is None:
            self._shows_tools = self._render(messages, tools, answer) != self._render(messages, [], answer)
            if not self._shows_tools:
                log.warning("the chat template does not show tools to the model; describe them in the system message")
        return self._render(messages, tools, answer)

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], answer: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                self._outside.guard(list(messages)),
                tools=self._outside.guard(list(tools)) or None,
                add_generation_prompt=answer,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # templates are programs that raise what they like
            raise DataError(f"the chat template refused {len(messages)} messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The template writes its special tokens itself, so none is added."""
        return self._outside.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """With special tokens: tool calls and reasoning are marked by them."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def closing(self, generation: Generation) -> str:
        """The special token with which the model ended its answer; empty when it was cut, or ended by a stop text."""
        ids = generation.token_ids
        closed = generation.finish_reason == "stop" and ids and ids[-1] in self._special
        return self.decode(ids[-1:]) if closed else ""

    def closings(self, generation: Generation) -> list[str]:
        """What may end this answer in the template's text."""
        return [mark for mark in dict.fromkeys((self.closing(generation), self._tokenizer.eos_token)) if mark]

    def answer_text(self, generation: Generation) -> str:
        """What the model wrote, with special tokens but without the one that closes it."""
        return self.decode(generation.token_ids).removesuffix(self.closing(generation))
