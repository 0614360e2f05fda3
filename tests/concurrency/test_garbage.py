"""Collections are short however many objects live, and cycles are still collected."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from waits import until

from megasync.concurrency import garbage
from megasync.concurrency.garbage import short_collections


class Node:
    def __init__(self) -> None:
        self.me = self


def allocate(count: int) -> list[Any]:
    return [[{}] for _ in range(count)]


async def test_survivors_are_not_scanned_again():
    collections: list[int] = []

    def scanned(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            collections.append(len(gc.get_objects()))

    gc.collect()
    async with short_collections():
        gc.callbacks.append(scanned)
        try:
            live = allocate(300_000)
        finally:
            gc.callbacks.remove(scanned)
    assert len(collections) > 10
    assert max(collections) < len(live) / 3


async def test_cycles_among_survivors_are_collected_by_the_full_collection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "FULL_SECONDS", 0.05)
    node = Node()
    seen = weakref.ref(node)
    async with short_collections():
        gc.freeze()
        del node
        gc.collect()
        assert seen() is not None
        await until(lambda: seen() is None)


async def test_the_collector_is_as_before_afterwards():
    callbacks = list(gc.callbacks)
    async with short_collections():
        assert gc.callbacks != callbacks
    assert gc.callbacks == callbacks
    assert gc.get_freeze_count() == 0
