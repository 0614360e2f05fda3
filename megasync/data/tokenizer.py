"""The tokenizer of a model folder, and its texts without the 50 to 100 µs of its wrapper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megasync.base.importing import quick_imports
from megasync.errors import DataError

# The letters of byte-level tokenizers: printable bytes stand for themselves, the others are counted from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
# The name of a token for one byte in other tokenizers.
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
# What a subclass may override to encode or decode differently from its backend.
_WRAPPER = ("__call__", "_encode_plus", "decode", "_decode")


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """The tokenizer of the model folder that the configuration's `key` names. Raises DataError."""
    with quick_imports():
        from transformers import AutoConfig, AutoTokenizer, DeepseekV3Config

    class KimiK2Config(DeepseekV3Config):
        model_type = "kimi_k2"

    # transformers reads config.json to load a tokenizer, and does not know this name of DeepSeek-V3's architecture.
    AutoConfig.register("kimi_k2", KimiK2Config, exist_ok=True)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its parser does
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{key}={path!r} has a tokenizer in Python code, which is not run; add its tokenizer.json"
            ) from error
        raise DataError(f"{key}={path!r} has no tokenizer that can be loaded: {error}") from error


class TextCodec:
    """Encodes and decodes text exactly as a Hugging Face tokenizer does.

    `tokenizer` is called itself where it does more than its backend, or holds settings that a call of it resets.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._added = frozenset(getattr(tokenizer, "added_tokens_decoder", None) or ())
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

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

    def token_bytes(self, ids: Sequence[int]) -> list[bytes | None]:
        """The bytes that each token adds to a text without special tokens, [tokens]; None if they are unknown.

        A token may be a part of a character.
        """
        return [self._bytes_at(ids, at) for at in range(len(ids))]

    def _bytes_at(self, ids: Sequence[int], at: int) -> bytes | None:
        token = ids[at]
        if token in self._special:
            return b""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if self._byte_level and token not in self._added:
            bytes_of_name = [_BYTE_OF_LETTER.get(letter, -1) for letter in name]
            return None if -1 in bytes_of_name else bytes(bytes_of_name)
        if isinstance(name, str) and (byte := _BYTE_NAME.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        # The text of a token may depend on whether it is the first.
        before = self.decode(ids[at - 1 : at]) if at else ""
        text = self.decode(ids[max(at - 1, 0) : at + 1])
        added = text[len(before) :]
        return None if "\ufffd" in added or not text.startswith(before) else added.encode()

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
