"""What running requests hold so far, by prompt, sample and turn: to be continued by a retry, or by another life of the run.

Invariant: only unfinished responses are here. A turn that is complete leaves at once (`SamplePartials.end`), because going
on behind its last token would be another response.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from megasync.buffer.trajectory import Partial
from megasync.rollout.parts import Parts


class Partials:
    """Of all groups that are being generated."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[int, int], tuple[str, Parts]]] = {}
        self._saved: dict[tuple[str, int, int], int] = {}

    def restore(self, uid: str, saved: Mapping[tuple[int, int], Partial]) -> None:
        """Puts back what was saved of a group, by (sample, turn)."""
        for key, partial in saved.items():
            self._groups.setdefault(uid, {})[key] = (partial.prompt_digest, Parts.of(partial))
            self._saved[uid, *key] = len(partial.token_ids)

    def sample(self, uid: str, index: int) -> SamplePartials:
        return SamplePartials(self._groups.setdefault(uid, {}), index)

    def forget(self, uid: str) -> None:
        """The group is complete, or given up."""
        for key in self._groups.pop(uid, {}):
            self._saved.pop((uid, *key), None)

    def unsaved(self) -> dict[tuple[str, int, int], Partial]:
        """Copies of what has grown since the last call, by (uid, sample, turn)."""
        grown = {}
        for uid, turns in self._groups.items():
            for key, (digest, parts) in turns.items():
                if len(parts.token_ids) > self._saved.get((uid, *key), 0):
                    grown[uid, *key] = parts.partial(digest)
                    self._saved[uid, *key] = len(parts.token_ids)
        return grown


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
