"""The parts that the controller wires together, and Protocols of those that a simulation replaces as a whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megasync.buffer import AsyncBuffer
from megasync.buffer.payload import LeasedGroup
from megasync.observe.events import EventSink
from megasync.rollout.client import PinnedVersion

if TYPE_CHECKING:
    from megasync.cluster.fleet import Fleet
    from megasync.cluster.frozen_servers import FrozenServers
    from megasync.cluster.reservations import Reservations
    from megasync.cluster.rollout_workers import RolloutWorkers
    from megasync.cluster.trainer_group import Saved
    from megasync.rollout.rollouter import Rollouter
    from megasync.sync.disk.adapters import AdapterSync


class Trainer(Protocol):
    """The trainer ranks as one. Every call reaches all of them and raises RankLost when one died or hangs."""

    async def step(self, groups: list[LeasedGroup], step: int, version: int) -> dict[str, float]: ...

    async def begin_save(self, step: int, state: dict[str, Any]) -> None:
        """Begins to write a checkpoint of the present weights, while training goes on. The one before is finished."""
        ...

    async def finish_save(self, wait: bool) -> Saved | None:
        """The checkpoint that was begun, once it is complete; without ``wait``, None if it is not yet."""
        ...

    async def check(self) -> None:
        """Raises RankLost when a rank is dead or does not answer."""

    async def restart(self) -> dict[str, Any] | None:
        """Starts new ranks from the newest checkpoint. Returns its state; None when they hold the initial weights."""
        ...

    @property
    def data_parallel(self) -> int:
        """The data-parallel size of the present ranks. A restart may change it."""
        ...

    async def can_grow(self) -> bool:
        """Whether a restart would find room for more ranks than there are."""
        ...

    async def offload(self) -> None:
        """Leaves only weights on the devices: no step and no `begin_save` until `restore`."""

    async def restore(self) -> None:
        """Undoes `offload`."""


class WeightPublisher(Protocol):
    """Moves the trainer's weights into the servers, verified, as one version."""

    async def publish(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        """Publishes to every server, or to those with these URLs. Returns metrics.

        Raises PublishError, which names who failed; ServerParityError for servers that alone compute other log-probs
        than the trainer; ParityError when all servers do.
        """
        ...

    def forget_ranks(self, data_parallel: int) -> None:
        """Tells the transport that the trainer ranks were restarted, and their data-parallel size."""


class Observer(EventSink, Protocol):
    """Sees everything, decides nothing."""

    def step(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def rewind(self, step: int) -> None: ...
    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: Mapping[str, Any], waiting: Mapping[str, str]) -> None:
        """The buffer's counts (`BufferCounts`), and which of its calls wait for what."""
        ...

    def message(self, text: str) -> None: ...

    def checkpoint(self, step: int, path: Path) -> None:
        """The checkpoint of a step is complete."""
        ...

    def published(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """The weights of a step are on the servers, as this version."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlledParts:
    """Everything that the controller drives."""

    trainer: Trainer
    publisher: WeightPublisher
    buffer: AsyncBuffer
    rollouter: Rollouter
    rollout_workers: RolloutWorkers
    fleet: Fleet
    reservations: Reservations
    observer: Observer
    # Returns the prompt source's position, for a checkpoint.
    cursor: Callable[[], dict[str, Any]]
    # `evaluate(step, version, pinned)` returns the metrics of an evaluation, all of whose answers are of the `pinned`
    # version if there is one. It raises EvaluationAbandoned. None when there is nothing to evaluate.
    evaluate: Callable[[int, int, PinnedVersion | None], Awaitable[dict[str, float]]] | None
    # Those of `sync.transport=adapters`.
    held_adapters: AdapterSync | None = None
    frozen_models: FrozenServers | None = None
    # `export(path)` writes a checkpoint as a Hugging Face folder; None if nobody wants any.
    export: Callable[[Path], Awaitable[None]] | None = None
