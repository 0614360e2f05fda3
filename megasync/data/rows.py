"""Rows: the common form of every dataset.

Invariant: `as_rows` returns a non-empty list of new dicts. Each has a "prompt" that is text or a list of chat messages,
and no column with a name that the rollout reserves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from megasync.errors import DataError

# One in this many rows of a procedural dataset is held out.
HELD_OUT_SHARE = 8
# Keyword arguments that reward functions and workflows receive in addition to the columns.
RESERVED_COLUMNS = frozenset({"completions", "completion_ids", "finish_reasons", "prompt_ids", "messages"})


def as_rows(data: Mapping[str, Iterable] | Iterable[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Rows from a sequence or iterator of dicts, or from a dict of equally long columns. The caller's dicts are copied.

    `name` identifies the dataset in error messages. Raises DataError that names the dataset, the row and the column.
    """
    rows = [_checked(row, number, name) for number, row in enumerate(_from_columns(data, name))]
    if not rows:
        raise DataError(f"{name} is empty: training and evaluation need at least one row")
    return rows


def as_conversations(data: Iterable[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Rows for supervised training, from an iterable of dicts: each has `messages`, or a prompt as in `as_rows`."""
    rows = [_conversation(row, number, name) for number, row in enumerate(data)]
    if not rows:
        raise DataError(f"{name} is empty: training and validation need at least one row")
    return rows


def _conversation(row: Any, number: int, name: str) -> dict[str, Any]:
    if not isinstance(row, Mapping) or "messages" not in row:
        return _checked(row, number, name)
    if not is_messages(row["messages"]):
        raise DataError(
            f"{name}, row {number}: messages must be a list of chat messages, each with a role, got "
            f"{row['messages']!r:.200}"
        )
    return dict(row)


def _from_columns(data: Mapping[str, Iterable] | Iterable[Mapping[str, Any]], name: str) -> Iterable:
    if not isinstance(data, Mapping):
        return data
    columns = {column: list(values) for column, values in data.items()}
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{name} has columns of different lengths: {lengths}")
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _checked(row: Any, number: int, name: str) -> dict[str, Any]:
    where = f"{name}, row {number}"
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a {type(row).__name__}, not a dict of columns")
    if "prompt" not in row:
        raise DataError(f'{where} has no "prompt" column; its columns are {sorted(map(str, row))}')
    if taken := sorted(RESERVED_COLUMNS & row.keys()):
        raise DataError(f"{where} has the columns {taken}, which are reserved for the rollout; rename them")
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not is_messages(prompt):
        raise DataError(f"{where}: the prompt must be text or a list of chat messages, got {prompt!r:.200}")
    return dict(row)


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages: non-empty, each a dict with a role (`data/messages.py`)."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def split_of(text: str) -> str:
    """The split, train or test, of a procedural row: a hash of its text decides, whatever the seed."""
    return "test" if hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0 else "train"
