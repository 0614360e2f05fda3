"""Which transport moves the weights of a run: what ``sync.transport`` says, or what the servers support.

``auto`` chooses between p2p and broadcast, which work over links that every server has. It never chooses the disk:
whether a folder is shared by all nodes, and fast and large enough for a version at each sync, cannot be seen from here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.config.pools import engines
from megasync.errors import RankLost, SyncError
from megasync.layout.adapter import adapter_layout
from megasync.layout.layout import Layout
from megasync.sync.attempt import PhaseFailed
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.sync.disk.adapters import AdapterFolders, AdapterSync
from megasync.sync.disk.sync import DiskSync
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.shard.sync import ShardSync
from megasync.sync.shared_memory import link_backend
from megasync.sync.weight_sync import TrainerRanks, WeightSync

if TYPE_CHECKING:
    from megasync.config.schema import Config
    from megasync.device import Device
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)


async def choose_sync(
    config: Config, run_dir: Path, layout: Layout, ranks: TrainerRanks, servers: Sequence[ServerControl], device: Device
) -> tuple[WeightSync[Any], str]:
    """The transport of a run, connected, and a sentence that says which one it is and why.

    Raises PublishError when the configured transport cannot reach the servers, and SyncError when another run uses
    `sync.disk_dir`.
    """
    wanted = config.sync.transport
    why = "sync.transport selects it"
    root = run_dir / "sync" if config.sync.disk_dir is None else Path(config.sync.disk_dir)
    adapters = adapter_layout(layout, config.trainer) if wanted == "adapters" else None
    plan = plan_broadcast(adapters or layout, config.sync.bucket_mb * 2**20, config.model.dtype)
    if wanted in ("adapters", "disk"):
        kinds = (AdapterFolders, AdapterSync) if adapters else (VersionFolders, DiskSync)
        folders = kinds[0](root, Path(config.model.path), plan, config.sync.disk_keep)
        await asyncio.to_thread(folders.prepare)
        sync = kinds[1](servers, ranks, plan, folders, config.sync, config.timeouts)
        await sync.connect()
        return sync, f"{'adapters' if adapters else 'weights'} go through {folders.root}: {why}"
    if wanted != "broadcast":
        shared = config.cluster.colocate
        backend = link_backend(shared, device)
        shards = ShardSync(
            servers, ranks, layout, config.model.dtype, backend, config.sync, config.timeouts, stages=not shared
        )
        try:
            await shards.connect()
        except SyncError as error:
            await shards.close()
            # NCCL makes no broadcast group of processes that share their devices, and SGLang none of pipeline stages or
            # several engines.
            parts = config.rollout.pipeline_parallel * engines(config.rollout)
            if wanted == "p2p" or shared or parts > 1 or _rank_lost(error):
                raise
            why = f"the servers cannot take shards: {error}"
            log.warning("Falling back to broadcast: %s", why)
        else:
            return shards, "weights go shard to shard: every server has the plugin, and its layout could be traced"
    broadcast = BroadcastSync(
        servers, ranks, plan, config.rollout.tensor_parallel, config.sync, config.timeouts, device
    )
    await broadcast.connect()
    return broadcast, f"weights go by broadcast: {why}"


def _rank_lost(error: SyncError) -> bool:
    """Whether a trainer rank was the cause, which says nothing about the servers."""
    cause = error.__cause__
    causes = cause.causes.values() if isinstance(cause, PhaseFailed) else [cause]
    return any(isinstance(failure, RankLost) for failure in causes)
