"""Rows, the common form of every dataset, and the format strings of the configuration that they fill.

Invariant: `as_rows` returns a non-empty list of new rows. Each has a "prompt" that is text or a list of chat messages,
no column with a name that the rollout reserves, and only values that can be encoded and copied. Each row knows where it
comes from, and so does every error.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megasync.config.schema import DataConfig
from megasync.errors import DataError, raised_as

# One in this many rows of a procedural dataset is held out.
HELD_OUT_SHARE = 8
# Keyword arguments that reward functions and workflows receive in addition to the columns.
RESERVED_COLUMNS = frozenset({"completions", "completion_ids", "finish_reasons", "prompt_ids", "messages"})
# Lists and dicts within each other. Deeper ones cannot be copied and encoded safely.
DEEPEST = 100
# Bits of an integer; Python does not write longer ones (more than 4,300 digits) as text.
LONGEST_INTEGER = 14_000
_END = object()


class Row(dict[str, Any]):
    """The columns of a row. ``where`` names its dataset, or its file, and its number."""

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        super().__init__(columns)
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (dict(self), self.where)


def place(row: Mapping[str, Any], number: int, name: str = "") -> str:
    """Where a row comes from, for messages; its number in the dataset `name` if it does not know."""
    return row.where if isinstance(row, Row) else f"{name}, row {number}".removeprefix(", ")


def as_rows(
    data: Mapping[str, Iterable] | Iterable[Mapping[str, Any]], name: str, config: DataConfig | None = None
) -> list[dict[str, Any]]:
    """Rows from a sequence or iterator of dicts, or from a dict of equally long columns. The caller's dicts are copied.

    `config` maps the columns (`columns`), and says how a row without a prompt becomes one (`prompt.template`). Without
    either, the prompt is the row's `messages` up to the last that is not the assistant's. `name` identifies the dataset
    in error messages. Raises DataError that names the dataset, the row and the column.
    """
    config = config or DataConfig()
    return _not_empty([_prompted(row, config) for row in _read(_by_row(data, name), name, config)], name)


def as_conversations(
    data: Iterable[Mapping[str, Any]], name: str, config: DataConfig | None = None
) -> list[dict[str, Any]]:
    """Rows for supervised training, from an iterable of dicts: each has `messages`, or a prompt as in `as_rows`."""
    config = config or DataConfig()
    rows = _read(data, name, config)
    return _not_empty(
        [_check_messages(row, row["messages"]) if "messages" in row else _prompted(row, config) for row in rows], name
    )


def _not_empty(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    if not rows:
        raise DataError(f"{name} is empty: training and evaluation need at least one row")
    return rows


def _by_row(data: Any, name: str) -> Iterable:
    if not isinstance(data, Mapping):
        return data
    if wrong := [column for column, values in data.items() if isinstance(values, str) or not _iterable(values)]:
        raise DataError(f"{name}: the column {wrong[0]!r} must be a list with a value for each row")
    columns = {column: list(values) for column, values in data.items()}
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{name} has columns of different lengths: {lengths}")
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _iterable(values: Any) -> bool:
    try:
        iter(values)
    except TypeError:
        return False
    return True


def _read(data: Any, name: str, config: DataConfig) -> Iterator[Row]:
    """The rows with the columns of the configuration, each checked for values that nothing can use."""
    if isinstance(data, str | bytes) or not _iterable(data):
        raise DataError(f"{name} must be a sequence of rows, dicts with a prompt each, not a {type(data).__name__}")
    rows = iter(data)
    number = 0
    while True:
        where = f"{name}, row {number}"
        try:
            row = next(rows, _END)
            if isinstance(row, Mapping) and not isinstance(row, Row):
                row = Row(dict(row), where)
        except DataError:
            raise
        except Exception as error:  # whatever an iterator or a package's lazy row raises
            raise DataError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
        if row is _END:
            return
        if not isinstance(row, Row):
            raise DataError(f"{where} is a {type(row).__name__}, not a dict of columns")
        for column, value in row.items():
            if problem := _unusable(column) if isinstance(column, str) else "is not text":
                raise DataError(f"{row.where}: the name of the column {column!r:.80} {problem}")
            if problem := _unusable(value):
                raise DataError(f"{row.where}: the column {column!r} {problem}")
        yield _with_columns(row, config.columns)
        number += 1


def _unusable(value: Any) -> str | None:
    """Why a value cannot be encoded or copied; None for one that can."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            if not item.isascii() and (at := _surrogate(item)) is not None:
                return (
                    f"has half of a surrogate pair, {item[at]!r}, at character {at} of {item!r:.80}, which no "
                    f"tokenizer encodes; remove it, or write the whole character"
                )
        elif isinstance(item, int):
            if item.bit_length() > LONGEST_INTEGER:
                return "has an integer of more than 4,000 digits; write it as text"
        elif isinstance(item, Mapping | list | tuple):
            if depth == DEEPEST:
                return f"is nested deeper than {DEEPEST} lists or dicts; write it as JSON text"
            inner = [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            waiting += [(each, depth + 1) for each in inner]
    return None


def _surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _with_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the columns that `data.columns` names, each under its new name too."""
    if not columns:
        return row
    renamed = Row(row, row.where)
    for name, source in columns.items():
        present, value = _value(row, source)
        if present:
            renamed[name] = value
        elif name not in row and not (name == "prompt" and "messages" in row):
            raise DataError(
                f"{row.where} has neither the column {source!r} (data.columns.{name}) nor {name!r}; its columns are "
                f"{sorted(row)}"
            )
    return renamed


def _value(row: Mapping[str, Any], source: str) -> tuple[bool, Any]:
    """Whether a row has a column, and its value. The name may lead into dicts: reward_model.ground_truth."""
    if source in row:
        return True, row[source]
    value: Any = row
    for part in source.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _check_messages(row: Row, messages: Any) -> Row:
    if not is_messages(messages):
        raise DataError(
            f"{row.where}: messages must be a list of chat messages, each with a role and a content, got "
            f"{messages!r:.200}"
        )
    return row


def _prompted(row: Row, config: DataConfig) -> Row:
    """The row with a prompt: its own, its messages, or the template filled with its columns."""
    messages = row.pop("messages", None) if "prompt" not in row or "prompt" in config.columns else None
    if taken := sorted(RESERVED_COLUMNS & row.keys()):
        choice = " (or write data.columns: {prompt: prompt} to leave out the messages)" if "messages" in taken else ""
        raise DataError(f"{row.where} has the columns {taken}, which are reserved for the rollout; rename them{choice}")
    template = config.prompt.template
    if "prompt" in row:
        if not isinstance(row["prompt"], str) and not is_messages(row["prompt"]):
            raise DataError(
                f"{row.where}: the prompt must be text or a list of chat messages, got {row['prompt']!r:.200}"
            )
    elif messages is not None:
        _check_messages(row, messages)
        row["prompt"] = _asked(row, messages)
    elif (names := column_names(template)) and "prompt" not in names:
        with raised_as(DataError, row.where, of=DataError):
            row["prompt"] = fill("data.prompt.template", template, row)
    else:
        raise DataError(
            f'{row.where} has no "prompt" column; its columns are {sorted(row)}. Name the one with the prompt in '
            f'data.columns, such as {{prompt: question}}, or in data.prompt.template, such as "{{question}}"'
        )
    return row


def _asked(row: Row, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A conversation up to the last message that is not the assistant's: what the model is to answer."""
    others = [at for at, message in enumerate(messages) if message["role"] != "assistant"]
    if not others:
        raise DataError(f"{row.where}: all messages are the assistant's, so there is nothing to answer")
    return list(messages[: others[-1] + 1])


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


def fill(key: str, template: str, row: Mapping[str, Any]) -> str:
    """A format string with the columns of a row. Raises DataError that names the configuration's ``key``."""
    try:
        return template.format_map(row)
    except Exception as error:  # a format string calls the __format__ and the attributes of any value
        raise DataError(f"{key}={template!r} {_problem(template, row, error)}") from error


def _problem(template: str, row: Mapping[str, Any], error: Exception) -> str:
    names = column_names(template)
    if missing := sorted(names - row.keys()):
        return (
            f"names the column {missing[0]!r}, which a row lacks: it has {sorted(map(str, row))}; correct the "
            f"template, or name the right column in data.columns"
        )
    values = ", ".join(f"{name}={row[name]!r:.80}" for name in sorted(names))
    return (
        f"is not a valid format string{' for ' + values if values else ''}: {str(error) or type(error).__name__}; "
        f"correct the value or its format, and write {{{{ for a brace"
    )


def column_names(template: str) -> set[str]:
    """The columns that a format string names; empty if it is not a valid one."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:
        return set()
    return {name.partition(".")[0].partition("[")[0] for name in fields}
