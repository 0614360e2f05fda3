"""A published version is one that every server holds and that computes what the trainer computes.

A `WeightSync` moves the bytes; the publisher then asks trainer and servers for the log-probs of the same few tokens and
compares. It is the cheapest check that catches a wrong layout, a stale cache, a wrong scaling or a wrong kernel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from megasync.config.schema import SyncConfig
from megasync.errors import ParityError, ServerError, ServerParityError
from megasync.sync.choose import WeightSync
from megasync.sync.parity import compare

if TYPE_CHECKING:
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# Mean absolute log-prob difference per token that numerics alone do not explain, by served dtype. Prompts hold unlikely
# tokens, where bfloat16 is coarse: 0.04 to 0.05 is usual for a 135M model; wrong weights give more than 1.
PARITY_THRESHOLDS = {"float32": 1e-3, "bfloat16": 0.2}


class Scorer(Protocol):
    """Answers the log-prob of each token but the first, for one token sequence."""

    def __call__(self, server: ServerControl, token_ids: list[int]) -> Awaitable[list[float]]: ...


class Publisher:
    """`publish(version)` returns metrics, or raises SyncError or ParityError and leaves the version unpublished.

    A server that alone disagrees with the trainer is a fault of that server; that all do, of the weights. So a ParityError
    means that no server agreed when it was last asked, and a ServerParityError that the version is published on all others.
    The servers change while a run goes on; `servers` are those that the transport was made with.
    """

    def __init__(
        self,
        sync: WeightSync,
        *,
        config: SyncConfig,
        dtype: str,
        probes: Sequence[list[int]],
        servers: Sequence[ServerControl],
        trainer_logprobs: Callable[[list[list[int]]], Awaitable[list[list[float]]]],
        server_logprobs: Scorer,
    ) -> None:
        self._sync = sync
        # Prompts of one token have nothing to compare.
        self._every = config.parity_every if probes else 0
        self._threshold = PARITY_THRESHOLDS[dtype] if config.parity_threshold is None else config.parity_threshold
        self._probes = list(probes)
        self._servers = {server.url: server for server in servers}
        self._trainer_logprobs = trainer_logprobs
        self._server_logprobs = server_logprobs
        self._published = 0
        # Servers that agreed with the trainer when they were last asked.
        self._agree: set[str] = set()

    def add(self, server: ServerControl) -> None:
        """The next publish brings this server a whole version, whatever it holds now."""
        self._servers[server.url] = server
        self._sync.add(server)

    def remove(self, url: str) -> None:
        """The server is gone, or no longer part of the run."""
        self._servers.pop(url, None)
        self._agree.discard(url)
        self._sync.remove(url)

    def forget_ranks(self) -> None:
        """The trainer ranks were started again."""
        self._sync.forget_ranks()

    async def publish(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        """Brings every server, or those that `only` names, to the version."""
        report = await self._sync.publish(version, only)
        metrics = {f"sync/{phase}_seconds": seconds for phase, seconds in report.seconds.items()}
        metrics |= {"sync/bytes": float(report.bytes), "sync/version": float(version)}
        self._published += 1
        if self._every and self._published % self._every == 0:
            # A server that came up meanwhile has not been brought the version.
            try:
                metrics |= await self.check_parity(version, report.servers)
            except ServerParityError as found:
                raise ServerParityError(found.reasons, metrics | found.metrics) from found
        return metrics

    async def check_parity(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        """Compares trainer and servers on the probe prompts. Raises ParityError with both numbers when no server agrees,
        ServerParityError when some do.

        A server that does not answer is left out: it holds the version, and its health is somebody else's business.
        """
        if not self._every:
            return {}
        start = time.monotonic()
        servers = [server for url, server in self._servers.items() if only is None or url in only]
        trainer, *answers = await asyncio.gather(
            self._trainer_logprobs(self._probes), *(self._ask(server) for server in servers)
        )
        worst: list[float] = []
        reasons: dict[str, ParityError] = {}
        for server, answer in zip(servers, answers, strict=True):
            if answer is None:
                continue
            try:
                worst.append(compare(trainer, answer, self._threshold, engine=server.url, version=version))
                self._agree.add(server.url)
            except ParityError as error:
                reasons[server.url] = error
                self._agree.discard(server.url)
        metrics = {"sync/parity_seconds": time.monotonic() - start, "sync/parity_failures": float(len(reasons))}
        if worst:
            metrics["sync/parity"] = max(worst)
        if reasons and not self._agree:
            raise next(iter(reasons.values()))
        if reasons:
            agree = f"{len(self._agree)} other servers agree with the trainer (sync.parity_threshold)"
            raise ServerParityError({url: f"{error}; {agree}" for url, error in reasons.items()}, metrics)
        return metrics

    async def _ask(self, server: ServerControl) -> list[list[float]] | None:
        try:
            return await asyncio.gather(*(self._server_logprobs(server, probe) for probe in self._probes))
        except ServerError as error:
            log.warning("log-probs could not be compared with those of %s: %s", server.url, error)
            return None
