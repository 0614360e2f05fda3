"""The one form of an answer that all dialects share, its log-probs, and its text while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megasync.data.tokenizer import TextCodec
from megasync.rollout.conversation import Generation
from megasync.rollout.tools import ToolCall
from megasync.trajectory.runs import IntArray

Decode = Callable[[Sequence[int] | IntArray], str]


class Answer(NamedTuple):
    """An answer of the model, with the calls under the ids that the agent sees.

    `logprobs` has an entry for each token, if they were requested. `stopped_by` is the stop text of the request that
    ended the answer.
    """

    generation: Generation
    content: str
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    logprobs: list[dict[str, Any]] | None = None
    stopped_by: str | None = None

    @property
    def truncated(self) -> bool:
        return self.generation.finish_reason == "length"

    @property
    def usage(self) -> tuple[int, int]:
        """The number of tokens of the prompt, and of those sampled."""
        prompt = len(self.generation.prompt)
        return prompt, len(self.generation.tokens) - prompt


def token_logprobs(generation: Generation, decode: Decode, codec: TextCodec) -> list[dict[str, Any]]:
    """The log-prob of every sampled token, at the sampling temperature. Includes reasoning and tool calls.

    The bytes of all tokens together are the response's text in UTF-8. Those that are unknown are null.
    """
    ids = generation.token_ids
    return [
        {
            "token": decode([token]),
            "logprob": logprob,
            "bytes": None if token_bytes is None else list(token_bytes),
            "top_logprobs": [],
        }
        for token, logprob, token_bytes in zip(ids, generation.logprobs, codec.token_bytes(ids), strict=True)
    ]


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
