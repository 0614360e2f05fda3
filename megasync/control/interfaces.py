"""The parts that the controller wires together, as Protocols. Real ones live in their packages, fakes in tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megasync.buffer import AsyncBuffer
from megasync.buffer.payload import LeasedGroup
from megasync.observe.events import EventSink
from megasync.observe.hang import NO_REPORTS, HangSink
from megasync.rollout.client import Destination


class SavedCheckpoint(Protocol):
    """A checkpoint that was written."""

    @property
    def path(self) -> Path: ...

    @property
    def oldest_step(self) -> int:
        """The step of the oldest checkpoint that is kept."""
        ...


class Trainer(Protocol):
    """The trainer ranks as one. Every call reaches all of them and raises RankLost when one died or hangs."""

    async def step(self, groups: list[LeasedGroup], step: int, version: int) -> dict[str, float]: ...

    async def begin_save(self, step: int, state: dict[str, Any]) -> None:
        """Begins to write a checkpoint of the present weights, while training goes on. The one before is finished."""
        ...

    async def finish_save(self, wait: bool) -> SavedCheckpoint | None:
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


class Addressed(Protocol):
    """An object with the URL of its server."""

    @property
    def url(self) -> str: ...


class ServerFleet(Protocol):
    """The servers. The fleet restarts them on its own; one that needs a weight sync before it can serve is a joiner."""

    def serving(self) -> Sequence[Addressed]:
        """Servers that hold the published version and take part in syncs."""
        ...

    def joiners(self) -> Sequence[Addressed]:
        """Servers that are up but do not hold the published version."""
        ...

    @property
    def size(self) -> int:
        """The number of servers, whatever their state, without those that are lost for good."""
        ...

    async def pin(self, count: int, version: int) -> Sequence[str]:
        """Keeps up to `count` serving servers, but never the last one, at `version`, the published one: no requests
        but those sent to their URLs reach them, and syncs leave them out. Returns the URLs.

        It chooses them before it first waits, so a publish that begins after the call leaves them out.
        """
        ...

    def unpin(self, urls: Iterable[str]) -> None:
        """Lets these serve again; one that missed a version is a joiner."""

    def pinned(self) -> Sequence[Addressed]:
        """Servers that are pinned now."""
        ...

    async def unpinned(self, url: str) -> None:
        """Returns once this server is not pinned: it has died, or `unpin` was called."""

    async def changed(self) -> None:
        """Waits for a server to come up or go since the last call."""

    async def joined(self, urls: Collection[str]) -> None:
        """Lets these servers serve: they hold the published version."""

    async def sync_failed(self, reasons: Mapping[str, str]) -> None:
        """Takes servers whose weight sync failed out of the router until a later sync reaches them."""

    def syncing(self, urls: Collection[str]) -> AbstractContextManager[None]:
        """Wraps a weight sync of these servers: requests are not blamed for a death within it."""
        ...

    async def parity_failed(self, reasons: Mapping[str, str]) -> None:
        """Restarts servers that alone fail parity."""

    async def watch(self) -> None:
        """Raises when too few servers are left and none can be restarted."""

    async def release_memory(self) -> None:
        """Frees the devices of all servers: none computes or starts until `resume_memory`, and requests wait."""

    async def resume_memory(self) -> None:
        """Lets the servers compute and start again; they hold the weights that they held before."""


class HeldAdapters(Protocol):
    """Adapters of published versions that servers keep loaded beside newer ones."""

    async def hold(self, version: int) -> str | None:
        """The name under which every server has the version; None unless it is the one published last, by a sync.

        Raises SyncError when a server could not load it.
        """
        ...

    def let_go(self, name: str) -> None:
        """Servers may unload it."""


class PinnedVersion(Protocol):
    """A version that stays served for as long as an evaluation takes."""

    @property
    def version(self) -> int: ...

    async def destination(self, number: int) -> Destination:
        """Where requests about prompt `number` go. Raises EvaluationAbandoned when nothing holds the version."""
        ...

    async def lost(self, destination: Destination) -> None:
        """Returns once the destination no longer holds the version."""


class RolloutLoop(Protocol):
    """Generates groups and commits them to the buffer."""

    @property
    def finished_groups(self) -> int:
        """Groups committed so far."""
        ...

    async def run(self) -> None: ...

    def stop(self) -> None: ...

    async def gate(self, timeout: float) -> None:
        """Holds back new requests and waits until none is in flight. Raises ServerError after `timeout` seconds."""

    def open(self) -> None:
        """Lets requests start again."""

    def metrics(self) -> dict[str, float]: ...


class FrozenModels(Protocol):
    """Servers of reward and auxiliary models. They restart on their own and take no part in weight syncs."""

    def metrics(self) -> dict[str, float]: ...

    async def watch(self) -> None:
        """Raises when a model has no server left and none can be restarted."""


class RolloutCrew(Protocol):
    """The rollout workers, which are replaced when they are lost."""

    async def announce(self, published: int, newest: int) -> None:
        """Tells them the published version, and the newest that any server may hold from now on."""

    async def watch(self) -> None:
        """Raises when no worker is left and none can be started."""


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
    rollouter: RolloutLoop
    rollout_workers: RolloutCrew
    fleet: ServerFleet
    observer: Observer
    # Returns the prompt source's position, for a checkpoint.
    cursor: Callable[[], dict[str, Any]]
    # `evaluate(step, version, pinned)` returns the metrics of an evaluation, all of whose answers are of the `pinned`
    # version if there is one. It raises EvaluationAbandoned. None when there is nothing to evaluate.
    evaluate: Callable[[int, int, PinnedVersion | None], Awaitable[dict[str, float]]] | None
    # Those of `sync.transport=adapters`.
    held_adapters: HeldAdapters | None = None
    frozen_models: FrozenModels | None = None
    # `export(path)` writes a checkpoint as a Hugging Face folder; None if nobody wants any.
    export: Callable[[Path], Awaitable[None]] | None = None
    # Writes hang reports.
    reports: HangSink = NO_REPORTS
