"""A synthetic language with verifiable responses: the request's seed and all earlier tokens determine each token.

So a response can be checked token by token (`fault_in`). The check detects a token that was lost, duplicated, taken
from another sample or sampled after the end. The log-prob of a token encodes the version that sampled it, independently
of the server's report.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from megasync.trajectory import Trajectory

VOCABULARY = 1024
CONTEXT = 256
MOST_TOKENS = 8
END = 1
# The token of row 0; the prompt of each row of the dataset is one token.
ROW_TOKEN = 200
# Responses consist of _WORDS tokens from _FIRST on; smaller tokens are the characters of prompts.
_FIRST, _WORDS = 256, 512
# On average one token in _ENDS ends the response.
_ENDS = 6
# Log-probs are multiples of 1 / 1024, which every number format on their path represents exactly.
_GRAIN = 1024


def next_token(seed: int, ids: Sequence[int]) -> int:
    digest = hashlib.blake2b(array("I", ids).tobytes(), digest_size=8, salt=seed.to_bytes(8, "big")).digest()
    number = int.from_bytes(digest, "big")
    return END if number % _ENDS == 0 else _FIRST + (number >> 8) % _WORDS


def logprob(version: int) -> float:
    return -(version + 1) / _GRAIN


def sampled_by(value: float) -> int:
    """Return the version that this log-prob encodes."""
    return round(-value * _GRAIN) - 1


def fault_in(trajectory: Trajectory, seed: Callable[[int], int]) -> str:
    """Explain why the response is not what the seeds of its turns generate. Empty if it is.

    `seed` maps the index of a turn to its seed. A turn is a contiguous run of trained tokens. Tokens between two turns
    belong to the prompt of the later turn.
    """
    ids = list(trajectory.prompt_ids)
    turn, length = -1, 0
    for at, (token, trained) in enumerate(zip(trajectory.response_ids, trajectory.loss_mask, strict=True)):
        if not trained:
            length = 0
        else:
            turn, length = turn + (length == 0), length + 1
            if length > 1 and ids[-1] == END:
                return f"token {at} is sampled behind the end of turn {turn}"
            if length > MOST_TOKENS:
                return f"turn {turn} is longer than {MOST_TOKENS} tokens"
            if token != next_token(seed(turn), ids):
                return f"token {at}, {token}, does not follow in turn {turn}"
        ids.append(token)
    complete = ids[-1] == END if trajectory.finish_reason == "stop" else length == MOST_TOKENS
    return "" if complete else f"it has ended by {trajectory.finish_reason!r} after {length} tokens of turn {turn}"


class Tokenizer:
    """The part of a Hugging Face tokenizer that `Chat` uses. Each character is one token."""

    chat_template = "{{ messages }}"
    eos_token = chr(END)
    all_special_tokens = (chr(END),)
    all_special_ids = (END,)
    added_tokens_decoder: ClassVar[dict] = {}

    def apply_chat_template(
        self, messages: Sequence[dict], tools: Any = None, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        text = "".join(f"{message['role'][0]}{message['content'].rstrip(chr(END))}{chr(END)}" for message in messages)
        return ("#" if tools else "") + text + ("a" if add_generation_prompt else "")

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))
