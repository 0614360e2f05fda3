"""A published version is one that every server holds and that computes what the trainer computes.

A `WeightSync` moves the bytes; the publisher then asks trainer and servers for the log-probs of the same few tokens and
compares. It is the cheapest check that catches a wrong layout, a stale cache, a wrong scaling or a wrong kernel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from megasync.config.schema import SyncConfig
from megasync.sync.choose import WeightSync
from megasync.sync.parity import compare

# Mean absolute log-prob difference per token that numerics alone do not explain, by served dtype. Prompts hold unlikely
# tokens, where bfloat16 is coarse: 0.04 to 0.05 is usual for a 135M model; wrong weights give more than 1.
PARITY_THRESHOLDS = {"float32": 1e-3, "bfloat16": 0.2}


class Scorer(Protocol):
    """Answers the log-prob of each token but the first, for one token sequence."""

    def __call__(self, server: int, token_ids: list[int]) -> Awaitable[list[float]]: ...


class Publisher:
    """`publish(version)` returns metrics, or raises SyncError or ParityError and leaves the version unpublished."""

    def __init__(
        self,
        sync: WeightSync,
        *,
        config: SyncConfig,
        dtype: str,
        probes: Sequence[list[int]],
        servers: int,
        trainer_logprobs: Callable[[list[list[int]]], Awaitable[list[list[float]]]],
        server_logprobs: Scorer,
    ) -> None:
        self._sync = sync
        # Prompts of one token have nothing to compare.
        self._every = config.parity_every if probes else 0
        self._threshold = PARITY_THRESHOLDS[dtype] if config.parity_threshold is None else config.parity_threshold
        self._probes = list(probes)
        self._servers = servers
        self._trainer_logprobs = trainer_logprobs
        self._server_logprobs = server_logprobs
        self._published = 0

    async def publish(self, version: int) -> dict[str, float]:
        report = await self._sync.publish(version)
        metrics = {f"sync/{phase}_seconds": seconds for phase, seconds in report.seconds.items()}
        metrics |= {"sync/bytes": float(report.bytes), "sync/version": float(version)}
        self._published += 1
        if self._every and self._published % self._every == 0:
            metrics |= await self.check_parity(version)
        return metrics

    async def check_parity(self, version: int) -> dict[str, float]:
        """Compares trainer and every server on the probe prompts. Raises ParityError with both numbers."""
        if not self._every:
            return {}
        start = time.monotonic()
        trainer, *servers = await asyncio.gather(
            self._trainer_logprobs(self._probes),
            *(
                asyncio.gather(*(self._server_logprobs(server, probe) for probe in self._probes))
                for server in range(self._servers)
            ),
        )
        worst = max(
            compare(trainer, answers, self._threshold, engine=f"server {server}", version=version)
            for server, answers in enumerate(servers)
        )
        return {"sync/parity": worst, "sync/parity_seconds": time.monotonic() - start}
