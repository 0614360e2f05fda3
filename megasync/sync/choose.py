"""Which transport moves the weights of a run: what ``sync.transport`` says, or what the servers can take.

``auto`` chooses between links, which every server of a run has. It never writes to a disk by itself: whether a folder is
shared by all nodes, and fast and large enough for a version at each sync, cannot be seen from here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megasync.errors import RankLost, SyncError
from megasync.layout.layout import Layout
from megasync.serving.control import ServerControl
from megasync.sync.attempt import PhaseFailed, SyncReport
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync, TrainerRanks
from megasync.sync.disk.sync import DiskSync
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.shard.sync import ShardSync

if TYPE_CHECKING:
    from megasync.config.schema import Config
    from megasync.device import Device

log = logging.getLogger(__name__)


class WeightSync(Protocol):
    """A transport: `publish` returns when every server reports the version, or raises and says who serves what."""

    @property
    def quarantined(self) -> dict[str, str]:
        """Servers that a failed publish left paused, with the reason."""

    async def connect(self) -> None:
        """Does what needs no pause ahead of the first publish. Raises PublishError."""

    def add(self, server: ServerControl) -> None:
        """From the next publish on this server is updated too, whatever it holds now."""

    def remove(self, url: str) -> None:
        """The server is no longer updated."""

    def forget_ranks(self) -> None:
        """The trainer ranks were started again, and know of no server."""

    async def publish(self, version: int, only: Collection[str] | None = None) -> SyncReport:
        """Moves the trainer's weights into every server, or those that ``only`` names. Raises PublishError."""

    async def close(self) -> None:
        """Leaves the links on both sides."""


async def choose_sync(
    config: Config, run_dir: Path, layout: Layout, ranks: TrainerRanks, servers: Sequence[ServerControl], device: Device
) -> tuple[WeightSync, str]:
    """The transport of a run, connected, and a sentence that says which one it is and why.

    Raises:
        PublishError: the transport that the configuration names cannot reach the servers.
    """
    wanted = config.sync.transport
    why = "sync.transport asks for it"
    plan = plan_broadcast(layout, config.sync.bucket_mb * 2**20, config.model.dtype)
    if wanted == "disk":
        root = run_dir / "sync" if config.sync.disk_dir is None else Path(config.sync.disk_dir)
        folders = VersionFolders(root, Path(config.model.path), plan, config.sync.disk_keep)
        disk = DiskSync(servers, ranks, plan, folders, config.sync, config.timeouts)
        await disk.connect()
        return disk, f"weights go through {folders.root}: {why}"
    if wanted != "broadcast":
        shards = ShardSync(
            servers,
            ranks,
            layout,
            config.model.dtype,
            device.backend,
            config.sync,
            config.timeouts,
        )
        try:
            await shards.connect()
        except SyncError as error:
            await shards.close()
            if wanted == "p2p" or _rank_lost(error):
                raise
            why = f"the servers cannot take shards: {error}"
            log.warning("weights go by broadcast, as %s", why)
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
    found = cause.causes.values() if isinstance(cause, PhaseFailed) else [cause]
    return any(isinstance(failure, RankLost) for failure in found)
