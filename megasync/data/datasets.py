"""Loads the rows of a configured dataset and selects its default reward function.

Invariant: any problem of a dataset (missing file or column, malformed line, no rows) is a DataError that says where,
raised before any process starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from megasync.config.schema import DatasetConfig
from megasync.data.digits import digit_reward, digit_rows
from megasync.data.match import match_answer
from megasync.data.reasoning_gym import gym_rows
from megasync.data.rows import as_conversations, as_rows
from megasync.errors import DataError

# `f(completions, **columns) -> list[float | None]`, sync or async.
Reward = Callable[..., Any]


def load_dataset(config: DatasetConfig) -> tuple[list[dict[str, Any]], Reward | None]:
    """The rows and their default reward function: a task's verifier, or a match with the "answer" column.

    The reward function is None for a file dataset without an "answer" column; the user must then supply one. Of a file
    dataset, the first `size` rows are kept. Raises DataError.
    """
    if config.size is not None and config.size < 1:
        raise DataError(f"{config.kind}:{config.source}: size must be at least 1, got {config.size}")
    if config.kind == "digits":
        return digit_rows(config), digit_reward
    if config.kind == "reasoning_gym":
        return gym_rows(config)
    rows = as_rows(_read(config), f"{config.kind}:{config.source}")[: config.size]
    return rows, match_answer if all("answer" in row for row in rows) else None


def load_conversations(config: DatasetConfig) -> list[dict[str, Any]]:
    """Rows for supervised training: a column `messages`, or a prompt and further columns. Raises DataError."""
    if config.kind not in READERS:
        return load_dataset(config)[0]
    rows = as_conversations(_read(config), f"{config.kind}:{config.source}")
    return rows[: config.size]


def _read(config: DatasetConfig) -> Iterable[dict[str, Any]]:
    if config.kind not in READERS:
        raise DataError(f"unknown dataset kind {config.kind!r}; kinds: digits, reasoning_gym, {', '.join(READERS)}")
    return READERS[config.kind](config)


def _read_jsonl(config: DatasetConfig) -> Iterator[dict[str, Any]]:
    for path in _files(config, ".jsonl"):
        with path.open(encoding="utf-8") as lines:
            try:
                yield from (_parse(line, path, number) for number, line in enumerate(lines, 1) if line.strip())
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is not UTF-8 text: {error}") from error


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not valid JSON ({error.msg}, column {error.colno}): {line!r:.80}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: each line must be a JSON object, this one is a {type(row).__name__}")
    if "prompt" not in row and "messages" not in row:
        raise DataError(f'{path}:{number}: no "prompt" column; the columns are {sorted(row)}')
    return row


def _read_parquet(config: DatasetConfig) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports] - an extra
    except ModuleNotFoundError as error:
        raise _missing("parquet", error) from error
    for path in _files(config, ".parquet"):
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _read_hf(config: DatasetConfig) -> Iterable[dict[str, Any]]:
    try:
        # By name, because the type checker takes this module for it where the package is not installed.
        datasets: Any = import_module("datasets")
    except ModuleNotFoundError as error:
        raise _missing("hf", error) from error
    folder = Path(config.source)
    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(config.source)[config.split]
        if (folder / "state.json").is_file():
            return datasets.load_from_disk(config.source)
        return datasets.load_dataset(config.source, split=config.split, **config.options)
    except Exception as error:  # the package raises errors of a dozen libraries; the cause is chained
        raise DataError(f"hf:{config.source} (split {config.split}): {type(error).__name__}: {error}") from error


READERS: dict[str, Callable[[DatasetConfig], Iterable[dict[str, Any]]]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "hf": _read_hf,
}


def _files(config: DatasetConfig, suffix: str) -> list[Path]:
    """The source file itself, or the files of a source folder whose names begin with the split, sorted by name."""
    path = Path(config.source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{config.kind} dataset {path} does not exist; check data.*.source")
    if files := sorted(path.glob(f"{config.split}*{suffix}")):
        return files
    present = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise DataError(f"{path} has no {config.split}*{suffix} file (split {config.split!r}); it holds {present}")


def _missing(kind: str, error: ModuleNotFoundError) -> DataError:
    return DataError(f"data kind {kind} needs the package {error.name!r}: pip install 'megasync[datasets]'")
