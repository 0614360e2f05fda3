"""The controller with the real buffer. Everything that does I/O is a fake that can be made to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasync.buffer import AsyncBuffer
from megasync.buffer.payload import encode
from megasync.config import Config
from megasync.control.controller import Controller
from megasync.control.interfaces import ControlledParts
from megasync.control.progress import Progress
from megasync.errors import (
    CheckpointError,
    DataError,
    MegasyncError,
    RankLost,
    ServerParityError,
    SyncError,
    TrainingError,
)
from megasync.observe.context import RunContext
from megasync.observe.hang import HangSink, NoReports
from megasync.rollout.client import PinnedVersion
from megasync.sync.attempt import PublishError
from megasync.trajectory import Group, Trajectory


class FakeCrew:
    async def announce(self, published, newest): ...
    async def watch(self): ...


class FakeRollouter:
    """Admits and commits groups as fast as the buffer allows.

    It raises after `fail_after` prompts, and commits no more than `stall_after` groups. `first` is the number of the
    first prompt.
    """

    def __init__(
        self, buffer: AsyncBuffer, fail_after: int | None = None, stall_after: int | None = None, first: int = 0
    ) -> None:
        self._first = first
        self.finished_groups = 0
        self.gates: list[str] = []
        self._stall_after = stall_after
        self._buffer = buffer
        self._fail_after = fail_after
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        loops = [asyncio.create_task(self._draw()), asyncio.create_task(self._redo())]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait({*loops, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*loops, stopped):
                task.cancel()
            await asyncio.gather(*loops, stopped, return_exceptions=True)

    async def _draw(self) -> None:
        number = self._first
        while True:
            uid = f"0:{number}"
            await self._buffer.admit(uid)
            number += 1
            if self._fail_after is not None and number > self._fail_after:
                raise DataError("the reward function is wrong")
            await self._generate(uid)

    async def _redo(self) -> None:
        while True:
            await self._generate(await self._buffer.reclaim())

    async def _generate(self, uid: str) -> None:
        await asyncio.sleep(0)
        if self._stall_after is None or self.finished_groups < self._stall_after:
            answer = Trajectory([1], [2], [1], [-1.0], [self._buffer._state.version], reward=1.0)
            await self._buffer.commit(encode(Group(uid, [answer, answer])))
            self.finished_groups += 1

    def stop(self) -> None:
        self._stopped.set()

    async def gate(self, timeout: float) -> None:
        self.gates.append("closed")
        self.gate_timeout = timeout

    def open(self) -> None:
        self.gates.append("open")

    def metrics(self) -> dict[str, float]:
        return {"rollout/inflight_groups": 0.0}


@dataclass
class FakeSaved:
    path: Path
    oldest_step: int


class FakeTrainer:
    """`lose` maps a call, such as "step 3", "save 2", "finish 2", "check" or "restart", to how often it loses a rank.

    A step with one of the `poison` groups raises an error, at most `times` times.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        disk_full: bool = False,
        lose: dict[str, int] | None = None,
        poison: Collection[str] = (),
        times: int = 1_000,
        slow_saves: bool = False,
    ) -> None:
        self.failures: list[tuple[int, list[str]]] = []
        self._poison = set(poison)
        self._times = times
        self.steps: list[tuple[int, int, list[str]]] = []
        self.saved: list[dict] = []
        self.save_calls = 0
        # A checkpoint is then complete only once somebody waits for it.
        self._slow_saves = slow_saves
        self.restarts = 0
        # Uids that the current weights were trained on, and those in the last checkpoint.
        self.weights: list[str] = []
        self._kept: list[str] = []
        self.data_parallel = 2
        # Steps after which there is room for all ranks again.
        self.room_after: set[int] = set()
        self._lose = lose or {}
        self._fail_at = fail_at
        self._disk_full = disk_full

    def _maybe_lose(self, call: str) -> None:
        if self._lose.get(call):
            self._lose[call] -= 1
            raise RankLost(f"rank 1 died during {call}")

    async def step(self, groups: list[Group], step: int, version: int) -> dict[str, float]:
        await asyncio.sleep(0)
        if step == self._fail_at:
            raise TrainingError("rank 1 failed")
        uids = [group.uid for group in groups]
        if self._poison & set(uids) and len(self.failures) < self._times:
            self.failures.append((step, uids))
            raise TrainingError("rank 0 failed in step(): an index is out of range")
        self._maybe_lose(f"step {step}")
        self.steps.append((step, version, [group.uid for group in groups]))
        self.weights += self.steps[-1][2]
        return {"train/loss": 0.5}

    async def begin_save(self, step: int, state: dict) -> None:
        self.save_calls += 1
        self._maybe_lose(f"save {step}")
        self._saving = step, state, list(self.weights)

    async def finish_save(self, wait: bool) -> FakeSaved | None:
        if self._slow_saves and not wait:
            return None
        step, state, weights = self._saving
        self._maybe_lose(f"finish {step}")
        if self._disk_full:
            raise CheckpointError("no space left on device")
        self.saved.append(state)
        self._kept = weights
        return FakeSaved(Path(f"step-{step}"), step)

    def _room(self) -> bool:
        return bool(self.steps) and self.steps[-1][0] in self.room_after

    async def can_grow(self) -> bool:
        return self.data_parallel == 1 and self._room()

    async def check(self) -> None:
        self._maybe_lose("check")

    async def restart(self) -> dict | None:
        self.restarts += 1
        await asyncio.sleep(0)
        self._maybe_lose("restart")
        self.weights = list(self._kept)
        self.data_parallel = 1 if self.room_after and not self._room() else 2
        return self.saved[-1] if self.saved else None


