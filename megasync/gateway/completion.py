"""A reply in the forms of OpenAI's API: one object, or the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.rollout.generation import Generation, Reply

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Completion:
    """What is the same in all parts of one answer."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, reply: Reply, message: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(reply)}
        return self._head("chat.completion") | {"choices": [choice], "usage": usage(reply.generation)}

    def chunk(
        self, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def usage_chunk(self, reply: Reply) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage(reply.generation)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def deltas(message: dict[str, Any], sent: str) -> Iterator[dict[str, Any]]:
    """What is left to stream of a message whose content began with `sent`."""
    if reasoning := message.get("reasoning_content"):
        yield {"reasoning_content": reasoning}
    content = message["content"] or ""
    # Text that turned out otherwise than it was streamed cannot be taken back: then nothing more of it is sent, and the
    # conversation forks when the agent goes on from it.
    if content.startswith(sent) and (rest := content[len(sent) :]):
        yield {"content": rest}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        opened = {"index": index, "id": call["id"], "type": "function"}
        yield {"tool_calls": [opened | {"function": {"name": function["name"], "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}


def finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls else reply.finish_reason


def usage(generation: Generation) -> dict[str, int]:
    """In tokens."""
    asked, answered = len(generation.prompt_ids), len(generation.token_ids)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def token_logprobs(generation: Generation, decode: Decode) -> dict[str, Any]:
    """Of every sampled token, those of reasoning and calls included, at the sampling temperature."""
    content = []
    for token, logprob in zip(generation.token_ids, generation.logprobs, strict=True):
        text = decode([token])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


class LiveText:
    """The text of a growing response, piece by piece, without what later tokens may still change.

    Only the last few tokens are decoded each time: those of the piece before stand in front, as some tokenizers write a
    token otherwise where nothing precedes it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before = self._read = 0

    def grown(self, ids: Sequence[int]) -> str:
        known = self._decode(ids[self._before : self._read])
        now = self._decode(ids[self._before :])
        # A character that is not complete yet is written as U+FFFD.
        if len(now) <= len(known) or now.endswith("\ufffd"):
            return ""
        self._before, self._read = self._read, len(ids)
        return now[len(known) :]
