"""A tokenizer's chat template: renders messages, encodes and decodes text, and finds the token that closes an answer.

Rendered text is guarded (`OutsideText`): names of special tokens in messages and tools are marked, so that only the
template's own special tokens are encoded as such. Messages are guarded by the caller, once each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.concurrency.foreign import explain, invoke
from megasync.data.outside_text import OutsideText
from megasync.data.text_codec import TextCodec
from megasync.errors import DataError
from megasync.rollout.generation import Generation

log = logging.getLogger(__name__)


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
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', 'the model')!r} has no chat template; "
                f"use generate() with token ids, or data.prompt.format=raw"
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._special = set(tokenizer.all_special_ids)
        self._outside = OutsideText(tokenizer)
        self._codec = TextCodec(tokenizer)
        self._shows_tools: bool | None = None
        _flatten_globals(tokenizer)

    def guard(self, message: dict[str, Any]) -> dict[str, Any]:
        """Mark the names of special tokens in a message. Returns the message itself if it has none."""
        return self._outside.guard(message)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, answer: bool) -> str:
        """Render guarded messages as guarded text. With `answer`, append the prompt for the assistant's turn.

        Raises DataError if the template rejects the messages.
        """
        if tools and self._shows_tools is None:
            self._shows_tools = self._render(messages, tools, answer) != self._render(messages, [], answer)
            if not self._shows_tools:
                log.warning("The chat template does not show tools to the model; describe them in the system message")
        return self._render(messages, tools, answer)

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], answer: bool) -> str:
        try:
            return invoke(
                self._tokenizer.apply_chat_template,
                list(messages),
                tools=self._outside.guard(list(tools)) or None,
                add_generation_prompt=answer,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # templates are programs that may raise anything
            raise DataError(f"the chat template rejected {len(messages)} messages: {explain(error)}") from error

    def encode(self, text: str) -> list[int]:
        """Encode rendered text. No special token is added, because the template writes its own."""
        return self._outside.encode(text)

    def starts(self, text: str) -> list[int] | None:
        """Return where each token of rendered text begins, in characters. None if unknown."""
        return self._outside.starts(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the ids, special tokens included, because they delimit tool calls and reasoning."""
        return self._codec.decode(ids)

    def closing(self, generation: Generation) -> str:
        """Return the special token that ended the answer. Empty if it was truncated or ended by a stop string."""
        answered = len(generation.tokens) > len(generation.prompt)
        if generation.finish_reason != "stop" or not answered or generation.tokens[-1] not in self._special:
            return ""
        return self.decode([generation.tokens[-1]])

    def closings(self, generation: Generation) -> list[str]:
        """Return the texts that may end this answer in the rendered conversation."""
        return [mark for mark in dict.fromkeys((self.closing(generation), self._tokenizer.eos_token)) if mark]

    def answer_text(self, generation: Generation) -> str:
        """Return what the model wrote, with special tokens but without the one that closes the answer."""
        return self.decode(generation.token_ids).removesuffix(self.closing(generation))


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
