"""Loads the rows of a configured dataset, or of several, and selects their default reward function.

Invariant: any problem of a dataset (missing file or column, malformed line, no rows) is a DataError that says where,
raised before any process starts.
"""

from __future__ import annotations

import glob
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megasync.base.importing import load_function
from megasync.base.missing import require_extra
from megasync.concurrency.threads import DaemonThreads
from megasync.config.builtin import READERS, TASKSETS
from megasync.config.schema import DataConfig, DatasetConfig, TrainSetConfig
from megasync.data.final_answer import references
from megasync.data.match import match_answer
from megasync.data.rows import Row, as_conversations, as_rows, place
from megasync.errors import DataError, raised_as

log = logging.getLogger(__name__)

# `f(completions, **columns) -> list[float | None]`, sync or async.
Reward = Callable[..., Any]

# Column with the name of a row's set.
SET = "train_set"
# Verifiers are packages' code, which an event loop must not run. Threads held by calls past their deadline: at most 8.
_threads = DaemonThreads(8, at_once=1)


def load_dataset(config: DatasetConfig, data: DataConfig | None = None) -> tuple[list[dict[str, Any]], Reward | None]:
    """The rows and their default reward function: a task's verifier, or a match with the "answer" column.

    The reward function is None for a file dataset without an "answer" column; the user must then supply one. Of a file
    dataset, the first `size` rows are kept. `data` says how its rows become prompts. Raises DataError.
    """
    if config.size is not None and config.size < 1:
        raise DataError(f"{config.kind}:{config.source}: size must be at least 1, got {config.size}")
    name = f"{config.kind}:{config.source}"
    if config.kind in READERS:
        rows = as_rows(load_function(READERS[config.kind])(config), name, data)[: config.size]
        return rows, default_reward(rows)
    if config.kind not in TASKSETS:
        raise DataError(f"unknown dataset kind {config.kind!r}; kinds: {', '.join([*TASKSETS, *READERS])}")
    made, verifier = load_function(TASKSETS[config.kind])(config)
    return [Row(row, f"{name} ({config.split}), row {number}") for number, row in enumerate(made)], verifier


def default_reward(rows: Sequence[Mapping[str, Any]]) -> Reward | None:
    """`match_answer` if rows have references in the column "answer", and nothing else there; otherwise None."""
    try:
        return match_answer if any([references(row.get("answer")) for row in rows]) else None
    except DataError:
        return None


