"""Workflows: plain `async def` functions that turn one sample into trajectories, and the check of what they return.

A workflow is called as `rollout(client, sample)`. `sample` holds the row's columns, "prompt_ids" and, with a chat
template, "messages"; it is the workflow's own copy. It returns a Trajectory, or a list of them.

Invariant: a trajectory that passes `TrajectoryCheck` has a finite log-prob for every trained token, arrays of numbers
that are all finite, valid Unicode, and metrics that are finite floats under text names. (The constructor guarantees
integers, and as many entries as tokens.) Nothing else reaches the buffer, the
ledger, metrics or a file. Rewards are checked where they are scored (`RewardRunner`). An invalid token or text is a
DataError of the sample. An invalid metric is dropped and reported once per name, because a measurement must not cost a
response.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megasync.base.importing import name_of
from megasync.concurrency.foreign import shown
from megasync.errors import DataError
from megasync.trajectory import ROUTES, SUPPORT_SIZES, TOKEN_REWARDS, Prompt, Trajectory, finite_float

if TYPE_CHECKING:
    from megasync.rollout.sample_client import SampleClient

log = logging.getLogger(__name__)

Workflow = Callable[["SampleClient", dict[str, Any]], Awaitable[Trajectory | list[Trajectory]]]


async def single_turn(client: SampleClient, sample: dict[str, Any]) -> Trajectory:
    """The default workflow: one response to the prompt, which the reward function scores."""
    reply = await client.generate(sample["prompt_ids"])
    return reply.trajectory()


async def call_workflow(
    workflow: Workflow, client: SampleClient, prompt: Prompt, check: TrajectoryCheck
) -> list[Trajectory]:
    """Calls a workflow with its own copy of a row, and checks what it returns: all that touches its objects."""
    sample = copy.deepcopy(dict(prompt.columns)) | {"prompt_ids": list(prompt.prompt_ids)}
    return check.check(await workflow(client, sample))


class TrajectoryCheck:
    """Checks what one workflow returns. `routed` trajectories need the routes of all positions, `truncated` ones the
    support of each trained token.
    """

    def __init__(self, workflow: Workflow, routed: bool = False, truncated: bool = False) -> None:
        self._name = name_of(workflow)
        self._routed = routed
        self._truncated = truncated
        self._reported: set[str] = set()

    def check(self, result: object) -> list[Trajectory]:
        """The trajectories of a result. Raises DataError, naming the workflow, for an invalid one."""
        trajectories = [result] if isinstance(result, Trajectory) else result
        if not isinstance(trajectories, list) or not all(isinstance(t, Trajectory) for t in trajectories):
            raise DataError(
                f"the workflow {self._name} must return a Trajectory or a list of them, not {shown(result)}"
            )
        return [self._checked(trajectory) for trajectory in trajectories]

    def _checked(self, trajectory: Trajectory) -> Trajectory:
        changed: dict[str, Any] = {"metrics": self._metrics(trajectory.metrics)}
        for name in ("text", "finish_reason"):
            text = getattr(trajectory, name)
            if not isinstance(text, str):
                raise self._error(f"{name}={shown(text, 80)}, which must be text")
            if not _encodable(text):
                # Half of a surrogate pair, which neither the ledger nor a file can store.
                changed[name] = text.encode("utf-8", "replace").decode()
        self._check_numbers(trajectory)
        if self._routed and ROUTES not in trajectory.arrays and trajectory.oldest_version is not None:
            raise self._error(
                "no routes, which rollout.routing_replay=true needs; build it with generation.trajectory(), or "
                "reply.trajectories()"
            )
        if self._truncated and (missing := _without_support(trajectory)):
            raise self._error(
                f"{missing} trained tokens without a support, which rollout.sampling.top_k needs; build it with "
                f"generation.trajectory(), or reply.trajectories()"
            )
        return replace(trajectory, **changed)

    def _check_numbers(self, trajectory: Trajectory) -> None:
        """A non-finite number would spoil the whole batch that it is trained in, and again after each resume."""
        trained = trajectory.logprobs[trajectory.loss_mask.expand() != 0]
        if not np.isfinite(trained).all():
            at = int(np.flatnonzero(~np.isfinite(trained))[0])
            raise self._error(f"a non-finite log-prob, {trained[at]}, of trained token {at}")
        for name, array in trajectory.arrays.items():
            if array.dtype.kind not in "iubf":
                raise self._error(f"the array {name!r} of type {array.dtype}, which does not hold numbers")
            # A token without a reward has NaN.
            if not (np.isfinite(array) | (np.isnan(array) & (name == TOKEN_REWARDS))).all():
                raise self._error(f"the array {name!r}, which holds numbers that are not finite")

    def _metrics(self, given: object) -> dict[str, float]:
        if not isinstance(given, Mapping):
            self._report("metrics", f"is {shown(given, 80)}, not a dictionary")
            return {}
        kept: dict[str, float] = {}
        for name, value in given.items():
            if not isinstance(name, str) or not _encodable(name):
                self._report(shown(name, 80), "has a name that is not valid text")
            elif (number := finite_float(value)) is None:
                self._report(name, f"is {shown(value, 80)}, not a finite number")
            else:
                kept[name] = number
        return kept

    def _report(self, name: str, problem: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            log.warning("The metric %s of the workflow %s %s. Such values are dropped", name, self._name, problem)

    def _error(self, problem: str) -> DataError:
        return DataError(f"the workflow {self._name} returned a trajectory with {problem}")


def _without_support(trajectory: Trajectory) -> int:
    """The number of trained tokens of which nobody knows what else could have been sampled."""
    trained = trajectory.loss_mask.expand() > 0
    sizes = trajectory.arrays.get(SUPPORT_SIZES)
    return int(trained.sum()) if sizes is None else int((trained & (sizes < 1)).sum())


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
