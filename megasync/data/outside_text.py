"""Encodes untrusted text so that a special token's name in it becomes ordinary tokens, never the special token.

A user's message, a tool's output or a response may contain `<|im_end|>`. Encoded unchanged, it would end the message.
When the tokenizer runs, template and content are already one text, so the content is marked before templating:

    guarded = outside.guard(messages)      # <|im_end|>  ->  <Zq7plain9V|im_end|>
    text = apply_chat_template(guarded)    # the template's own special tokens have no mark
    ids = outside.encode(text)             # marked text between those is encoded as plain text, without the marks

Invariant: text without a special token's name, which is nearly all text, is encoded in one piece, exactly as the
tokenizer does it. `encode` splits a text only if it contains a mark. Special tokens are those that the tokenizer
declares special. Other added tokens (such as Qwen3's `<think>`) are words that a model reads and writes, and are not
changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megasync.data.messages import valid_text
from megasync.data.tokenizer import TextCodec

# Letters and digits only, which templates never escape, not even in JSON.
MARK = "Zq7plain9V"


class OutsideText:
    """Marks and encodes untrusted text. `tokenizer` is a Hugging Face tokenizer.

    `special_ids` are the ids of all special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._codec = TextCodec(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        names = {*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)} - {""}
        # Longest first, because one name may be a prefix of another.
        longest = "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))
        # Without names, a pattern that never matches.
        self._special = re.compile(f"({longest or '(?!)'})")
        self.special_ids = frozenset(tokenizer.all_special_ids) | {n for n, token in added.items() if token.special}

    def guard(self, value: Any) -> Any:
        """A copy of a text, or of messages, rows or tools, with marks in the names of special tokens, keys included.

        A value without such a name is returned itself, not as a copy.
        """
        if isinstance(value, str):
            return self._special.sub(_marked, value) if self._special.search(value) else value
        if isinstance(value, Mapping):
            guarded = {self.guard(key): self.guard(item) for key, item in value.items()}
            return value if guarded == value else guarded
        if isinstance(value, list | tuple):
            items = [self.guard(item) for item in value]
            return value if items == list(value) else items
        return value

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a guarded text, [tokens]; `add_special_tokens` adds those that the tokenizer puts around it.

        A lone surrogate, which no tokenizer takes, is encoded as U+FFFD.
        """
        text = valid_text(text)
        if MARK not in text:
            return self._codec.encode(text, add_special_tokens=add_special_tokens) if text else []
        ids: list[int] = []
        unmarked = ""  # unmarked text since the last marked piece, special tokens included
        # Texts and special tokens alternate; the odd pieces are the special tokens.
        for number, piece in enumerate(self._special.split(text)):
            if number % 2 or MARK not in piece:
                unmarked += piece
                continue
            ids += self.encode(unmarked) + self._plain(plain(piece))
            unmarked = ""
        ids += self.encode(unmarked)
        return self._wrapped(ids) if add_special_tokens else ids

    def starts(self, text: str) -> list[int] | None:
        """Where each token of a guarded text begins, in characters, [tokens]; None if unknown, as in marked text."""
        return None if MARK in text else self._codec.starts(text)

    def _plain(self, text: str) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if self.special_ids.isdisjoint(ids):
            return ids
        # The tokenizer ignores split_special_tokens. Encode the parts of each name, none of which is a special token.
        parts = self._special.sub(_marked, text).split(MARK)
        return [token for part in parts for token in self._tokenizer(part, add_special_tokens=False)["input_ids"]]

    def _wrapped(self, ids: list[int]) -> list[int]:
        around = list(self._tokenizer("a")["input_ids"])
        bare = list(self._tokenizer("a", add_special_tokens=False)["input_ids"])
        for at in range(len(around) - len(bare) + 1):
            if around[at : at + len(bare)] == bare:
                return around[:at] + ids + around[at + len(bare) :]
        return ids


def plain(text: str) -> str:
    """A guarded text without its marks."""
    return text.replace(MARK, "")


def _marked(name: re.Match[str]) -> str:
    return name[0][:1] + MARK + name[0][1:]
