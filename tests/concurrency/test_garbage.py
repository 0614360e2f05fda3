"""Collections are short however many objects live, and cycles are still collected."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
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
            live = allocate(6 * garbage.YOUNG)
        finally:
            gc.callbacks.remove(scanned)
    assert len(collections) > 10
    assert max(collections) < len(live) / 3


async def test_what_a_burst_of_requests_frees_again_is_not_scanned():
    collections: list[str] = []
    async with short_collections():
        gc.callbacks.append(lambda phase, info: collections.append(phase))
        try:
            for _ in range(100):
                allocate(garbage.YOUNG // 10)
        finally:
            gc.callbacks.pop()
    assert not collections


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


async def test_young_cycles_are_collected_by_the_clock():
    async with short_collections():
        node = Node()
        seen = weakref.ref(node)
        del node
        await until(lambda: seen() is None)


async def test_young_collections_take_their_share_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds != garbage.FULL_SECONDS:
            pauses.append(seconds)
        await sleep(0.001)

    # Two readings for each collection, which takes a second.
    monkeypatch.setattr(garbage, "time", SimpleNamespace(perf_counter=iter(range(10**6)).__next__))
    monkeypatch.setattr(garbage, "asyncio", SimpleNamespace(sleep=noted, create_task=asyncio.create_task))
    async with short_collections():
        await until(lambda: len(pauses) == 3)
    assert pauses[:3] == [garbage.LEAST_SECONDS, 1 / garbage.SHARE, 1 / garbage.SHARE]


async def test_the_collector_is_as_before_afterwards():
    before = list(gc.callbacks), gc.get_threshold()
    async with short_collections():
        assert gc.callbacks != before[0] and gc.get_threshold() != before[1]
    assert (gc.callbacks, gc.get_threshold()) == before
    assert gc.get_freeze_count() == 0
