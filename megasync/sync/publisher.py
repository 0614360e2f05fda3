"""Publishes a version: every server holds it, and computes with it what the trainer computes.

A `WeightSync` moves the bytes. The publisher then asks trainer and servers for the log-probs of the same few tokens and
compares them: the cheapest check that catches a wrong layout, a stale cache, a lost bucket, a wrong scaling or a wrong
kernel.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from megasync.config.schema import SyncConfig
from megasync.errors import ParityError, ServerError, ServerParityError
from megasync.sync.weight_sync import WeightSync

if TYPE_CHECKING:
    from megasync.serving.control import ServerControl
    from megasync.serving.disaggregated_control import EngineScores

log = logging.getLogger(__name__)

# Mean absolute log-prob difference per token that rounding does not explain, by served dtype. Prompts contain unlikely
# tokens, where bfloat16 is coarse: 0.04 to 0.05 is usual for a 135M model; wrong weights give more than 1.
PARITY_THRESHOLDS = {"float32": 1e-3, "bfloat16": 0.2, "float8_e4m3fn": 0.4}


# The phases in which weights move, of each transport: broadcast, shard to shard, disk.
MOVING = ("transfer", "stage", "write", "load")


class VersionPublisher:
    """`publish(version)` returns metrics, or raises SyncError or ParityError and leaves the version unpublished.

    One server that disagrees with the trainer is faulty itself; if all disagree, the weights are. So a ParityError
    means that no server agreed when it was last asked, and a ServerParityError that the version is published on all
    others. Servers come and go during a run.

    Args:
        servers: those that the transport was created with.
        server_logprobs: returns a server's log-prob of each token of a sequence but the first.
        engine_logprobs: returns what the engines of a server compute for the same tokens, nothing for a single engine.
    """

    def __init__(
        self,
        sync: WeightSync[Any],
        *,
        config: SyncConfig,
        dtype: str,
        probes: Sequence[list[int]],
        servers: Sequence[ServerControl],
        trainer_logprobs: Callable[[list[list[int]]], Awaitable[list[list[float]]]],
        server_logprobs: Callable[[ServerControl, list[int]], Awaitable[list[float]]],
        engine_logprobs: Callable[[ServerControl, list[int]], Awaitable[Sequence[EngineScores]]],
    ) -> None:
        self._sync = sync
        # Without probes there is nothing to compare.
        self._every = config.parity_every if probes else 0
        self._threshold = PARITY_THRESHOLDS[dtype] if config.parity_threshold is None else config.parity_threshold
        self._probes = list(probes)
        self._servers = {server.url: server for server in servers}
        self._trainer_logprobs = trainer_logprobs
        self._server_logprobs = server_logprobs
        self._engine_logprobs = engine_logprobs
        self._published = 0
        # Servers that agreed with the trainer when they were last asked.
        self._agree: set[str] = set()

    def add(self, server: ServerControl) -> None:
        """The next publish brings this server a complete version, whatever it holds now."""
        self._servers[server.url] = server
        self._sync.add(server)

    def remove(self, url: str) -> None:
        """The server is gone, or no longer part of the run."""
        self._servers.pop(url, None)
        self._agree.discard(url)
        self._sync.remove(url)

    def forget_ranks(self, data_parallel: int) -> None:
        """The trainer ranks were restarted, with this data-parallel size."""
        self._sync.forget_ranks(data_parallel)

    async def publish(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        """Brings every server, or those that `only` names, to the version; metrics of sync and parity check."""
        report = await self._sync.publish(version, only)
        metrics = {f"sync/{phase}_seconds": seconds for phase, seconds in report.seconds.items()}
        metrics |= {"sync/bytes": float(report.bytes), "sync/version": float(version)}
        if seconds := sum(report.seconds.get(phase, 0.0) for phase in MOVING):
            metrics["sync/bytes_per_second"] = report.bytes / seconds
        self._published += 1
        if self._every and self._published % self._every == 0:
            # Not those that joined meanwhile: they do not hold the version.
            try:
                metrics |= await self.check_parity(version, report.servers)
            except ServerParityError as error:
                raise ServerParityError(error.reasons, metrics | error.metrics) from error
        return metrics

    async def check_parity(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        """Compares trainer and servers on the probe prompts.

        A server that does not answer is left out: it holds the version, and others watch its health.

        Raises:
            ParityError: no server agrees with the trainer; has both numbers.
            ServerParityError: some servers do not agree.
        """
        if not self._every:
            return {}
        start = time.monotonic()
        servers = [server for url, server in self._servers.items() if only is None or url in only]
        trainer, answers = await asyncio.gather(
            self._trainer_logprobs(self._probes), asyncio.gather(*(self._ask(server) for server in servers))
        )
        worst: list[float] = []
        reasons: dict[str, ParityError] = {}
        for server, answer in zip(servers, answers, strict=True):
            if answer is None:
                continue
            scores, engines = answer
            try:
                what = f"{server.url}, version {version}"
                worst.append(compare_logprobs(trainer, scores, self._threshold, what))
                for pair in engines:
                    compare_logprobs([pair.expected], [pair.logprobs], self._threshold, f"{what}, {pair.engine}")
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

    async def _ask(self, server: ServerControl) -> tuple[list[list[float]], Sequence[EngineScores]] | None:
        """The log-probs of all probes, and those of its engines for the first one; None without an answer."""
        try:
            *scores, engines = await asyncio.gather(
                *(self._server_logprobs(server, probe) for probe in self._probes),
                self._engine_logprobs(server, self._probes[0]),
            )
            return cast(list[list[float]], scores), cast("Sequence[EngineScores]", engines)
        except ServerError as error:
            log.warning("%s did not return log-probs to compare: %s", server.url, error)
            return None


def compare_logprobs(
    trainer: Sequence[Sequence[float | None]], server: Sequence[Sequence[float | None]], threshold: float, what: str
) -> float:
    """Mean absolute difference per token, in nats, between two models' log-probs of the same prompts.

    Args:
        trainer, server: one list per prompt, one log-prob per token but the first; None stands for NaN, as in JSON. Of
            two engines of one server, those of the one that is compared with are ``trainer``.
        threshold: largest mean that passes, inclusive.
        what: the server and its version, for the error.

    Raises:
        ParityError: the mean is above the threshold or not finite, or the lengths differ.
    """
    lengths = [len(tokens) for tokens in trainer], [len(tokens) for tokens in server]
    if lengths[0] != lengths[1]:
        raise ParityError(f"{what}: trainer and server scored different tokens: lengths {lengths[0]} and {lengths[1]}")
    pairs = [
        (math.nan if ours is None else ours, math.nan if theirs is None else theirs, prompt, token)
        for prompt, (row, other) in enumerate(zip(trainer, server, strict=True))
        for token, (ours, theirs) in enumerate(zip(row, other, strict=True), 1)
    ]
    if not pairs:
        raise ParityError(f"{what}: no log-probs to compare; parity needs prompts of at least two tokens")
    gaps = [abs(ours - theirs) for ours, theirs, _, _ in pairs]
    mean = sum(gaps) / len(gaps)
    if math.isfinite(mean) and mean <= threshold:
        return mean
    worst = max(range(len(gaps)), key=lambda i: gaps[i] if math.isfinite(gaps[i]) else math.inf)
    ours, theirs, prompt, token = pairs[worst]
    raise ParityError(
        f"{what}: log-probs of the same weights differ by {mean:.3g} a token on average, over the threshold "
        f"{threshold:g}; worst at prompt {prompt}, token {token}: trainer {ours:.6f}, server {theirs:.6f}"
    )
