"""A rollouter with one worker on the same event loop, as a run without `rollout.workers` has."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from megasync.config.schema import GroupConfig, ScheduleConfig
from megasync.data.curriculum import Curriculum
from megasync.rewards import RewardRunner
from megasync.rollout.group_worker import FailurePolicy, GroupSpec, GroupWorker
from megasync.rollout.rollouter import Rollouter, ServerLimits
from megasync.rollout.selection import Selection
from megasync.rollout.teachers import Teachers
from megasync.rollout.worker_link import WorkerEnd, WorkerLink, join
from megasync.rollout.workflow import Workflow


def local_worker(client: Any, buffer: Any, spec: GroupSpec, failures: FailurePolicy | None = None, **options: Any):
    """The link to a worker on this event loop."""
    end, link = WorkerEnd(), WorkerLink("the worker", {}, {}, 60.0)
    told = {"on_ended": partial(end.tell, "ended"), "on_failed": partial(end.tell, "failed")}
    end.serve(GroupWorker(client, buffer, spec, failures, **told, **options), {}, {})
    join(link, end)
    return link


def local_rollouter(
    client: Any,
    source: Any,
    buffer: Any,
    workflow: Workflow,
    schedule: ScheduleConfig,
    *,
    rewards: RewardRunner | None = None,
    selection: Selection | None = None,
    seed: int | None = None,
    failures: FailurePolicy | None = None,
    max_drop_share: float = 0.5,
    servers: ServerLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
    teachers: Teachers | None = None,
    curriculum: Curriculum | None = None,
    baseline: bool = False,
    token_rewards: bool = False,
    guard: Any = None,
) -> Rollouter:
    """`guard` is the client's part of the quarantine."""
    selection = selection or Selection(GroupConfig(), schedule.samples_per_group, sys.maxsize)
    rewards = rewards or RewardRunner(None)
    options = {"baseline": baseline, "token_rewards": token_rewards}
    spec = GroupSpec(workflow, rewards, selection, seed, teachers, **options)
    rollouter = Rollouter(
        source, buffer, schedule, max_drop_share=max_drop_share, servers=servers, curriculum=curriculum
    )
    rollouter.add(local_worker(client, buffer, spec, failures, quarantine=guard, clock=clock))
    return rollouter