def no_default_reward(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why these rows have no default reward, as the middle of an error message."""
    if not any("answer" in row for row in rows):
        return f'the rows have no column "answer", only {sorted(rows[0])}'
    for number, row in enumerate(rows):
        try:
            references(row.get("answer"))
        except DataError as error:
            return f'{place(row, number)}, column "answer": {error}'
    if default_reward(rows) is None:
        return f'the column "answer" is empty in all {len(rows)} rows'
    return 'not every set of data.sets has a column "answer", or a task with a verifier'


def warn_of_missing_answers(rows: Sequence[Mapping[str, Any]], reward: object) -> None:
    """Logs how many rows `reward` will not score because they have no answer, if it is the default one."""
    if reward is not match_answer:
        return
    missing = [place(row, number) for number, row in enumerate(rows) if not references(row.get("answer"))]
    if missing:
        log.warning(
            "%d of %d rows have no answer, so their responses are not scored; the first is %s",
            *(len(missing), len(rows), missing[0]),
        )


def load_conversations(config: DatasetConfig, data: DataConfig | None = None) -> list[dict[str, Any]]:
    """Rows for supervised training: a column `messages`, or a prompt and further columns. Raises DataError."""
    if config.kind not in READERS:
        return load_dataset(config)[0]
    rows = load_function(READERS[config.kind])(config)
    return as_conversations(rows, f"{config.kind}:{config.source}", data)[: config.size]


def read_jsonl(config: DatasetConfig) -> Iterator[Row]:
    """The rows of files with a JSON object in each line."""
    for path in _files(config, ".jsonl"):
        with raised_as(DataError, f"{path} cannot be read"), path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield Row(_parse(line, f"{path}:{number}", first=number == 1), f"{path}:{number}")


def _parse(line: bytes, where: str, first: bool) -> dict[str, Any]:
    try:
        # Some editors begin a file with a byte-order mark.
        row = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg}, column {error.colno}): {line!r:.80}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that Python does not read ({error}): {line!r:.80}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: each line must be a JSON object, this one is a {type(row).__name__}")
    return row


def read_parquet(config: DatasetConfig) -> Iterator[Row]:
    """The rows of Parquet files."""
    require_extra("datasets", "pyarrow", "data kind parquet", kind=DataError)
    from pyarrow import parquet  # pyright: ignore[reportMissingImports] - an extra

    for path in _files(config, ".parquet"):
        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    for at in range(batch.num_rows):
                        yield Row(batch.slice(at, 1).to_pylist()[0], f"{path}, row {number}")
                        number += 1
        except DataError:
            raise
        except Exception as error:  # pyarrow's, and those of Python types that cannot hold a value, such as a date
            raise DataError(
                f"{path} cannot be read as parquet, row {number}: {type(error).__name__}: {error}"
            ) from error


def read_hf(config: DatasetConfig) -> Iterable[dict[str, Any]]:
    """The rows of a dataset of the Hugging Face hub, or of one that the package datasets has saved."""
    require_extra("datasets", "datasets", "data kind hf", kind=DataError)
    # By name, because the type checker takes this module for it where the package is not installed.
    datasets: Any = import_module("datasets")
    folder = Path(config.source)
    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(config.source)[config.split]
        if (folder / "state.json").is_file():
            return datasets.load_from_disk(config.source)
        name, _, revision = config.source.partition("@") if not folder.exists() else (config.source, "", "")
        pinned = {"revision": revision} if revision else {}
        return datasets.load_dataset(name, split=config.split, **pinned, **config.options)
    except Exception as error:  # the package raises errors of a dozen libraries; the cause is chained
        raise DataError(f"hf:{config.source} (split {config.split}): {type(error).__name__}: {error}") from error


def _files(config: DatasetConfig, suffix: str) -> list[Path]:
    """The source file itself, or the files of a source folder whose names begin with the split, sorted by name."""
    what = f"{config.kind} dataset {config.source!r} cannot be read"
    with raised_as(DataError, what, "check data.*.source", of=(OSError, RuntimeError, ValueError)):
        path = Path(config.source).expanduser()
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise DataError(f"{config.kind} dataset {path} does not exist; check data.*.source")
        if files := sorted(path.glob(f"{glob.escape(config.split)}*{suffix}")):
            return files
        present = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise DataError(f"{path} has no {config.split}*{suffix} file (split {config.split!r}); it holds {present}")


# Several training sets as one table of rows, each scored as its own task is.


class VerifierOfSet:
    """The reward function of rows from several sets, each with its own; a group's rows are all of one set."""

    def __init__(self, by_set: Mapping[str, Reward]) -> None:
        self._by_set = by_set

    async def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        name = columns[SET][0]
        call = partial(self._by_set[name], completions, **columns)
        scores = await _threads.call(call, f"the verifier of the set {name}")
        return await scores if inspect.isawaitable(scores) else scores


def load_training_sets(
    sets: Mapping[str, TrainSetConfig], config: DataConfig | None = None
) -> tuple[list[dict[str, Any]], Reward | None, list[tuple[int, float]]]:
    """The rows of all sets in their order, with the column `SET`; their reward; and (rows, weight) of each.

    The reward is that of each row's own set; None if a set has none. Raises DataError.
    """
    table, verifiers, sizes = [], {}, []
    for name, each in sets.items():
        rows, verifier = load_dataset(each.data, config)
        if taken := next((row for row in rows if SET in row), None):
            raise DataError(f"data.sets.{name} has a column {SET!r} ({taken[SET]!r}), which megasync sets; rename it")
        table += [Row({**row, SET: name}, place(row, number)) for number, row in enumerate(rows)]
        sizes.append((len(rows), each.weight))
        if verifier is not None:
            verifiers[name] = verifier
    functions = {*verifiers.values()}
    if len(verifiers) < len(sets):
        return table, None, sizes
    return table, functions.pop() if len(functions) == 1 else VerifierOfSet(verifiers), sizes
