"""Which transport moves the weights of a run: what ``sync.transport`` says, or what the servers can take."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from megasync.errors import SyncError
from megasync.rollout.control import ServerControl
from megasync.rollout.engine_control import EngineControl
from megasync.sync.attempt import SyncReport
from megasync.sync.broadcast_plan import plan_broadcast
from megasync.sync.broadcast_sync import BroadcastSync, TrainerRanks
from megasync.sync.layout import Layout
from megasync.sync.shard_sync import ShardSync

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

    async def publish(self, version: int) -> SyncReport:
        """Moves the trainer's weights into every server. Raises PublishError."""

    async def close(self) -> None:
        """Leaves the links on both sides."""


async def choose_sync(
    config: Config, layout: Layout, ranks: TrainerRanks, servers: Sequence[ServerControl], device: Device
) -> tuple[WeightSync, str]:
    """The transport of a run, connected, and a sentence that says which one it is and why.

    Raises:
        PublishError: the transport that the configuration names cannot reach the servers.
    """
    wanted = config.sync.transport
    why = "sync.transport asks for it"
    if wanted != "broadcast":
        shards = ShardSync(
            [EngineControl(server) for server in servers],
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
            if wanted == "p2p":
                raise
            why = f"the servers cannot take shards: {error}"
            log.warning("weights go by broadcast, as %s", why)
        else:
            return shards, "weights go shard to shard: every server has the plugin, and its layout could be traced"
    plan = plan_broadcast(layout, config.sync.bucket_mb * 2**20, config.model.dtype)
    broadcast = BroadcastSync(
        servers, ranks, plan, config.rollout.tensor_parallel, config.sync, config.timeouts, device
    )
    await broadcast.connect()
    return broadcast, f"weights go by broadcast: {why}"
