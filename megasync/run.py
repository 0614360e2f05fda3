"""One run, whole: builds every part from the configuration, hands them to the controller, and puts them away again.

What is opened is pushed on one exit stack the moment it exists, so any way out (the end, an error, Ctrl-C once or
twice, at any point of the start) closes exactly what was opened, in reverse order. Everything that can be refused is
checked before the first process starts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megasync.buffer.trajectory import Prompt
from megasync.cluster.actors import Actors, BufferHandle
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.roles import check_capabilities
from megasync.config import Config
from megasync.config.pools import pool_specs
from megasync.controller import Controller, Progress
from megasync.device import resolve_device
from megasync.errors import DataError, ServerError
from megasync.observe.logfile import log_to_file
from megasync.observe.observer import RunObserver
from megasync.rollout.client import RolloutClient
from megasync.rollout.control import ServerControl
from megasync.rollout.evaluate import evaluate
from megasync.rollout.rewards import RewardRunner
from megasync.rollout.rollouter import Rollouter
from megasync.sync.publisher import Publisher
from megasync.sync.transaction import WeightSync

log = logging.getLogger(__name__)

# Prompts whose log-probs trainer and servers must agree on after a sync.
PARITY_PROBES = 4
CHECKPOINT_STATE = "controller.json"


@dataclass(frozen=True, slots=True)
class Custom:
    """What the caller brought from Python instead of naming it in the configuration."""

    reward: Callable | None = None
    rollout: Callable | None = None
    train_dataset: Sequence[dict] | None = None
    eval_dataset: Sequence[dict] | None = None

    def names(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run left its results, and how far it came."""

    run_dir: Path
    step: int
    version: int
    # Held-out scores as (step, score); empty without an evaluation set.
    scores: list[tuple[int, float]]
    # Hugging Face checkpoint of the final weights; None when checkpoint.export is off or nothing was trained.
    export_dir: Path | None
    # Why the run ended before schedule.total_steps; empty when it did not.
    stopped: str = ""


class Run:
    def __init__(self, config: Config, run_dir: Path, custom: Custom, checkpoint: Path | None = None) -> None:
        self.config = config
        self.run_dir = run_dir
        self._custom = custom
        self._checkpoint = checkpoint
        self._controller: Controller | None = None

    def request_stop(self, reason: str) -> bool:
        """Asks for a clean end. False when the run is not far enough for one: then it can only be left."""
        if self._controller is None:
            return False
        self._controller.request_stop(reason)
        return True

    async def execute(self) -> RunResult:
        async with AsyncExitStack() as stack:
            handler = log_to_file(self.run_dir / "logs" / "controller.log")
            stack.callback(logging.getLogger("megasync").removeHandler, handler)
            workload = await asyncio.to_thread(self._prepare_workload)
            observer = stack.enter_context(RunObserver(self.config, self.run_dir))
            self._controller = controller = await self._build(stack, workload, observer)
            progress = await controller.run()
            observer.message("run ended; putting everything away")
        export_dir = await asyncio.to_thread(self._export, progress)
        return RunResult(
            self.run_dir, progress.step, progress.version, progress.history, export_dir, controller.stop_reason
        )
