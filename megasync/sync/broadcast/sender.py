"""The trainer's side of a broadcast: the sender of each pipeline stage transmits bucket by bucket to every server at once.

In the engine group the sender is rank 0 and the servers' ranks follow. Gathering and deadlines are `StageSender`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megasync.sync.broadcast.plan import group_name
from megasync.sync.broadcast.stage_sender import StageSender, named
from megasync.sync.groups import Deadline


class BroadcastSender(StageSender):
    """One trainer rank's part in a weight broadcast."""

    activity = "wire"

    def join(self, name: str, addresses: Sequence[tuple[str, int] | None], engine_ranks: int, timeout: float) -> None:
        """Meets the stage's peers and the servers; call it on every rank while the servers join too.

        Args:
            name: prefix of the group names, unique to this attempt; servers join ``<name>-stage<k>``.
            addresses: what `listen` returned on each rank, in rank order.
            engine_ranks: ranks of all servers together.

        Raises:
            SyncError: someone did not come in time.
        """
        self._meet(name, addresses, timeout)
        if self._sends:
            self._join_group("engines", name, group_name(name, self._stage), 0, 1 + engine_ranks, timeout)

    def send(self, version: int, timeout: float) -> dict[str, float]:
        """Sends all of this stage's buckets, in plan order, within ``timeout`` seconds.

        Returns:
            Seconds by activity: ``pack`` (copying and gathering), ``wire`` (broadcasting), ``total``.

        Raises:
            SyncError: naming rank, bucket and version; this rank has then left its groups.
        """
        return self._run(f"send version {version}", timeout)

    def _deliver(self, index: int, message: torch.Tensor, deadline: Deadline) -> None:
        with named(f"broadcast of bucket {index + 1} of {len(self._buckets)}", self._buckets[index]):
            self._groups["engines"].broadcast(message, deadline)
