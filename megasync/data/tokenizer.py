"""Loads the tokenizer of a model folder."""

from __future__ import annotations

from typing import Any

from megasync.errors import DataError
from megasync.importing import quick_imports


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model folder. Raises DataError."""
    with quick_imports():
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser does
        raise DataError(f"model.path={path!r} has no tokenizer that can be loaded: {error}") from error
