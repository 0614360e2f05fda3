"""One server as a shard-to-shard sync sees it: what its process has been told, and the calls of one commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megasync.errors import ServerError, SyncError
from megasync.serving.engine_protocol import REFUSED
from megasync.sync.attempt import Attempt
from megasync.sync.served import RECOVERY_SECONDS, Served, begin_update

if TYPE_CHECKING:
    from megasync.layout.engine_layout import EngineRank
    from megasync.serving.engine_control import EngineControl

log = logging.getLogger(__name__)

# Between two questions whether a version is staged: while it is being sent, and after.
SENDING_POLL_SECONDS = 1.0
POLL_SECONDS = 0.01


class Engine(Served):
    """A server, by its control; ``seconds`` is the deadline of each call.

    Attributes:
        kind: digest of what its ranks keep; engines of one kind receive the same parcels.
        links: name of its links to the trainer, or "" when new ones have to be made.
        base: the attempt that its arena holds whole, or "".
        stages: False without room for an arena: it then receives while it is paused.
    """

    def __init__(self, control: EngineControl, pause_mode: str, seconds: float) -> None:
        super().__init__(control.server, pause_mode, seconds)
        self.control = control
        self.kind = self.links = self.base = ""
        self.stages = True
        self._instance = ""

    # Before the first version

    async def is_new(self) -> bool:
        """True for a process that has no program yet; what was known of an earlier process is forgotten."""
        found = "-".join(rank["instance"] for rank in await self.control.hello(self._seconds))
        if found != self._instance:
            self.kind = self.links = self.base = ""
            self._instance = found
        return not self.kind

    async def trace(self, specs: list[tuple[str, tuple[int, ...]]]) -> list[EngineRank]:
        return await self.control.trace(specs, self._seconds)

    async def take_program(self, kind: str, program: Mapping[str, Any]) -> None:
        """Tells the ranks what they receive of every version; see `Receiver`."""
        answers = await self.control.call("program", dict(program), self._seconds)
        self.stages = all(answer["stages"] for answer in answers)
        self.kind = kind
        if not self.stages:
            need = max(answer["bytes"] for answer in answers) / 2**20
            log.warning(
                "%s has no room to stage a version, which takes %.0f MiB on a rank (sync.arena_mb): it is paused "
                "during the whole transfer",
                self.url,
                need,
            )

    # Stage

    async def stage(self, request: Mapping[str, Any]) -> None:
        """Starts to receive; returns at once."""
        await self.control.call("stage", dict(request), self._seconds)

    async def staged(self, name: str, ranks: int, sending: asyncio.Future) -> list[int]:
        """Waits until each of its ``ranks`` holds the attempt; their digests. Raises SyncError with a rank's own reason.

        The senders hear of it and say so at the end of ``sending``. A question to the server itself is answered just
        before a decoding step, which a commit that follows at once has to wait for; so there are few.
        """
        while True:
            await asyncio.wait([sending], timeout=SENDING_POLL_SECONDS)
            if sending.done() and not sending.exception():
                heard = (entry for result in sending.result() for entry in result["confirmed"])
                confirmed = {tp: value for url, tp, value, _ in heard if url == self.url}
                if len(confirmed) == ranks:
                    return [confirmed[tp] for tp in range(ranks)]
            reports = await self.control.call("poll", {}, self._seconds)
            for tp, report in enumerate(reports):
                if report["attempt"] != name or report["state"] == "failed":
                    raise SyncError(f"rank {tp} of the server could not stage: {report['error'] or report['state']}")
            if all(report["state"] == "staged" for report in reports):
                if sending.done():
                    # No sender heard of it, so a confirmation may still be on its way: not over links of a later attempt.
                    self.links = ""
                return [report["digest"] for report in reports]
            await asyncio.sleep(POLL_SECONDS)

    # Commit

    async def pause(self, attempt: Attempt) -> None:
        """Stops generation and opens a weight update, for which the decoding step under way must end first."""
        await super().pause(attempt)
        standing = attempt.standing[self.url]
        standing.begun = True
        await begin_update(self.server, self._seconds)
        attempt.note("running_step", time.monotonic() - standing.since)

    async def load(self, body: Mapping[str, Any], attempt: Attempt) -> None:
        """Has the ranks write the version: a local copy of what is staged, or what ``body`` lets them receive."""
        standing, start = attempt.standing[self.url], time.monotonic()
        standing.in_doubt = True
        flush = self._pause_mode != "in_place"
        try:
            await self.control.load(dict(body), str(attempt.version), flush, self._seconds)
        except ServerError as error:
            standing.in_doubt = REFUSED not in str(error)
            raise
        standing.in_doubt, standing.moved = False, True
        attempt.note("copy", time.monotonic() - start)

    async def go_on(self, attempt: Attempt) -> None:
        """Closes the update and generates again."""
        start = time.monotonic()
        await self._post("/end_weight_update")
        attempt.standing[self.url].begun = False
        await super().go_on(attempt)
        attempt.note("resume", time.monotonic() - start)

    # Clean-up

    async def drop(self, stall: float) -> bool:
        """Waits until no rank receives any more, ``stall`` seconds at most, and drops what it has. Whether it answered."""
        self.links = self.base = ""
        end = time.monotonic() + stall
        try:
            while time.monotonic() < end:
                reports = await self.control.call("poll", {}, RECOVERY_SECONDS)
                if all(report["state"] != "running" for report in reports):
                    break
                await asyncio.sleep(10 * POLL_SECONDS)
            await self.control.call("drop", {}, RECOVERY_SECONDS)
        except ServerError as error:
            log.warning("%s could not be told to drop a staged version: %s", self.url, error)
            return False
        return True
