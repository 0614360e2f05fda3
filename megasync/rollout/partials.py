"""What running requests hold so far, by prompt, sample and turn: to be continued by a retry, or by another life of the run.

Invariant: only unfinished responses are here. A turn that is complete leaves at once (`SamplePartials.end`), because going
on behind its last token would be another response.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence

from megasync.buffer.trajectory import Partial
from megasync.rollout.parts import Parts

# Tokens of one piece: a message of a few megabytes, which the buffer records in a fraction of a second. A longer response
# is a piece of its own.
PIECE_TOKENS = 2**18


class Partials:
    """Of all groups that are being generated."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[int, int], tuple[str, Parts]]] = {}
        # The prompt's digest and the number of tokens that were saved of each turn.
        self._saved: dict[str, dict[tuple[int, int], tuple[str, int]]] = {}

    def restore(self, uid: str, saved: Mapping[tuple[int, int], Partial]) -> None:
        """Puts back what was saved of a group, by (sample, turn)."""
        for key, partial in saved.items():
            self._groups.setdefault(uid, {})[key] = (partial.prompt_digest, Parts.of(partial))
            self._saved.setdefault(uid, {})[key] = (partial.prompt_digest, len(partial.token_ids))

    def sample(self, uid: str, index: int) -> SamplePartials:
        return SamplePartials(self._groups.setdefault(uid, {}), index)

    def forget(self, uid: str) -> None:
        """The group is complete, or given up."""
        self._groups.pop(uid, None)
        self._saved.pop(uid, None)

    def unsaved(self) -> Iterator[dict[tuple[str, int, int], Partial]]:
        """Copies of what has grown since it was saved, by (uid, sample, turn), in pieces of `PIECE_TOKENS` or so.

        Asking for the next piece says that the one before is saved; one that failed to be is given again by the next call.
        Groups may come and go between two pieces.
        """
        piece: dict[tuple[str, int, int], Partial] = {}
        tokens = 0
        for uid, key in [(uid, key) for uid, turns in self._groups.items() for key in turns]:
            if (known := self._groups.get(uid, {}).get(key)) is None:
                continue
            digest, parts = known
            saved_digest, saved = self._saved.get(uid, {}).get(key, (digest, 0))
            if len(parts.token_ids) <= (saved if saved_digest == digest else 0):
                continue
            piece[uid, *key] = parts.partial(digest)
            tokens += len(parts.token_ids)
            if tokens >= PIECE_TOKENS:
                yield piece
                self._note_saved(piece)
                piece, tokens = {}, 0
        if piece:
            yield piece
            self._note_saved(piece)

    def _note_saved(self, piece: Mapping[tuple[str, int, int], Partial]) -> None:
        for (uid, *key), partial in piece.items():
            # The group may be complete by now.
            if uid in self._groups:
                self._saved.setdefault(uid, {})[tuple(key)] = (partial.prompt_digest, len(partial.token_ids))


class SamplePartials:
    """Those of one sample's turns."""

    def __init__(self, turns: dict[tuple[int, int], tuple[str, Parts]], sample: int) -> None:
        self._turns = turns
        self._sample = sample

    def begin(self, turn: int, prompt_ids: Sequence[int]) -> Parts:
        """What is there already of the response to this very prompt; empty when there is nothing, or it was another."""
        digest = prompt_digest(prompt_ids)
        known = self._turns.get((self._sample, turn))
        if known is None or known[0] != digest:
            known = self._turns[self._sample, turn] = (digest, Parts())
        return known[1]

    def end(self, turn: int) -> None:
        self._turns.pop((self._sample, turn), None)


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    return hashlib.sha256(array("q", prompt_ids).tobytes()).hexdigest()[:32]
