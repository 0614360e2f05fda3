"""Partial responses that grow without a server."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from megasync.rollout.partials import PartialResponse
from megasync.serving.answers import Finish, GeneratedPiece


def grow(parts: PartialResponse, ids: Sequence[int], version: int = 1) -> None:
    """One request, aborted after these tokens."""
    parts.begin_request(len(ids))
    spans = [(version, len(ids))]
    parts.add(GeneratedPiece(array("i", ids), array("f", [-0.5] * len(ids)), "", Finish("abort"), version, spans))
