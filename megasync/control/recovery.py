"""Restarts the trainer ranks after a loss or a failed step. Servers, router and buffer stay alive and wait.

    what is lost           what is done                                                             bounded by
    ---------------------  -----------------------------------------------------------------------  -------------------
    a trainer rank, at     new ranks load the newest checkpoint; the buffer takes back the groups   trainer.max_restarts
    any point              trained since; the weights are published under an unused version         in a row
    a node, for good       as above, on the nodes that are left, once `timeouts.lost_node` is over;  trainer.
                           on all of them when the node is back, from a checkpoint of that moment   min_data_parallel
    a step that raised     as above, and the step is retried; after `trainer.step_attempts` on the  trainer.
    an error               same groups they are set aside: recorded, dropped, replaced by others    max_failed_steps

A step that raises an error would raise it at every resume too, so the ledger counts its attempts. It also counts lost
ranks that use up `trainer.max_restarts` within one step. An error that comes back with other groups is not caused by
the groups: it ends the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.base.files import atomic_write
from megasync.buffer.payload import LeasedGroup
from megasync.buffer.segments import load
from megasync.errors import DataError, RankLost, StepFailed, TrainingError

if TYPE_CHECKING:
    from megasync.config.schema import TrainerConfig
    from megasync.control.colocation import Colocation
    from megasync.control.interfaces import ControlledParts
    from megasync.control.progress import Progress
    from megasync.control.publishing import FleetSync
    from megasync.control.watchdog import Watchdog

log = logging.getLogger(__name__)

# Below the run directory: one file for each batch whose step raised an error.
FAILED_STEPS_FOLDER = "failed_steps"

# Ranks that a fault names; a hang may involve thousands.
SHOWN_RANKS = 8

# A step that did not complete: its number and its groups.
Step = tuple[int, list[LeasedGroup]]


class TrainerRecovery:
    """Writes batches of failed steps to the folder `failed_steps`; None writes none."""

    def __init__(
        self,
        config: TrainerConfig,
        parts: ControlledParts,
        fleet_sync: FleetSync,
        progress: Progress,
        watchdog: Watchdog,
        colocation: Colocation,
        failed_steps: Path | None,
    ) -> None:
        self._config = config
        self._trainer = parts.trainer
        self._publisher = parts.publisher
        self._buffer = parts.buffer
        self._observer = parts.observer
        self._fleet_sync = fleet_sync
        self._progress = progress
        self._watchdog = watchdog
        self._colocation = colocation
        self._failed_steps = failed_steps
        self._furthest = progress.step
        self._restarts_in_a_row = 0
        self._faults: Counter[str] = Counter()

    def metrics(self) -> dict[str, float]:
        """Counts since this process started, by kind of fault."""
        kinds = ("trainer_restarts", "steps_trained_again", "steps_set_aside")
        return {f"faults/{kind}": float(self._faults[kind]) for kind in kinds}

    def step_completed(self) -> None:
        """Resets the restart budget after a step beyond the furthest so far: restarting helps."""
        if self._progress.step > self._furthest:
            self._furthest, self._restarts_in_a_row = self._progress.step, 0

    async def restart_trainer(self, loss: RankLost | StepFailed, incomplete: Step | None) -> None:
        """Restarts the ranks from the newest checkpoint and publishes their weights.

        `incomplete` is the step that the loss interrupted, if any. Raises TrainingError when the restart budget is used
        up, and RankLost when a new rank is lost.
        """
        limit = self._config.max_restarts
        lost = named_loss(loss)
        self._observer.fault(lost, str(loss), interrupted=incomplete[0] if incomplete else None)
        used_up = self._restarts_in_a_row >= limit
        counts_as_failed = used_up or isinstance(loss, StepFailed)
        if incomplete is not None and counts_as_failed and await self._record_attempt(*incomplete, loss):
            used_up = limit == 0
        if used_up:
            raise TrainingError(
                f"{loss}; the ranks were restarted {self._restarts_in_a_row} times in a row without a new step "
                f"(trainer.max_restarts={limit})"
            ) from loss
        self._restarts_in_a_row += 1
        self._faults["trainer_restarts"] += 1
        self._observer.message(f"restarting the trainer ranks, attempt {self._restarts_in_a_row} of {limit}: {loss}")
        await self._restart()
        self._observer.recovery(lost, f"the ranks were restarted, training resumes after step {self._progress.step}")

    async def grow_trainer(self) -> None:
        """Restarts the ranks on all nodes, from the newest checkpoint. Raises RankLost when a new rank is lost."""
        self._observer.message("restarting the trainer ranks: there is room for more of them again")
        await self._restart()

    async def _restart(self) -> None:
        progress = self._progress
        await self._colocation.to_new_ranks()
        self._observer.activity("trainer", "restarting")
        with self._watchdog.bounded():
            state = await self._trainer.restart()
        step = 0 if state is None else state["step"]
        repeated = progress.step - step
        progress.rewind(step)
        self._observer.rewind(step)
        await self._buffer.rollback(step, progress.version)
        self._publisher.forget_ranks(self._trainer.data_parallel)
        await self._fleet_sync.publish()
        self._faults["steps_trained_again"] += repeated
        size, usual = self._trainer.data_parallel, self._config.data_parallel
        ranks = "" if size == usual else f" with trainer.data_parallel={size} instead of {usual}"
        self._observer.message(f"resuming training after step {step}{ranks}; {repeated} steps are trained again")

    async def _record_attempt(self, step: int, groups: list[LeasedGroup], error: TrainingError) -> bool:
        """Records and counts a failed attempt of a step. Returns whether its groups were set aside, so others follow.

        Raises TrainingError when the groups have had their attempts and may not be set aside.
        """
        attempts, most = self._config.step_attempts, self._config.max_failed_steps
        if self._failed_steps is not None:
            await asyncio.to_thread(
                write_failed_batch, self._failed_steps, step, self._progress.version, groups, str(error)
            )
        failed = await self._buffer.step_failed(step, attempts, most)
        attempt, set_aside = failed.attempt, failed.set_aside
        if set_aside:
            self._restarts_in_a_row = 0
            self._faults["steps_set_aside"] += 1
            self._observer.message(
                f"step {step} failed {attempt} times on the same groups, which are set aside: {', '.join(set_aside)} "
                f"(trainer.step_attempts={attempts}; recorded in {self._failed_steps})"
            )
            return True
        if attempt >= attempts:
            why = "the previous batch was set aside already, so the data is not the cause" if most else "0 forbids it"
            raise TrainingError(
                f"{error}. The step has failed {attempt} times on these groups (trainer.step_attempts={attempts}), and "
                f"they are not set aside (trainer.max_failed_steps={most}): {why}. Fix the cause and run "
                f"`megasync resume`"
            ) from error
        self._observer.message(f"step {step} failed, attempt {attempt} of {attempts} on these groups: {error}")
        return False


def named_loss(loss: RankLost | StepFailed) -> str:
    """The ranks that an error names, as events name them, such as `rank 1`; `trainer` if it names none."""
    slots = loss.slots if isinstance(loss, RankLost) else ()
    shown = ", ".join(map(str, slots[:SHOWN_RANKS])) + (
        f" and {rest} more" if (rest := len(slots) - SHOWN_RANKS) > 0 else ""
    )
    return f"rank{'s' * (len(slots) > 1)} {shown}" if slots else "trainer"


def write_failed_batch(folder: Path, step: int, version: int, groups: Sequence[LeasedGroup], error: str) -> None:
    """Writes uids and trajectories (tokens, masks, log-probs, versions, rewards) to ``folder/step-<step>-<first
    uid>.json``.

    A later attempt on the same groups replaces the file. A file that cannot be written is logged, nothing more.
    """
    uids = [group.uid for group in groups]
    record = {"step": step, "version": version, "error": error, "uids": uids, "batch": list(map(_described, groups))}
    path = folder / f"step-{step:08d}-{uids[0].replace(':', '-')}.json"
    try:
        # JSON has no spelling for non-finite numbers: they become strings.
        text = json.dumps(json.loads(json.dumps(record), parse_constant=str), allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except (OSError, TypeError, ValueError) as failure:
        log.error("Could not write the batch of failed step %d to %s: %s", step, path, failure)


def _described(group: LeasedGroup) -> dict[str, Any]:
    try:
        return {"uid": group.uid, "trajectories": [trajectory.plain() for trajectory in load(group).trajectories]}
    except DataError as error:
        return {"uid": group.uid, "unreadable": str(error)}
