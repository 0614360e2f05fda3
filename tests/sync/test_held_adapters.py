"""Versions of adapters that servers keep for an evaluation while newer ones are published. No server, no ranks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fake_control import FakeControl

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.errors import SyncError
from megasync.sync.disk.adapters import AdapterSync
from megasync.sync.disk.sync import SealedVersion


class Server(FakeControl):
    """Serves the adapters that it was told to load."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.loaded: list[str] = []

    async def answer(self, path: str, body: dict[str, Any]) -> None:
        if path == "/load_lora_adapter":
            assert body["lora_name"] not in self.loaded
            self.loaded.append(body["lora_name"])
        if path == "/unload_lora_adapter":
            self.loaded.remove(body["lora_name"])
        if path == "/update_weight_version":
            self.version = body["new_version"]


class Folders:
    """Folders of versions, of which `left` were not pruned the last time."""

    def __init__(self, root) -> None:
        self.root = root
        self.left: set[str] = set()

    def prune(self, busy) -> None:
        self.left = {path.name for path in busy}


@pytest.fixture
def world(tmp_path):
    """(sync, its servers, its folders, a function that seals a version as if the ranks had written it)"""
    servers, folders, ranks = [Server("http://a"), Server("http://b")], Folders(tmp_path), SimpleNamespace()
    plan: Any = None
    sync = AdapterSync(servers, ranks, plan, folders, SyncConfig(transport="adapters"), TimeoutConfig())

    async def publish(version: int) -> None:
        sync._last = SealedVersion(version, tmp_path / f"v{version}", {})
        await sync.publish(version, only=list(sync._servers))

    return sync, servers, folders, publish


async def test_a_held_version_stays_loaded_and_on_the_disk_until_it_is_let_go(world):
    sync, servers, folders, publish = world
    await publish(3)
    assert await sync.hold(3) == "kept-3"
    for version in (4, 5, 6):
        await publish(version)
    assert all(server.loaded == ["policy-3", "kept-3", "policy-4", "policy-5", "policy-6"] for server in servers)
    assert folders.left == {"v3", "v6"}
    sync.let_go("kept-3")
    await publish(7)
    assert all("kept-3" not in server.loaded for server in servers)
    assert folders.left == {"v7"}


async def test_only_the_version_that_was_published_last_can_be_held_and_is_loaded_once(world):
    sync, servers, _, publish = world
    assert await sync.hold(0) is None
    await publish(3)
    assert await sync.hold(2) is None
    sync.let_go(await sync.hold(3))
    assert await sync.hold(3) == "kept-3"
    assert all(server.loaded == ["policy-3", "kept-3"] for server in servers)
    await publish(4)
    assert await sync.hold(3) is None


async def test_a_server_that_joins_has_the_held_version_before_it_serves(world):
    sync, _, _, publish = world
    await publish(3)
    await sync.hold(3)
    await publish(4)
    late = Server("http://late")
    sync.add(late)
    await sync.publish(4, only=[late.url])
    assert late.loaded == ["kept-3", "policy-4"] and late.version == "4"


async def test_a_hold_that_is_cancelled_leaves_nothing_held(world):
    sync, servers, folders, publish = world
    await publish(3)
    servers[0].faults["/load_lora_adapter"] = ["hang"]
    holding = asyncio.create_task(sync.hold(3))
    while servers[0].faults["/load_lora_adapter"]:
        await asyncio.sleep(0)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    await publish(4)
    assert folders.left - {"v3"} == {"v4"}
    assert "kept-3" not in servers[1].loaded and "kept-3" not in servers[0].loaded


async def test_a_version_that_a_server_does_not_load_is_not_held(world):
    sync, servers, folders, publish = world
    await publish(3)
    servers[1].faults["/load_lora_adapter"] = ["out of memory"]
    with pytest.raises(SyncError, match=r"kept-3 was not loaded: http://b: .*out of memory"):
        await sync.hold(3)
    await publish(4)
    assert all("kept-3" not in server.loaded for server in servers)
    assert folders.left == {"v4"}
