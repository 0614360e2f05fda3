"""Formats a reply as the OpenAI API does: as one object, or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.data.text_codec import TextCodec
from megasync.rollout.conversation import Generation, Reply
from megasync.trajectory.runs import IntArray

Decode = Callable[[Sequence[int] | IntArray], str]


@dataclass(frozen=True, slots=True)
class Completion:
    """The fields that all chunks of one answer share, and the objects built from them."""

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
    """The rest of a message to stream, after the part `sent` of its content."""
    if reasoning := message.get("reasoning_content"):
        yield {"reasoning_content": reasoning}
    content = message["content"] or ""
    # Streamed text cannot be taken back. If the final content does not begin with it, no more content is sent, and the
    # conversation forks when the agent continues from what it received.
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
    """Token counts of a generation."""
    asked, total = len(generation.prompt), len(generation.tokens)
    return {"prompt_tokens": asked, "completion_tokens": total - asked, "total_tokens": total}


def token_logprobs(generation: Generation, decode: Decode, codec: TextCodec) -> dict[str, Any]:
    """The log-prob of every sampled token, at the sampling temperature. Includes reasoning and tool calls.

    The bytes of all tokens together are the response's text in UTF-8. Those that are unknown are null.
    """
    ids = generation.token_ids
    content = [
        {
            "token": decode([token]),
            "logprob": logprob,
            "bytes": None if token_bytes is None else list(token_bytes),
            "top_logprobs": [],
        }
        for token, logprob, token_bytes in zip(ids, generation.logprobs, codec.token_bytes(ids), strict=True)
    ]
    return {"content": content, "refusal": None}


class LiveText:
    """Decodes a growing response incrementally. Text that later tokens may still change is held back.

    Each call decodes only the new tokens, preceded by those of the previous piece as context, because some tokenizers
    decode a token differently at the start of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before = self._read = 0

    def grown(self, ids: Sequence[int] | IntArray) -> str:
        before = self._decode(ids[self._before : self._read])
        now = self._decode(ids[self._before :])
        # An incomplete character decodes to U+FFFD.
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._before, self._read = self._read, len(ids)
        return now[len(before) :]