@dataclass(frozen=True)
class FakeServer:
    url: str


class FakeFrozenModels:
    """Once `dead` is set, `watch` raises it."""

    def __init__(self) -> None:
        self.dead: MegasyncError | None = None

    def metrics(self) -> dict[str, float]:
        return {"reward_models/grader/servers": 0.0 if self.dead else 1.0}

    async def watch(self) -> None:
        if self.dead is not None:
            raise self.dead


class FakeFleet:
    """A fleet with the servers a and b. Tests take them down and bring them back."""

    def __init__(self) -> None:
        self.up = {"a": True, "b": True}
        # The version that each pinned server is kept at, and what wakes those who wait for its end; all that were.
        self.kept: dict[str, tuple[int, asyncio.Event]] = {}
        self.pins: list[tuple[str, int]] = []
        self.newest: Callable[[], int] = lambda: 0
        self.failed: list[dict[str, str]] = []
        self.disagreeing: list[dict[str, str]] = []
        # Servers of the sync in progress, and of every sync so far.
        self.in_sync: set[str] = set()
        self.synced: list[set[str]] = []
        self.dead = asyncio.Event()
        self._change = asyncio.Event()

    def serving(self) -> list[FakeServer]:
        return [FakeServer(url) for url, serves in self.up.items() if serves and url not in self.kept]

    @property
    def size(self) -> int:
        return len(self.up)

    async def pin(self, count: int, version: int) -> list[str]:
        chosen = [server.url for server in self.serving()][1 : 1 + count]
        for url in chosen:
            self.kept[url] = version, asyncio.Event()
            self.pins.append((url, version))
        await asyncio.sleep(0)
        return chosen

    def unpin(self, urls: Iterable[str]) -> None:
        for url in [url for url in urls if url in self.kept]:
            version, over = self.kept.pop(url)
            over.set()
            if version != self.newest():
                self.come(url)

    def pinned(self) -> list[FakeServer]:
        return [FakeServer(url) for url in self.kept]

    async def unpinned(self, url: str) -> None:
        if url in self.kept:
            await self.kept[url][1].wait()

    def die(self, url: str) -> None:
        del self.up[url]
        if url in self.kept:
            self.kept.pop(url)[1].set()
        self._tell()

    def joiners(self) -> list[FakeServer]:
        return [FakeServer(url) for url, serves in self.up.items() if not serves]

    def come(self, url: str) -> None:
        self.up[url] = False
        self._tell()

    def _tell(self) -> None:
        self._change.set()

    async def changed(self) -> None:
        await self._change.wait()
        self._change.clear()

    async def joined(self, urls: Collection[str]) -> None:
        for url in urls:
            self.up[url] = True

    async def sync_failed(self, reasons: Mapping[str, str]) -> None:
        self.failed.append(dict(reasons))
        for url in reasons:
            self.up.pop(url, None)
        self._tell()

    @contextmanager
    def syncing(self, urls: Collection[str]) -> Iterator[None]:
        self.in_sync = set(urls)
        self.synced.append(self.in_sync)
        yield
        self.in_sync = set()

    async def parity_failed(self, reasons: Mapping[str, str]) -> None:
        self.disagreeing.append(dict(reasons))
        for url in reasons:
            self.up.pop(url, None)
        self._tell()

    async def watch(self) -> None:
        if self.dead.is_set():
            raise MegasyncError("no server is left")


