"""What the run does when a trainer rank or a server is lost: everything else stays alive and waits.

    what is lost           what is done                                                                  bounded by
    ---------------------  ----------------------------------------------------------------------------  ------------------
    a trainer rank, in     new ranks from the newest checkpoint; the buffer takes back what was trained  trainer.max_restarts
    whatever it was doing  since; the weights are published under a number that was never used           in a row
    a server, in a sync    it leaves the router; the version is published to the rest                    the fleet
    a server that alone    started again; the run ends when all servers disagree with the trainer        the fleet
    fails parity
    a server, otherwise    nothing: the fleet starts it again, and it joins                              the fleet
    a joiner               brought the published version while the trainer waits, or with the next one   -

Invariant: the trainer's weights differ from the published ones only while ``progress.unpublished`` is not zero; so a
joiner is brought weights under a number that already names exactly them. `Progress.rewind` and `publish` guarantee it.

A rank that raised an error is no lost rank: it would raise it again, and the run ends with that error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from megasync.errors import Disagreement, RankLost, TrainingError
from megasync.sync.attempt import PublishError

if TYPE_CHECKING:
    from megasync.parts import Fleet, Observer, Publisher, Trainer
    from megasync.progress import Progress

log = logging.getLogger(__name__)

# Publishes in a row that may fail on the trainer's side although all of its ranks are alive, such as by a broken link.
LINK_FAILURES = 3


class Recovery:
    """Publishes, brings joiners, and starts the trainer again; each as often as the failures on the way ask for.

    A new version is published within `pause()`, which keeps requests away where they may not straddle two versions.
    """

    def __init__(
        self,
        max_restarts: int,
        *,
        trainer: Trainer,
        publisher: Publisher,
        buffer: Any,
        fleet: Fleet,
        observer: Observer,
        progress: Progress,
        pause: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._max_restarts = max_restarts
        self._trainer = trainer
        self._publisher = publisher
        self._buffer = buffer
        self._fleet = fleet
        self._observer = observer
        self._progress = progress
        self._pause = pause
        self._furthest = progress.step
        self._restarts_in_a_row = 0
        self._link_failures = 0
        self._faults: Counter[str] = Counter()

    def metrics(self) -> dict[str, float]:
        """How often each kind of loss was met in this run, since it was started or resumed."""
        kinds = ("trainer_restarts", "steps_trained_again", "failed_publishes", "servers_joined", "parity_restarts")
        return {f"faults/{kind}": float(self._faults[kind]) for kind in kinds}

    def stepped(self) -> None:
        """A step was trained; one beyond the furthest so far shows that restarting helps."""
        if self._progress.step > self._furthest:
            self._furthest, self._restarts_in_a_row = self._progress.step, 0

    # Servers

    async def publish(self) -> dict[str, float]:
        """Moves the trainer's weights into all servers as the next version, and frees the slots of what they hold.

        Raises RankLost when a rank was the reason that it failed.
        """
        self._observer.activity("trainer", "syncing weights")
        version = self._progress.claim()
        async with self._pause():
            metrics = await self._bring(version)
        self._progress.published(version)
        await self._buffer.publish(version)
        return metrics

    async def bring_joiners(self) -> None:
        """Servers that came up, or back, get the published version and serve. The fleet ends one that fails too often."""
        while joiners := {server.url for server in self._fleet.joiners()}:
            if self._progress.unpublished:
                # The trainer no longer has the published weights; these make a version of their own.
                await self.publish()
                continue
            self._observer.activity("trainer", f"bringing {len(joiners)} servers the weights")
            try:
                _, disagree = await self._ship(self._progress.version, joiners, joiners)
            except PublishError as error:
                await self._blame(error)
            else:
                await self._welcome(joiners - disagree, self._progress.version)

    async def attend(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work while the trainer is free to bring servers that join the weights: the work may need them."""
        working = asyncio.create_task(work, name="attended work")
        try:
            while not working.done():
                await self.bring_joiners()
                await self.until_one(working)
            working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def until_one(self, *waits: asyncio.Task) -> None:
        """Returns when one of these is done, or when the fleet has changed since it was last looked at."""
        changed = asyncio.create_task(self._fleet.changed(), name="changed")
        try:
            await asyncio.wait({*waits, changed}, return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                changed.result()
        finally:
            changed.cancel()
            await asyncio.gather(changed, return_exceptions=True)

    async def _bring(self, version: int) -> dict[str, float]:
        """Tries until all servers that are left hold the version; those that failed it once come last."""
        lost: set[str] = set()
        while True:
            joiners = {server.url for server in self._fleet.joiners()}
            targets = joiners | {server.url for server in self._fleet.serving()}
            if not targets:
                # The fleet brings one back, or ends the run by its watch.
                await self._fleet.changed()
                continue
            if targets <= lost:
                # Only such are left as failed before and still live; the fleet ends those that fail too often.
                lost.clear()
            try:
                metrics, disagree = await self._ship(version, targets, targets - lost if lost else None)
            except PublishError as error:
                lost |= await self._blame(error)
            else:
                await self._welcome(joiners - lost - disagree, version)
                if targets <= lost | disagree:
                    # None of them serves it: those that the fleet starts again are brought it.
                    continue
                return metrics

    async def _ship(self, version: int, targets: set[str], only: set[str] | None) -> tuple[dict[str, float], set[str]]:
        """One publish to the targets. Its metrics, and those that hold the version but compute with it what the trainer
        does not: the fleet starts them again. Raises as the publisher does, ParityError when all of them disagree."""
        with self._fleet.syncing(targets if only is None else only):
            try:
                return await self._publisher.publish(version, only), set()
            except Disagreement as found:
                disagree = found
        self._faults["parity_restarts"] += len(disagree.reasons)
        self._observer.message(f"starting servers again that alone disagree with the trainer: {disagree}")
        await self._fleet.disagreed(disagree.reasons)
        return disagree.metrics, set(disagree.reasons)

    async def _blame(self, error: PublishError) -> set[str]:
        """Who made a publish fail: the servers that did, which the fleet is told of. Raises RankLost for a rank."""
        self._faults["failed_publishes"] += 1
        # Asked first: servers that wait for a dead rank look as if they had failed themselves.
        await self._trainer.check()
        if not error.failed:
            self._link_failures += 1
            if self._link_failures >= LINK_FAILURES:
                raise error
            self._observer.message(f"publishing again: {error}")
            return set()
        reasons = {url: error.quarantined.get(url, str(error)) for url in error.failed}
        self._observer.message(
            f"weights did not reach {', '.join(reasons)}, which serve no more until they do: {error}"
        )
        await self._fleet.sync_failed(reasons)
        return set(reasons)

    async def _welcome(self, joiners: set[str], version: int) -> None:
        self._link_failures = 0
        if joiners:
            await self._fleet.joined(joiners)
            self._faults["servers_joined"] += len(joiners)
            self._observer.message(f"{', '.join(sorted(joiners))} joined at version {version}")

    # The trainer

    async def restart_trainer(self, loss: RankLost) -> None:
        """New ranks take up the newest checkpoint; servers, router and buffer stay. Raises TrainingError when too often.

        RankLost comes out of it too, when a new rank is lost on the way.
        """
        progress = self._progress
        if self._restarts_in_a_row >= self._max_restarts:
            raise TrainingError(
                f"{loss}; the ranks were started again {self._restarts_in_a_row} times in a row without a new step "
                f"(trainer.max_restarts={self._max_restarts})"
            ) from loss
        self._restarts_in_a_row += 1
        self._faults["trainer_restarts"] += 1
        self._observer.message(
            f"starting the trainer ranks again, attempt {self._restarts_in_a_row} of {self._max_restarts}: {loss}"
        )
        self._observer.activity("trainer", "starting again")
        state = await self._trainer.restart()
        step = 0 if state is None else state["step"]
        again = progress.step - step
        progress.rewind(step)
        self._observer.rewind(step)
        await self._buffer.rollback(step, progress.version)
        self._publisher.forget_ranks()
        await self.publish()
        self._faults["steps_trained_again"] += again
        self._observer.message(f"the trainer goes on after step {step}; {again} steps are trained again")
