"""What the requests of running samples hold so far, by prompt, sample and turn: for a retry, or for another life of the run.

Invariant: a response that is complete is kept as complete (`Parts.finished`) and given again as it is, so nothing is ever
sampled behind its last token; one that is not is continued. Both hold for the very request alone (`request_digest`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from megasync.rollout.parts import Parts
from megasync.trajectory import Partial

# Tokens of one piece: a message of a few megabytes, which the buffer records in a fraction of a second. A longer response
# is a piece of its own.
PIECE_TOKENS = 2**18


class Partials:
    """Of all groups that are being generated."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[int, int], tuple[str, Parts]]] = {}

    def restore(self, uid: str, saved: Mapping[tuple[int, int], Partial]) -> None:
        """Puts back what was saved of a group, by (sample, turn)."""
        for key, partial in saved.items():
            self._groups.setdefault(uid, {})[key] = (partial.request_digest, Parts.of(partial))

    def sample(self, uid: str, index: int) -> SamplePartials:
        return SamplePartials(self._groups.setdefault(uid, {}), index)

    def forget(self, uid: str) -> None:
        """The group is complete, or given up."""
        self._groups.pop(uid, None)

    def unsaved(self) -> Iterator[dict[tuple[str, int, int], Partial]]:
        """Copies of what has changed since it was saved, by (uid, sample, turn), in pieces of `PIECE_TOKENS` or so.

        Asking for the next piece says that the one before is saved; one that failed to be is given again by the next call.
        Groups may come and go between two pieces.
        """
        piece: dict[tuple[str, int, int], Partial] = {}
        copied: list[tuple[Parts, tuple[int, str]]] = []
        tokens = 0
        for uid, key in [(uid, key) for uid, turns in self._groups.items() for key in turns]:
            if (known := self._groups.get(uid, {}).get(key)) is None or known[1].saved == known[1].state:
                continue
            digest, parts = known
            piece[uid, *key] = parts.partial(digest)
            copied.append((parts, parts.state))
            tokens += len(parts.token_ids)
            if tokens >= PIECE_TOKENS:
                yield piece
                _note_saved(copied)
                piece, copied, tokens = {}, [], 0
        if piece:
            yield piece
            _note_saved(copied)


def _note_saved(copied: Sequence[tuple[Parts, tuple[int, str]]]) -> None:
    for parts, state in copied:
        parts.saved = state


class SamplePartials:
    """Those of one sample's turns."""

    def __init__(self, turns: dict[tuple[int, int], tuple[str, Parts]], sample: int) -> None:
        self._turns = turns
        self._sample = sample

    def begin(self, turn: int, digest: str) -> Parts:
        """What is there already of the response to this very request; empty when there is nothing, or it was another."""
        known = self._turns.get((self._sample, turn))
        if known is None or known[0] != digest:
            known = self._turns[self._sample, turn] = (digest, Parts())
        return known[1]

    def forget_finished(self) -> None:
        """The sample failed by itself: the same answers would only fail it again."""
        for key, (_, parts) in list(self._turns.items()):
            if key[0] == self._sample and parts.finished:
                del self._turns[key]


def request_digest(prompt_ids: Sequence[int], params: Mapping[str, Any]) -> str:
    """Of all that a response depends on but the seed. With another budget or stop text it would end elsewhere."""
    digest = hashlib.sha256(array("q", prompt_ids).tobytes())
    digest.update(orjson.dumps(dict(params), option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()[:32]