class FakePublisher:
    """`lose` maps a version to the servers that fail in its first publish; an empty list is a failure of the trainer.

    `disagree` maps a version to the servers that fail its parity check, once.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        lose: dict[int, list[str]] | None = None,
        disagree: dict[int, list[str]] | None = None,
    ) -> None:
        self.versions: list[int] = []
        self.only: list[tuple[int, set[str] | None]] = []
        self.forgotten = 0
        self._fail_at = fail_at
        self._lose = lose or {}
        self._disagree = disagree or {}

    async def publish(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        await asyncio.sleep(0)
        self.only.append((version, None if only is None else set(only)))
        if version == self._fail_at:
            raise SyncError(f"server 1, phase transfer, version {version}")
        if version in self._lose:
            failed = self._lose.pop(version)
            raise PublishError(f"version {version} failed", version, "transfer", {}, failed)
        self.versions.append(version)
        metrics = {"sync/version": float(version)}
        if wrong := self._disagree.pop(version, None):
            raise ServerParityError(dict.fromkeys(wrong, "off by 3 nats"), metrics)
        return metrics

    def forget_ranks(self, data_parallel: int) -> None:
        self.data_parallel = data_parallel
        self.forgotten += 1


class FakeObserver:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.metrics: list[dict] = []
        self.evaluations: list[int] = []
        self.messages: list[str] = []
        self.events: list[tuple[str, str]] = []

    def step(self, step: int, version: int, metrics: dict) -> None:
        self.steps.append(step)
        self.metrics.append(metrics)

    def evaluation(self, step: int, version: int, metrics: dict) -> None:
        self.evaluations.append(step)

    def rewind(self, step: int) -> None: ...
    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: dict, waiting: dict) -> None: ...
    def checkpoint(self, step: int, path: Path) -> None: ...
    def published(self, step: int, version: int, metrics: dict) -> None: ...

    def fault(self, what: str, text: str, **fields: object) -> None:
        self.events.append(("fault", what))

    def recovery(self, what: str, text: str, **fields: object) -> None:
        self.events.append(("recovery", what))

    def message(self, text: str) -> None:
        self.messages.append(text)


class Rig:
    """A controller with its fakes. Keyword arguments set the schedule."""

    def __init__(
        self,
        *,
        trainer: FakeTrainer | None = None,
        publisher: FakePublisher | None = None,
        score: float | None = None,
        evaluate: bool = True,
        checkpoint_every: int = 0,
        background: bool = True,
        export_every: int = 0,
        export: Callable | None = None,
        no_progress: float = 60.0,
        max_restarts: int = 3,
        step_attempts: int = 2,
        max_failed_steps: int = 1,
        failed_steps: Path | None = None,
        ledger: Path | None = None,
        rollout: dict | None = None,
        progress: Progress | None = None,
        frozen_models: FakeFrozenModels | None = None,
        fleet: FakeFleet | None = None,
        exact: bool = False,
        evaluation: Callable[[int, int, PinnedVersion | None], Awaitable[None]] | None = None,
        held_adapters: Any | None = None,
        reports: HangSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        **schedule: object,
    ) -> None:
        config = Config()
        for key, value in ({"total_steps": 6, "groups_per_step": 2, "samples_per_group": 2} | schedule).items():
            setattr(config.schedule, key, value)
        config.eval.every_steps = 2
        config.eval.exact = exact
        config.checkpoint.every_steps = checkpoint_every
        config.checkpoint.background = background
        config.checkpoint.export_every = export_every
        config.timeouts.no_progress = no_progress
        config.trainer.max_restarts = max_restarts
        config.trainer.step_attempts = step_attempts
        config.trainer.max_failed_steps = max_failed_steps
        total = config.schedule.total_steps * config.schedule.groups_per_step
        self.buffer = AsyncBuffer(config.schedule, total, ledger=ledger)
        self.rollouter = FakeRollouter(self.buffer, **(rollout or {}))
        self.trainer = trainer or FakeTrainer()
        self.publisher = publisher or FakePublisher()
        self.observer = FakeObserver()
        self.fleet = fleet or FakeFleet()

        async def held_out(step: int, version: int, pinned: PinnedVersion | None) -> dict[str, float]:
            await (asyncio.sleep(0) if evaluation is None else evaluation(step, version, pinned))
            return {"eval/score": score if score is not None and step >= 2 else 0.1}

        parts = ControlledParts(
            trainer=self.trainer,
            publisher=self.publisher,
            buffer=self.buffer,
            rollouter=self.rollouter,
            rollout_workers=FakeCrew(),
            fleet=self.fleet,
            reservations=self.fleet,
            frozen_models=frozen_models,
            evaluate=held_out if evaluate else None,
            held_adapters=held_adapters,
            cursor=lambda: {"position": 7},
            observer=self.observer,
            export=export,
        )
        context = RunContext(events=self.observer, reports=reports or NoReports(), clock=clock)
        self.controller = Controller(config, context, parts, progress or Progress(), failed_steps)
        self.fleet.newest = lambda: self.controller.progress.claimed

    async def starved(self) -> None:
        """Returns once the trainer waits for groups."""
        while not any(call.startswith("lease") for call in await self.buffer.waiting()):
            await asyncio.sleep(0)

    async def run(self) -> Progress:
        return await asyncio.wait_for(self.controller.run(), 300)
