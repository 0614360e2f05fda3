"""Collections are short however many objects live, and cycles are still collected."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("collections", "pauses"),
    [
        ("_collect_young", [garbage.LEAST_SECONDS, 1 / garbage.SHARE, 1 / garbage.SHARE]),
        ("_collect_all", [garbage.FIRST_SECONDS, 1 / garbage.FULL_SHARE, 1 / garbage.FULL_SHARE]),
    ],
)
async def test_collections_take_their_share_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch, collections, pauses):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if len(slept) == len(pauses):
            raise InterruptedError
        slept.append(seconds)

    # Two readings for each collection, which takes a second.
    monkeypatch.setattr(garbage, "time", SimpleNamespace(perf_counter=iter(range(10**6)).__next__))
    monkeypatch.setattr(garbage, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(InterruptedError):
        await getattr(garbage, collections)()
    assert slept == pauses


async def test_the_collector_is_as_before_afterwards():
    before = list(gc.callbacks), gc.get_threshold()
    async with short_collections():
        assert gc.callbacks != before[0] and gc.get_threshold() != before[1]
    assert (gc.callbacks, gc.get_threshold()) == before
    assert gc.get_freeze_count() == 0
