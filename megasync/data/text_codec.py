"""Encodes and decodes text exactly as a Hugging Face tokenizer does, without the 50 to 100 µs of its wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a subclass may override to encode or decode differently from its backend.
_WRAPPER = ("__call__", "_encode_plus", "decode", "_decode")


class TextCodec:
    """`tokenizer` is called itself where it does more than its backend, or holds settings that a call of it resets."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids, [tokens]; `add_special_tokens` adds those that the tokenizer puts around a text."""
        backend = self._backend
        if (
            backend is not None
            and backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self._tokenizer.split_special_tokens
        ):
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def starts(self, text: str) -> list[int] | None:
        """Where each token of a text begins, in characters, [tokens]; None if the tokenizer does not tell."""
        if self._backend is None:
            return None
        return [start for start, _ in self._backend.encode(text, add_special_tokens=False).offsets]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens and with all blanks."""
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _backend(tokenizer: Any) -> Any:
    """The tokenizer's `tokenizers.Tokenizer`, if its own methods add nothing to that."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    same = all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, 0) for name in _WRAPPER)
    return tokenizer.backend_tokenizer if same and not hasattr(tokenizer, "_switch_to_input_mode") else None
