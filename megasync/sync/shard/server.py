"""One server in a shard-to-shard sync: what its process knows, and the calls of one commit."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megasync.errors import ServerError, SyncError
from megasync.serving.plugin_control import PluginControl
from megasync.serving.plugin_protocol import REFUSED
from megasync.sync.attempt import RECOVERY_SECONDS, Attempt, ServerUpdate, untouched
from megasync.sync.messages import (
    CommitRequest,
    Empty,
    ReceivePlanAnswer,
    ReceivePlanRequest,
    ReceiveRequest,
    SendReport,
    StageReport,
)
from megasync.sync.shard.feeds import Feed

if TYPE_CHECKING:
    from megasync.layout.engine_layout import EngineRank
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# Between two polls for a staged version: while it is being sent, and after.
SENDING_POLL_SECONDS = 1.0
POLL_SECONDS = 0.01


class ShardServer(ServerUpdate):
    """A server that receives shards.

    Attributes:
        signature: digest of what its ranks keep, or "" while it has no receive plan.
        feed: the trainer's replicas that send to it, or None before its first plan.
        plan: name of the plan by which they send; "" without a receive plan.
        links: name of its links to the trainer, or "" when new ones have to be made.
        base: the attempt that its arena holds completely, or "".
        stages: False without room for an arena: it then receives while it is paused.
    """

    def __init__(self, server: ServerControl, pause_mode: str, seconds: float) -> None:
        super().__init__(server, pause_mode, seconds)
        self.control = PluginControl(server)
        self.signature = self.plan = self.links = self.base = ""
        self.feed: Feed | None = None
        self.stages = True
        self._instances: tuple[str, ...] = ()

    # Before the first version

    def forget(self) -> None:
        """Nothing is known of its process; replicas that feed it stay."""
        self.signature = self.plan = self.links = self.base = ""

    async def is_new(self) -> bool:
        """True for a process that has no receive plan yet.

        While a server generates, it answers between two decoding steps. So one with links is not asked: it refuses to
        stage if its process is a new one.
        """
        if self.plan and not (self.links and self.stages):
            instances = tuple(rank.instance for rank in await self.control.hello(self._seconds))
            if instances != self._instances:
                self.forget()
        return not self.plan

    async def trace(self, specs: Iterable[tuple[str, Sequence[int]]], stall: float) -> list[EngineRank]:
        """Asks what the ranks keep. Whatever a driver that died has left is dropped first, within ``stall`` seconds."""
        self._instances = tuple(rank.instance for rank in await self.control.hello(self._seconds))
        await self.drop(stall)
        ranks = await self.control.trace(specs, self._seconds)
        self.signature = hashlib.sha256("".join(rank.digest() for rank in ranks).encode()).hexdigest()[:16]
        return ranks

    async def take_receive_plan(self, plan: str, request: ReceivePlanRequest) -> None:
        """Tells the ranks what they receive of every version."""
        answers = await self.control.call("receive_plan", request, ReceivePlanAnswer, self._seconds)
        self.stages = all(answer.stages for answer in answers)
        self.plan = plan
        if not self.stages and request.arena_bytes != 0:
            log.warning(
                "%s has no room to stage a version, which takes %.0f MiB on a rank (sync.arena_mb); pausing it during "
                "the whole transfer",
                self.url,
                max(answer.bytes for answer in answers) / 2**20,
            )

    # Stage

    async def stage(self, request: ReceiveRequest) -> bool:
        """Starts to receive; returns at once. False when a rank has no plan, because its process is new."""
        reports = await self.control.call("stage", request, StageReport, self._seconds)
        if any(report.state == "none" for report in reports):
            self.forget()
        return bool(self.plan)

    async def staged(self, name: str, ranks: int, sending: asyncio.Future[list[SendReport]]) -> list[int]:
        """Waits until each of its ``ranks`` holds the attempt; their digests. Raises SyncError with a rank's reason.

        The ranks confirm to the senders, who report it at the end of ``sending``. The server itself answers a poll just
        before a decoding step, which a commit right after it then has to wait for; so polls are few.
        """
        while True:
            await asyncio.wait([sending], timeout=SENDING_POLL_SECONDS)
            if sending.done():
                if error := sending.exception():
                    raise SyncError(f"the trainer failed: {error}")
                reported = (confirmation for report in sending.result() for confirmation in report.confirmed)
                confirmed = {rank.engine_rank: rank.digest for rank in reported if rank.url == self.url}
                if len(confirmed) == ranks:
                    return [confirmed[tp] for tp in range(ranks)]
            reports = await self.control.call("poll", Empty(), StageReport, self._seconds)
            for tp, report in enumerate(reports):
                if report.attempt != name or report.state == "failed":
                    raise SyncError(f"rank {tp} of the server could not stage: {report.error or report.state}")
            if all(report.state == "staged" for report in reports):
                return [report.digest for report in reports]
            await asyncio.sleep(POLL_SECONDS)

    # Commit

    async def pause(self, attempt: Attempt) -> None:
        """Stops generation and opens a weight update, for which the running decoding step must end first."""
        await super().pause(attempt)
        await self.begin(attempt)
        attempt.note("running_step", time.monotonic() - attempt.progress[self.url].paused_at)

    async def load(self, request: CommitRequest, attempt: Attempt) -> None:
        """Has the ranks write the version: what is staged, or what the request lets them receive."""
        progress, start = attempt.progress[self.url], time.monotonic()
        progress.in_doubt = True
        flush = self._pause_mode != "in_place"
        try:
            await self.control.load(request, str(attempt.version), flush, self._seconds)
        except ServerError as error:
            progress.in_doubt = not untouched(error, REFUSED)
            raise
        progress.in_doubt, progress.moved = False, True
        attempt.note("copy", time.monotonic() - start)

    async def resume(self, attempt: Attempt) -> None:
        """Closes the update and generates again."""
        start = time.monotonic()
        await self.end(attempt)
        await super().resume(attempt)
        attempt.note("resume", time.monotonic() - start)

    # Clean-up

    async def drop(self, stall: float) -> bool:
        """Waits at most ``stall`` seconds until no rank receives any more, and drops what is staged.

        Returns whether the server answered.
        """
        self.links = self.base = ""
        end = time.monotonic() + stall
        try:
            while time.monotonic() < end:
                reports = await self.control.call("poll", Empty(), StageReport, RECOVERY_SECONDS)
                if all(report.state != "running" for report in reports):
                    break
                await asyncio.sleep(10 * POLL_SECONDS)
            await self.control.call("drop", Empty(), Empty, RECOVERY_SECONDS)
        except ServerError as error:
            log.warning("%s did not drop its staged version: %s", self.url, error)
            return False
        return True
