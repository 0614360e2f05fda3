"""Trainer ranks that hold shards of a model, as processes, and transports between them and real servers."""

from __future__ import annotations

import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hf_models import make_model, models, save_model
from real_servers import SharedServers

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.device import Device
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.serving.control import ServerControl
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.sync.disk.sync import DiskSync
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.shard.sync import ShardSync

# The benchmark of the same room starts its ranks the same way.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from local_ranks import LocalRanks

__all__ = ["local_ranks", "make_model", "models", "save_model"]


SHARED = pytest.StashKey[SharedServers]()


@pytest.fixture
def dense_servers(models, request, tmp_path_factory) -> list[str]:
    """URLs of running servers of the first model: two of one rank and one of two ranks."""
    if SHARED not in request.config.stash:
        request.config.stash[SHARED] = SharedServers(models[0][0][0], tmp_path_factory.mktemp("logs"))
    return request.config.stash[SHARED].urls()


# After the test's own fixtures, which may use the servers.
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if shared := item.config.stash.get(SHARED, None):
        shared.after(nextitem)


@pytest.fixture
async def local_ranks():
    """Starts trainer ranks as processes; ends them with the test."""
    started = []

    async def start(*args) -> LocalRanks:
        started.append(await LocalRanks.start(*args))
        return started[-1]

    yield start
    for ranks in started:
        await ranks.stop()


@pytest.fixture
async def control():
    """Makes the control of a server, and closes it with the test."""
    async with AsyncExitStack() as stack:

        def make(*arguments) -> ServerControl:
            made = ServerControl(*arguments)
            stack.push_async_callback(made.close)
            return made

        yield make


@pytest.fixture
async def publishing(local_ranks, control, tmp_path):
    """Makes (a transport by its name, the ranks that hold the model of ``folder``); closes it with the test.

    ``tensor`` are the tensor-parallel ranks of each server, ``config`` are fields of `SyncConfig`.
    """
    made = []

    async def make(
        kind, folder, servers, topology, bucket_bytes=2**20, dtype="float32", ranks=None, tensor=1, seconds=60.0,
        stall=20.0, **config,
    ):  # fmt: skip
        ranks = ranks or await local_ranks(folder, topology, bucket_bytes, dtype)
        layout = Layout(read_hf_config(folder), topology)
        plan = plan_broadcast(layout, bucket_bytes, dtype)
        settings, timeouts = SyncConfig(bucket_mb=1, **config), TimeoutConfig(weight_sync=seconds, sync_stall=stall)
        if kind == "p2p":
            sync = ShardSync(servers, ranks, layout, dtype, "gloo", settings, timeouts)
            # As the ranks have it; smaller than the configuration allows, so that a tiny model takes many buckets.
            sync._bucket_bytes = bucket_bytes
        elif kind == "disk":
            folders = VersionFolders(tmp_path / "sync", folder, plan, keep=2)
            sync = DiskSync(servers, ranks, plan, folders, settings, timeouts)
        else:
            sync = BroadcastSync(servers, ranks, plan, tensor, settings, timeouts, Device("cpu"))
            # Group names count from one in each BroadcastSync; servers outlive the one of a test.
            sync._connections = int(time.monotonic() * 1000)
        made.append(sync)
        return sync, ranks

    yield make
    for sync in made:
        await sync.close()
