"""Reads the recorded responses of a run (`observe.rollouts`), also while they are written: an index with filters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megasync.base.files import open_regular
from megasync.errors import DataError, raised_as
from megasync.observe.rollouts import ANSWERS, BODY, FILE, FOLDER, INDEX, Floats, IndexRow, Response
from megasync.trajectory.runs import Runs
from megasync.trajectory.trajectory import within
from megasync.watch.growing_file import GrowingFile

# Bytes that are looked through for a reference answer.
ANSWER_BYTES = 256 * 2**20
# `Filters.dropped`: of trained groups, and of dropped groups whatever the reason.
TRAINED, DROPPED = "trained", "dropped"


def _from_bytes(kind: Any, data: Any) -> Any:
    if kind is Runs:
        return Runs(*(np.frombuffer(part, "<i4") for part in data))
    return np.frombuffer(data, "<f4" if kind == Floats else "<i4")


_row = msgspec.json.Decoder(IndexRow)
_response = msgspec.msgpack.Decoder(Response, dec_hook=_from_bytes)
_answer = msgspec.json.Decoder(tuple[str, str])

# From and to, both included; None for no bound.
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions that rows must meet; None and empty texts let every row pass.

    A row without a reward is outside every bound on rewards. ``dropped`` is `TRAINED`, `DROPPED` or a reason. ``uid``
    is a whole uid, or with `*` at its end what uids begin with.
    """

    reward: Bounds | None = None
    length: Bounds | None = None
    staleness: Bounds | None = None
    step: Bounds | None = None
    set: str | None = None
    dropped: str = ""
    uid: str = ""

    def passes(self, row: IndexRow) -> bool:
        return (
            _within(row.reward, self.reward)
            and _within(row.tokens, self.length)
            and _within(row.staleness, self.staleness)
            and _within(row.step, self.step)
            and (self.set is None or row.set == self.set)
            and (
                not self.dropped or self.dropped == row.dropped or self.dropped == (DROPPED if row.dropped else TRAINED)
            )
            and (not self.uid or self.uid == row.uid or self._begins(row.uid))
        )

    def _begins(self, uid: str) -> bool:
        return self.uid.endswith("*") and uid.startswith(self.uid[:-1])


def _within(value: float | None, bounds: Bounds | None) -> bool:
    if bounds is None or bounds == (None, None):
        return True
    least, most = bounds
    return value is not None and (least is None or value >= least) and (most is None or value <= most)


class RolloutIndex:
    """The recorded responses of a run directory, also while it is being written.

    `rows` has each response once, as it was recorded last: a run that returns to a checkpoint trains groups again.
    `damaged` counts lines that could not be read. `revision` grows when `rows` changes.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._files: dict[str, GrowingFile] = {}
        self._rows: dict[tuple[str, int], IndexRow] = {}
        self.damaged = 0
        self.revision = 0

    @property
    def rows(self) -> list[IndexRow]:
        return list(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def update(self) -> list[IndexRow]:
        """Reads what was written since the last call; returns the new rows. Without a folder there are none."""
        try:
            files = filter(None, map(FILE.fullmatch, os.listdir(self._folder)))
            pairs = sorted(file["pair"] for file in files if file["suffix"] == INDEX)
        except OSError:
            pairs = []
        if gone := self._files.keys() - set(pairs):
            self._rows = {key: row for key, row in self._rows.items() if row.pair not in gone}
            for pair in gone:
                del self._files[pair]
        rows = [row for pair in pairs for row in self._new_rows(pair)]
        self.revision += bool(rows or gone)
        return rows

    def _new_rows(self, pair: str) -> list[IndexRow]:
        file = self._files.get(pair) or self._files.setdefault(pair, GrowingFile(self._folder / f"{pair}{INDEX}"))
        rows: list[IndexRow] = []
        try:
            _, pieces = file.read()
            for line in chain.from_iterable(pieces):
                try:
                    row = _row.decode(line)
                except (ValueError, RecursionError):
                    self.damaged += 1
                    continue
                row.pair = pair
                key = row.uid, row.sample
                earlier = self._rows.get(key)
                if earlier is None or earlier.time <= row.time:
                    self._rows[key] = row
                    rows.append(row)
        except OSError:
            pass  # removed meanwhile, or not readable now
        return rows

    def select(self, filters: Filters | None = None, sort: str = "time", descending: bool = True) -> list[IndexRow]:
        """The rows that pass, sorted by one of their fields; those without a value come last."""
        rows = self.rows if filters is None else [row for row in self._rows.values() if filters.passes(row)]
        with_value = [row for row in rows if getattr(row, sort) is not None]
        with_value.sort(key=lambda row: getattr(row, sort), reverse=descending)
        return with_value + [row for row in rows if getattr(row, sort) is None]

    def group(self, uid: str) -> list[IndexRow]:
        """The recorded responses of a group, by their position in it."""
        return sorted((row for row in self._rows.values() if row.uid == uid), key=lambda row: row.sample)

    def read(self, row: IndexRow) -> Response:
        """The tokens of a response. Raises DataError if they are gone or damaged."""
        path = self._folder / f"{row.pair}{BODY}"
        what = f"response {row.sample} of group {row.uid} cannot be read from {path}"
        with raised_as(DataError, what, of=(OSError, ValueError, TypeError, ArithmeticError, RecursionError)):
            with open_regular(path) as file:
                if not 0 <= row.size <= os.fstat(file.fileno()).st_size:
                    raise ValueError(f"the file is shorter than its index says ({row.size} bytes at {row.at})")
                response = _response.decode(os.pread(file.fileno(), row.size, row.at))
            return msgspec.structs.replace(response, turns=within(response.turns, len(response.ids)))

    def answer(self, uid: str) -> str | None:
        """The recorded reference answer of a group, or None. Looks through the newest ANSWER_BYTES of answers."""
        start, left = msgspec.json.encode((uid,))[:-1] + b",", ANSWER_BYTES
        for path in self._newest_answers():
            answer = None
            try:
                _, pieces = GrowingFile(path).read()
                for lines in pieces:
                    for line in lines:
                        if line.startswith(start):
                            _, answer = _answer.decode(line)
                    left -= sum(map(len, lines))
                    if left < 0:
                        break
            except (OSError, ValueError, RecursionError):
                pass  # removed meanwhile, not readable, or damaged
            if answer is not None or left < 0:
                return answer
        return None

    def _newest_answers(self) -> list[Path]:
        try:
            paths = [path for path in self._folder.iterdir() if path.suffix == ANSWERS and path.is_file()]
            return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            return []

    def contains(self, row: IndexRow, text: str, text_of: Callable[[Response], str]) -> bool:
        """Whether the recorded text of a response, else what ``text_of`` makes of its tokens, contains ``text``.

        Upper and lower case are alike. False for a body that cannot be read.
        """
        try:
            response = self.read(row)
        except DataError:
            return False
        return text.casefold() in (response.text or text_of(response)).casefold()
