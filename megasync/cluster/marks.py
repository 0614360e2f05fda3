"""Nodes that are kept for one pool carry a mark, a Ray resource, that the pool's bundles then ask for."""

from __future__ import annotations

from collections.abc import Mapping

POOLS = ("trainer", "rollout")
# More than any number of bundles; a bundle takes one.
PLENTY = 10_000


def mark_of(pool: str) -> str:
    return f"megasync_{pool}"


def marked(pool: str, resources: Mapping[str, float]) -> dict[str, float]:
    """What a bundle of the pool asks for beyond its devices, in a cluster with these resources."""
    return {mark_of(pool): 1.0} if mark_of(pool) in resources else {}
