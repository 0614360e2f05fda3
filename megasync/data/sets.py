"""Several training sets as one table of rows, each scored as its own task is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megasync.concurrency.threads import DaemonThreads
from megasync.config.schema import DataConfig, TrainSetConfig
from megasync.data.datasets import Reward, load_dataset
from megasync.data.rows import Row, place
from megasync.errors import DataError

# Column with the name of a row's set.
SET = "train_set"
# Verifiers are packages' code, which an event loop must not run. Threads held by calls past their deadline: at most 8.
_threads = DaemonThreads(8, at_once=1)


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
