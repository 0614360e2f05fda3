"""A language whose responses can be recognised: every token follows from the request's seed and all tokens before it.

So a trained response is checked token by token (`fault_in`): a token that was lost, doubled, taken from another sample or
sampled behind the end does not follow. Its log-prob says which version sampled it, whatever the server's report says.
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
# Tokens that answers consist of; those below are characters of prompts.
_FIRST, _WORDS = 256, 512
# One token in so many ends a response.
_ENDS = 6
# Log-probs are multiples of 1 / 1024, which every number format on the way keeps.
_GRAIN = 1024


def next_token(seed: int, ids: Sequence[int]) -> int:
    digest = hashlib.blake2b(array("I", ids).tobytes(), digest_size=8, salt=seed.to_bytes(8, "big")).digest()
    number = int.from_bytes(digest, "big")
    return END if number % _ENDS == 0 else _FIRST + (number >> 8) % _WORDS


def logprob(version: int) -> float:
    return -(version + 1) / _GRAIN


def sampled_by(value: float) -> int:
    """The version whose log-prob this is."""
    return round(-value * _GRAIN) - 1


def fault_in(trajectory: Trajectory, seed: Callable[[int], int]) -> str:
    """Why this is not what was sampled with the seeds of the turns; empty where it is.

    A turn is an unbroken run of trained tokens; what lies between two turns belongs to the prompt.
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
    """A Hugging Face tokenizer as far as `Chat` uses one; a token is a character."""

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
