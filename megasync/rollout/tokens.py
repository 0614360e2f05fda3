"""The token ids of prompts and conversations: growing arrays, shared by everything that begins with the same tokens.

    prompt = Tokens.of([1, 2, 3])
    answered = prompt + [7, 8]       # one array holds both: 1 2 3 7 8
    other = prompt + [9]             # the array has gone on differently, so this is a copy: 1 2 3 9

A conversation of 50 turns thus holds its tokens once, and a turn costs what it adds. What is known of an array's first
ids, that they are in the vocabulary, what their digest is and which experts they went to, is known once for all prompts
that begin with them.

Invariant: an array is only ever appended to, so what a `Tokens` holds never changes. `_Line.append` guarantees it. Not
thread-safe: tokens are extended on the event loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megasync.errors import DataError, raised_as
from megasync.layout.routes import RouteArray
from megasync.trajectory.runs import IntArray, int_array

# An array that is full grows by this share of its length, and by at least this many ids.
_GROWTH, _LEAST_GROWTH = 1 / 16, 64
# Last ids that are compared before all of them.
_COMPARED = 16
_NO_IDS = np.empty(0, np.int32)
_NO_ROUTES = np.empty((0, 0, 0), np.uint8)
_NO_ROUTES.flags.writeable = False


class Tokens(Sequence[int]):
    """An immutable sequence of token ids, [tokens]. `tokens + ids` appends ids, as a list or an array."""

    __slots__ = ("_length", "_line")

    def __init__(self, line: _Line, length: int) -> None:
        """The first `length` ids of a line; `of` and `+` make tokens from anything else."""
        self._line = line
        self._length = length

    @classmethod
    def of(cls, ids: Sequence[int] | NDArray[Any]) -> Tokens:
        """Raises DataError for what is not a sequence of integers of 32 bits."""
        if isinstance(ids, Tokens):
            return ids
        line = _Line(id_array(ids).copy() if len(ids) else _NO_IDS)
        return cls(line, line.length)

    @property
    def array(self) -> IntArray:
        """A read-only view of the ids, [tokens]."""
        view = self._line.ids[: self._length]
        view.flags.writeable = False
        return view

    def first(self, count: int) -> Tokens:
        """The first `count` ids, without a copy."""
        return Tokens(self._line, min(count, self._length))

    def begins_with(self, other: Tokens) -> bool:
        if other._length > self._length:
            return False
        if other._line is self._line:
            return True
        size, ids, theirs = other._length, self._line.ids, other._line.ids
        # Other conversations mostly differ in the last ids, which saves comparing all of them.
        last = slice(max(0, size - _COMPARED), size)
        return ids[last].tobytes() == theirs[last].tobytes() and np.array_equal(ids[:size], theirs[:size])

    def check(self, vocab_size: int) -> None:
        """Raises DataError for an id outside [0, vocab_size). Looks only at ids that were not checked before."""
        self._line.check(self._length, vocab_size)

    def digest(self, rest: bytes = b"") -> str:
        """SHA-256 of all ids and the `rest`, in hexadecimal. Hashes only ids that were not hashed before."""
        return self._line.digest(self._length, rest)

    @property
    def routed(self) -> int:
        """The number of first positions whose routes are known."""
        return min(self._length, len(self._line.routes))

    @property
    def routes(self) -> RouteArray | None:
        """A read-only view of the routes of all positions but the last; None unless all of them are known."""
        if not self._length or self.routed < self._length - 1 or not self._line.routes.shape[1]:
            return None
        view = self._line.routes[: self._length - 1]
        view.flags.writeable = False
        return view

    def add_routes(self, start: int, routes: RouteArray) -> None:
        """Adds those of the positions from `start` on; positions whose routes are known keep them."""
        self._line.add_routes(start, routes[: max(0, self._length - start)])

    def forget_routes(self, count: int) -> None:
        """Keeps those of the first `count` positions."""
        self._line.routes = self._line.routes[:count]

    def __add__(self, ids: Sequence[int] | NDArray[Any]) -> Tokens:
        """Raises DataError for what is not a sequence of integers of 32 bits."""
        added = ids.array if isinstance(ids, Tokens) else id_array(ids)
        line = self._line.continued(self._length, added)
        return Tokens(line, self._length + added.size)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._line.ids[: self._length][index].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            return self._length == other._length and self.begins_with(other)
        return self[:] == other if isinstance(other, list) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the ids travel to another process: neither what is known of them, nor what follows them here."""
        return Tokens.of, (self.array,)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tokens({self[:]!r:.200})"


class _Line:
    """The array of ids that `Tokens` are prefixes of. Entries beyond `length` are unused."""

    __slots__ = ("_checked", "_digest", "_hashed", "_vocab_size", "ids", "length", "routes")

    def __init__(self, ids: IntArray, routes: RouteArray = _NO_ROUTES) -> None:
        self.ids = ids
        self.length = ids.size
        # Of the first ids; there are fewer than ids while a request runs.
        self.routes = routes
        # The first `_checked` ids are in [0, _vocab_size); `_digest` is of the first `_hashed` ids.
        self._vocab_size = self._checked = 0
        self._digest = hashlib.sha256()
        self._hashed = 0

    def continued(self, length: int, added: IntArray) -> _Line:
        """The line with the first `length` ids and then `added`: this one if it goes on so, or ends there."""
        overlap = self.ids[length : min(self.length, length + added.size)]
        if overlap.tobytes() == added[: overlap.size].tobytes():
            self.append(added[overlap.size :])
            return self
        return _Line(np.concatenate([self.ids[:length], added]), self.routes[:length])

    def add_routes(self, start: int, routes: RouteArray) -> None:
        count = len(self.routes)
        new = routes[count - start :]
        if start > count or not len(new):
            return
        self.routes = np.concatenate([self.routes, new]) if count else new

    def append(self, added: IntArray) -> None:
        end = self.length + added.size
        if end > self.ids.size:
            grown = np.empty(end + max(_LEAST_GROWTH, int(end * _GROWTH)), np.int32)
            grown[: self.length] = self.ids[: self.length]
            # Views of the array that was full stay as they are.
            self.ids = grown
        self.ids[self.length : end] = added
        self.length = end

    def check(self, length: int, vocab_size: int) -> None:
        if vocab_size != self._vocab_size:
            self._vocab_size, self._checked = vocab_size, 0
        unchecked = self.ids[self._checked : length]
        if not unchecked.size:
            return
        # A negative id is a large one without its sign.
        if unchecked.view(np.uint32).max() >= vocab_size:
            at = int(np.flatnonzero((unchecked < 0) | (unchecked >= vocab_size))[0])
            raise DataError(
                f"token id {unchecked[at]} at position {self._checked + at} is outside the vocabulary [0, {vocab_size})"
            )
        self._checked = length

    def digest(self, length: int, rest: bytes) -> str:
        if length < self._hashed:
            digest = hashlib.sha256(self.ids[:length].data)
        else:
            self._digest.update(self.ids[self._hashed : length].data)
            self._hashed = length
            digest = self._digest.copy()
        digest.update(rest)
        return digest.hexdigest()


def id_array(ids: Sequence[int] | NDArray[Any]) -> IntArray:
    """Token ids as a read-only array; see `int_array`. Raises DataError for other values than integers of 32 bits."""
    with raised_as(DataError, "token ids must be integers of 32 bits", of=ValueError):
        return int_array(ids)
