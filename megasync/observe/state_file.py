"""The present state of a run, in `state.json`: written every two seconds by its driver, read by the page and scripts.

The file is replaced whole, so a reader never sees a part of one. Whatever a field does not know keeps its default, and
a reader ignores fields that it does not know, so files of other versions can be read. Times are in seconds since the
epoch. A run that was killed leaves `status` as it was: it is alive only while its lock (`app.run_lock`) is held.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from megasync.base.files import open_regular
from megasync.concurrency.first_use import prepared

STATE_FILE = "state.json"
# A state that is older, of a run whose lock is held, belongs to a driver that hangs.
OLD_SECONDS = 15.0

# Of a state that is read: 1,024 ranks and 512 servers take less than one.
MOST_BYTES = 16 * 2**20

Status = Literal["starting", "running", "finished", "stopped", "failed"]
# The states in which a driver is at work.
ALIVE: tuple[Status, ...] = ("starting", "running")


@prepared
class ProcessState(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A process of the run, by its name in logs and events."""

    name: str
    # `healthy`, `suspect`, `stale`, `restarting`, `dead` or `retired` (docs/fleet.md); of ranks and workers `up` or
    # `starting`.
    state: str = ""
    # Why it is in this state, and since when.
    reason: str = ""
    since: float | None = None
    pid: int | None = None
    # Ray's id of its node.
    node: str = ""
    # Of servers: the URL, how often it was started, and the version that it serves.
    url: str = ""
    starts: int = 0
    version: int | None = None
    # Of servers by their last report: requests that run and wait, share of the cache in use, tokens per second.
    running: int | None = None
    waiting: int | None = None
    cache_use: float | None = None
    throughput: float | None = None
    # Of workers: their groups.
    groups: int | None = None


@prepared
class RankState(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A trainer rank."""

    rank: int
    pid: int | None = None
    # Ray's id of its node.
    node: str = ""
    # What CUDA calls its GPU, or "cpu".
    device: str = ""


@prepared
class BufferState(msgspec.Struct, kw_only=True, frozen=True):
    """``admitted == trained + sum(dropped.values()) + live``; ``slots`` are those of ``capacity`` in use, by state."""

    slots: dict[str, int] = {}
    capacity: int = 0
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    live: int = 0
    # Calls that wait, such as `lease`, and what for.
    waiting: dict[str, str] = {}


@prepared
class ModelState(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A model of a tenant of a service, by its id."""

    name: str
    rank: int = 0
    # Optimizer steps since it was created.
    steps: int = 0
    # Sum of the loss over its newest pass.
    loss: float | None = None
    # Requests that wait for the ranks, and how long the oldest one has waited, in seconds.
    waiting: int = 0
    waited: float = 0.0


@prepared
class TenantState(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A tenant of a service: what it has, and what it waits for."""

    name: str
    # Sessions that show signs of life.
    sessions: int = 0
    # Those that have not ended, newest first.
    models: list[ModelState] = []
    # Optimizer steps of all of its models, and tokens of their passes since the driver was started.
    steps: int = 0
    tokens: int = 0
    # Tokens of passes and samples in a second, over the last minute.
    rate: float = 0.0
    # Requests that are not answered yet, and their tokens.
    promises: int = 0
    tokens_in_flight: int = 0
    # Samplers with adapters of their own, checkpoints, and the bytes of all that on disk.
    samplers: int = 0
    checkpoints: int = 0
    disk_bytes: int = 0

    @property
    def waited(self) -> float:
        """How long the oldest request for the ranks has waited, in seconds."""
        return max((model.waited for model in self.models), default=0.0)


@prepared
class RunState(msgspec.Struct, kw_only=True, frozen=True):
    """The state of a run at ``time``."""

    time: float
    pid: int = 0
    host: str = ""
    # When this driver was started.
    started: float = 0.0
    status: Status = "starting"
    # Why it stopped or failed.
    reason: str = ""
    step: int = 0
    total_steps: int = 0
    version: int = 0
    # What each part is doing, and since when.
    activities: dict[str, tuple[str, float]] = {}
    servers: list[ProcessState] = []
    router: ProcessState | None = None
    ranks: list[RankState] = []
    workers: list[ProcessState] = []
    # Servers of reward models, auxiliary models and teachers.
    frozen_models: list[ProcessState] = []
    buffer: BufferState | None = None
    # Of a service; `total_steps` is 0 then.
    tenants: list[TenantState] = []
    eta_seconds: float | None = None


_state = msgspec.json.Decoder(RunState)


def write_state(run_dir: Path, state: RunState) -> None:
    """Replaces the file. Raises OSError.

    It is not flushed to the disk: that may take long, and after a crash of the machine the state is out of date anyway.
    """
    path = Path(run_dir) / STATE_FILE
    part = path.with_name(f".{STATE_FILE}.part")
    part.write_bytes(msgspec.json.encode(state))
    os.replace(part, path)


def read_state(run_dir: Path) -> RunState | None:
    """The last state that was written; None where there is none, or none that can be read."""
    try:
        with open_regular(Path(run_dir) / STATE_FILE) as file:
            return _state.decode(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
