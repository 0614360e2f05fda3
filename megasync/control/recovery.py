"""What the run does when a trainer rank or a server is lost: everything else stays alive and waits.

    what is lost           what is done                                                                  bounded by
    ---------------------  ----------------------------------------------------------------------------  ------------------
    a trainer rank, in     new ranks from the newest checkpoint; the buffer takes back what was trained  trainer.max_restarts
    whatever it was doing  since; the weights are published under a number that was never used           in a row
    a step, which raised   as above, and the step again; after `trainer.step_attempts` on the same      trainer.
    an error               groups these are set aside: recorded, dropped, and others are trained         max_failed_steps
    a server, in a sync    it leaves the router; the version is published to the rest                    the fleet
    a server that alone    started again; the run ends when all servers disagree with the trainer        the fleet
    fails parity
    a server, otherwise    nothing: the fleet starts it again, and it joins                              the fleet
    a joiner               brought the published version while the trainer waits, or with the next one   -

Invariant: the trainer's weights differ from the published ones only while ``progress.unpublished`` is not zero; so a
joiner is brought weights under a number that already names exactly them. `Progress.rewind` and `publish` guarantee it.

A step that raises an error would raise it at every resume too, so its attempts are counted in the ledger. So are losses
of ranks that use up `trainer.max_restarts` within one step. An error that comes back with other groups is not theirs: the
run ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from megasync.control.failed_steps import record_failure
from megasync.errors import Disagreement, MegasyncError, NotFinite, RankLost, StepFailed, TrainingError
from megasync.sync.attempt import PublishError

if TYPE_CHECKING:
    from pathlib import Path

    from megasync.config.schema import TrainerConfig
    from megasync.control.interfaces import Fleet, Observer, Publisher, Trainer
    from megasync.control.progress import Progress
    from megasync.control.watchdog import Watchdog
    from megasync.trajectory import Group

log = logging.getLogger(__name__)

# Publishes in a row that may fail on the trainer's side although all of its ranks are alive, such as by a broken link.
LINK_FAILURES = 3


class Recovery:
    """Publishes, brings joiners, and starts the trainer again; each as often as the failures on the way ask for.

    A new version is published within `pause()`, which keeps requests away where they may not straddle two versions.
    Batches of failed steps are recorded in the folder `failed_steps`; None records none.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        trainer: Trainer,
        publisher: Publisher,
        buffer: Any,
        fleet: Fleet,
        observer: Observer,
        progress: Progress,
        watchdog: Watchdog,
        pause: Callable[[], AbstractAsyncContextManager[None]],
        failed_steps: Path | None,
    ) -> None:
        self._config = config
        self._failed_steps = failed_steps
        self._trainer = trainer
        self._publisher = publisher
        self._buffer = buffer
        self._fleet = fleet
        self._observer = observer
        self._progress = progress
        self._watchdog = watchdog
        self._pause = pause
        self._furthest = progress.step
        self._restarts_in_a_row = 0
        # The step under way, or the one that was broken off: its number and its groups.
        self._under_way: tuple[int, list[Group]] | None = None
        self._link_failures = 0
        self._faults: Counter[str] = Counter()

    def metrics(self) -> dict[str, float]:
        """How often each kind of loss was met in this run, since it was started or resumed."""
        kinds = ("trainer_restarts", "steps_trained_again", "steps_set_aside", "failed_publishes", "servers_joined")
        kinds += ("parity_restarts",)
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
        with self._watchdog.bounded(), self._fleet.syncing(targets if only is None else only):
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
        with self._watchdog.bounded():
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

    async def train(self, groups: list[Group], step: int) -> dict[str, float]:
        """One step. Raises RankLost, NotFinite, and StepFailed for any other error of the ranks."""
        self._under_way = step, groups
        try:
            with self._watchdog.bounded():
                metrics = await self._trainer.step(groups, step, self._progress.version)
        except (RankLost, NotFinite):
            raise
        except MegasyncError as error:
            raise StepFailed(f"step {step} failed: {error}") from error
        self._under_way = None
        return metrics

    async def restart_trainer(self, loss: RankLost | StepFailed) -> None:
        """New ranks take up the newest checkpoint; servers, router and buffer stay. Raises TrainingError when too often.

        RankLost comes out of it too, when a new rank is lost on the way.
        """
        progress, limit = self._progress, self._config.max_restarts
        under_way, self._under_way = self._under_way, None
        used_up = self._restarts_in_a_row >= limit
        if under_way is not None and (used_up or isinstance(loss, StepFailed)) and await self._failed(*under_way, loss):
            used_up = limit == 0
        if used_up:
            raise TrainingError(
                f"{loss}; the ranks were started again {self._restarts_in_a_row} times in a row without a new step "
                f"(trainer.max_restarts={limit})"
            ) from loss
        self._restarts_in_a_row += 1
        self._faults["trainer_restarts"] += 1
        self._observer.message(
            f"starting the trainer ranks again, attempt {self._restarts_in_a_row} of {limit}: {loss}"
        )
        self._observer.activity("trainer", "starting again")
        with self._watchdog.bounded():
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

    async def _failed(self, step: int, groups: list[Group], error: TrainingError) -> bool:
        """Records and counts a failed attempt of a step; whether its groups were set aside, so that others follow.

        Raises TrainingError when the groups have had their attempts and may not be set aside.
        """
        attempts, most = self._config.step_attempts, self._config.max_failed_steps
        if self._failed_steps is not None:
            await asyncio.to_thread(
                record_failure, self._failed_steps, step, self._progress.version, groups, str(error)
            )
        result = await self._buffer.step_failed(step, attempts, most)
        attempt, aside = result["attempt"], result["set_aside"]
        if aside:
            self._restarts_in_a_row = 0
            self._faults["steps_set_aside"] += 1
            self._observer.message(
                f"step {step} failed {attempt} times on the same groups, which are set aside: {', '.join(aside)} "
                f"(trainer.step_attempts={attempts}; recorded in {self._failed_steps})"
            )
            return True
        if attempt >= attempts:
            why = (
                "it sets none aside"
                if not most
                else "the batch before was set aside already, so the data is not the cause"
            )
            raise TrainingError(
                f"{error}. The step has failed {attempt} times on these groups (trainer.step_attempts={attempts}), and "
                f"they are not set aside (trainer.max_failed_steps={most}): {why}. Mend the cause, then `megasync resume`"
            ) from error
        self._observer.message(f"step {step} failed, attempt {attempt} of {attempts} on these groups: {error}")
        return False
