"""Rows of tokens in a file, which all ranks read: each rank only those that it computes.

The file is in safetensors' format: the tokens of all rows, one after the other, and a few numbers of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megasync.base.files import durable_rename, fsync
from megasync.errors import CheckpointError, raised_as
from megasync.supervised.rows import TokenRow

Ints = NDArray[np.int64]


def write_rows(path: Path, rows: Sequence[TokenRow]) -> None:
    """Each row has at least one trained token. The file is there whole or not at all. Raises OSError."""
    firsts = [int(np.flatnonzero(row.trained)[0]) for row in rows]
    numbers: dict[bytes, int] = {}
    prompts = [
        numbers.setdefault(row.ids[:first].tobytes(), len(numbers)) for row, first in zip(rows, firsts, strict=True)
    ]
    columns = {
        "ends": np.cumsum([len(row.ids) for row in rows]),
        "prompts": prompts,
        "prompt_tokens": firsts,
        "fed": [int(np.flatnonzero(row.trained)[-1]) - first for row, first in zip(rows, firsts, strict=True)],
        "trained_tokens": [int(row.trained.sum()) for row in rows],
    }
    draft = path.with_name(path.name + ".tmp")
    tokens = {
        "ids": np.concatenate([row.ids for row in rows]),
        "trained": np.concatenate([row.trained for row in rows]),
    }
    save_file(tokens | {name: np.array(column, np.int64) for name, column in columns.items()}, draft)
    fsync(draft)
    durable_rename(draft, path)


class RowFile:
    """A file of `write_rows`. It holds 40 bytes of each row in memory; tokens are read when they are asked for.

    ``prompts`` [rows] are equal where the tokens before the first trained one are, ``prompt_tokens`` are their numbers;
    ``response_inputs`` is the offset of the last trained token from the first, ``trained_tokens`` how many are trained.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that is missing or damaged."""
        what, fix = f"the rows in {path} cannot be read", "resume the run, which writes them"
        with raised_as(CheckpointError, what, fix, of=(OSError, SafetensorError)):
            self._file = safe_open(path, "numpy")
            self._ends: Ints = self._file.get_tensor("ends")
            self.prompts: Ints = self._file.get_tensor("prompts")
            self.prompt_tokens: Ints = self._file.get_tensor("prompt_tokens")
            self.response_inputs: Ints = self._file.get_tensor("fed")
            self.trained_tokens: Ints = self._file.get_tensor("trained_tokens")
            self._ids, self._trained = self._file.get_slice("ids"), self._file.get_slice("trained")
        if not self._whole():
            raise CheckpointError(
                f"the rows in {path} cannot be read: their tokens and numbers do not belong together; resume the run, "
                f"which writes them"
            )

    def _whole(self) -> bool:
        """Whether each row has all its numbers, and tokens of its own."""
        columns = (self._ends, self.prompts, self.prompt_tokens, self.response_inputs, self.trained_tokens)
        if any(column.shape != (len(self._ends),) for column in columns) or not len(self._ends):
            return False
        tokens = [int(self._ends[-1])]
        return bool((np.diff(self._ends, prepend=0) > 0).all()) and self._ids.get_shape() == tokens == (
            self._trained.get_shape()
        )

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, number: int) -> TokenRow:
        start, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        return TokenRow(self._ids[start:end], self._trained[start:end])
