"""One server in a shard-to-shard sync: what its process knows, and the calls of one commit."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from megasync.errors import ServerError, SyncError
from megasync.serving.engine_control import EngineControl
from megasync.serving.engine_protocol import REFUSED
from megasync.sync.attempt import Attempt
from megasync.sync.messages import (
    CommitRequest,
    Empty,
    ReceivePlanAnswer,
    ReceivePlanRequest,
    ReceiveRequest,
    SendReport,
    StageReport,
)
from megasync.sync.server_update import RECOVERY_SECONDS, ServerUpdate

if TYPE_CHECKING:
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# Between two polls for a staged version: while it is being sent, and after.
SENDING_POLL_SECONDS = 1.0
POLL_SECONDS = 0.01


class Engine(ServerUpdate):
    """A server that receives shards.

    Attributes:
        kind: digest of what its ranks keep, or "" while it has no receive plan; engines of one kind receive the same
            buckets.
        links: name of its links to the trainer, or "" when new ones have to be made.
        base: the attempt that its arena holds completely, or "".
        stages: False without room for an arena: it then receives while it is paused.
    """

    def __init__(self, server: ServerControl, pause_mode: str, seconds: float) -> None:
        super().__init__(server, pause_mode, seconds)
        self.control = EngineControl(server)
        self.kind = self.links = self.base = ""
        self.stages = True
        self._instance = ""

    # Before the first version

    async def is_new(self) -> bool:
        """True for a process that has no receive plan yet; forgets what was known of an earlier process."""
        instance = "-".join(rank.instance for rank in await self.control.hello(self._seconds))
        if instance != self._instance:
            self.kind = self.links = self.base = ""
            self._instance = instance
        return not self.kind

    async def take_receive_plan(self, kind: str, request: ReceivePlanRequest) -> None:
        """Tells the ranks what they receive of every version."""
        answers = await self.control.call("receive_plan", request, ReceivePlanAnswer, self._seconds)
        self.stages = all(answer.stages for answer in answers)
        self.kind = kind
        if not self.stages:
            log.warning(
                "%s has no room to stage a version, which takes %.0f MiB on a rank (sync.arena_mb); pausing it during "
                "the whole transfer",
                self.url,
                max(answer.bytes for answer in answers) / 2**20,
            )

    # Stage

    async def stage(self, request: ReceiveRequest) -> None:
        """Starts to receive; returns at once."""
        await self.control.call("stage", request, StageReport, self._seconds)

    async def staged(self, name: str, ranks: int, sending: asyncio.Future[list[SendReport]]) -> list[int]:
        """Waits until each of its ``ranks`` holds the attempt; their digests. Raises SyncError with a rank's reason.

        The ranks confirm to the senders, who report it at the end of ``sending``. The server itself answers a poll just
        before a decoding step, which a commit right after it then has to wait for; so polls are few.
        """
        while True:
            await asyncio.wait([sending], timeout=SENDING_POLL_SECONDS)
            if sending.done() and not sending.exception():
                reported = (confirmation for report in sending.result() for confirmation in report.confirmed)
                confirmed = {rank.engine_rank: rank.digest for rank in reported if rank.url == self.url}
                if len(confirmed) == ranks:
                    return [confirmed[tp] for tp in range(ranks)]
            reports = await self.control.call("poll", Empty(), StageReport, self._seconds)
            for tp, report in enumerate(reports):
                if report.attempt != name or report.state == "failed":
                    raise SyncError(f"rank {tp} of the server could not stage: {report.error or report.state}")
            if all(report.state == "staged" for report in reports):
                if sending.done():
                    # No sender received the confirmation. It may still be in flight, so these links are not used again.
                    self.links = ""
                return [report.digest for report in reports]
            await asyncio.sleep(POLL_SECONDS)

    # Commit

    async def pause(self, attempt: Attempt) -> None:
        """Stops generation and opens a weight update, for which the running decoding step must end first."""
        await super().pause(attempt)
        await self.begin(attempt)
        attempt.note("running_step", time.monotonic() - attempt.progress[self.url].paused_at)

    async def load(self, request: CommitRequest, attempt: Attempt) -> None:
        """Has the ranks write the version: a local copy of what is staged, or what the request lets them receive."""
        progress, start = attempt.progress[self.url], time.monotonic()
        progress.in_doubt = True
        flush = self._pause_mode != "in_place"
        try:
            await self.control.load(request, str(attempt.version), flush, self._seconds)
        except ServerError as error:
            progress.in_doubt = REFUSED not in str(error)
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
