"""What the requests of running samples hold so far, by prompt, sample and turn: for a retry, or for another life of the run.

Invariant: a response that is complete is kept as complete (`Parts.finished`) and given again as it is, so nothing is ever
sampled behind its last token; one that is not is continued. Both hold for the very request alone (`request_digest`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from megasync.buffer.trajectory import Partial
from megasync.rollout.parts import Parts


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

    def unsaved(self) -> dict[tuple[str, int, int], Partial]:
        """Copies of what has changed since the last call, by (uid, sample, turn)."""
        changed = {}
        for uid, turns in self._groups.items():
            for key, (digest, parts) in turns.items():
                if parts.saved != parts.state:
                    changed[uid, *key] = parts.partial(digest)
                    parts.saved = parts.state
        return changed


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
