"""Samplers, the adapters that servers are offered for them, and the requests for samples.

    sampler     samples with
    ----------  --------------------------------------------------------------
    snapshot    an adapter of its own, saved for it
    inflight    the newest adapter that its model has saved for such samplers, also in the middle of long samples
    path        the adapter of a checkpoint
    base        no adapter

An adapter is offered to the servers when it is first used, and again after a restart. It belongs to one sampler, model
or checkpoint; once that has dropped it, it is withdrawn and its folder removed as soon as no request uses it.

Requests run at the same time, in no order, up to a number per tenant. They change nothing, so after a crash those
without an outcome run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import DataError
from megasync.service import interfaces
from megasync.service.checkpoints import Checkpoints, folder_of, remove
from megasync.service.limits import Limits
from megasync.service.promises import Change, Promise, Promises, drop_record, first_of, put_record
from megasync.service.records import Model, Sampler, Session
from megasync.service.requests import Failed, Gone, Outcome, Sample, ServiceClosed, Unknown
from megasync.service.saved_files import Files, check_files

log = logging.getLogger(__name__)

# Numbers of requests that each client of a sampler has to itself.
CLIENT_NUMBERS = 1_000_000_000


@dataclass(slots=True)
class _Adapter:
    """An adapter that was used since the service opened."""

    name: str
    offer: asyncio.Task[None] | None = None
    users: int = 0
    dropped: bool = False
    # Its files that are as they were recorded.
    checked: set[str] = field(default_factory=set[str])


class Adapters:
    """The adapters that servers know, and the folders that they are in."""

    def __init__(self, run: Path, servers: interfaces.Sampler) -> None:
        self._run = run
        self._servers = servers
        self._known: dict[str, _Adapter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, name: str, files: Files) -> asyncio.Task[None]:
        """Begins to offer an adapter, once for all who ask. Fails with CheckpointError for others than its files."""
        adapter = self._known.setdefault(name, _Adapter(name))
        if adapter.offer is None or (adapter.offer.done() and not _succeeded(adapter.offer)):
            adapter.offer = asyncio.create_task(self._offer(name, files), name=f"offer {name}")
            adapter.offer.add_done_callback(_succeeded)
        return adapter.offer

    async def _offer(self, name: str, files: Files) -> None:
        await self.check(name, files)
        await self._servers.offer(name, self._run / folder_of(name))

    async def check(self, name: str, files: Files, file: str | None = None) -> None:
        """Raises CheckpointError unless an adapter's files, or one of them, are the recorded ones. Reads each once."""
        adapter = self._known.setdefault(name, _Adapter(name))
        wanted = {*files.described} if file is None else {file}
        if rest := wanted - adapter.checked:
            unread = Files({each: files.described[each] for each in rest})
            await asyncio.to_thread(check_files, self._run / folder_of(name), unread, files.described)
            adapter.checked |= rest

    @asynccontextmanager
    async def using(self, name: str) -> AsyncGenerator[None]:
        """Keeps an adapter while the block runs."""
        adapter = self._known.setdefault(name, _Adapter(name))
        adapter.users += 1
        try:
            yield
        finally:
            adapter.users -= 1
            self._withdraw_unused(adapter)

    def drop(self, name: str) -> None:
        """Withdraws an adapter and removes its folder, once nothing uses it."""
        adapter = self._known.setdefault(name, _Adapter(name))
        adapter.dropped = True
        self._withdraw_unused(adapter)

    async def close(self) -> None:
        offers = [each.offer for each in self._known.values() if each.offer is not None]
        await cancel_and_wait(*offers, *self._tasks)

    def _withdraw_unused(self, adapter: _Adapter) -> None:
        if adapter.dropped and not adapter.users and self._known.pop(adapter.name, None) is not None:
            task = asyncio.create_task(self._withdraw(adapter), name=f"withdraw {adapter.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _withdraw(self, adapter: _Adapter) -> None:
        if adapter.offer is not None:
            await asyncio.wait([adapter.offer])
        try:
            # An earlier process may have offered it.
            await self._servers.withdraw(adapter.name)
        except Exception as error:  # noqa: BLE001 - servers forget it when they need its room
            log.warning("Adapter %s was not withdrawn from the servers: %s", adapter.name, error)
        await asyncio.to_thread(remove, self._run / folder_of(adapter.name))


def _succeeded(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None


@dataclass(slots=True)
class _Stream:
    """The completions of one client of a sampler by position, in order: the promise, and whether it failed."""

    completions: dict[int, tuple[str, bool]] = field(default_factory=dict[int, tuple[str, bool]])
    waiting: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class Samplers:
    """The samplers of all tenants."""

    def __init__(
        self,
        adapters: Adapters,
        servers: interfaces.Sampler,
        records: dict[str, Sampler],
        promises: Promises,
        checkpoints: Checkpoints,
        models: Mapping[str, Model],
        sessions: Mapping[str, Session],
        limits: Limits,
    ) -> None:
        self._adapters = adapters
        self._servers = servers
        self._records = records
        self._promises = promises
        self._checkpoints = checkpoints
        self._models = models
        self._sessions = sessions
        self._limits = limits
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._room: dict[str, asyncio.Semaphore] = {}
        self._streams: dict[tuple[str, int], _Stream] = {}
        # All samplers of each tenant, and those that are snapshots, least recently used first.
        self._used: dict[str, OrderedDict[str, Sampler]] = {}
        self._snapshots: dict[str, OrderedDict[str, Sampler]] = {}
        for sampler in sorted(records.values(), key=lambda each: each.created):
            self._sessions[sampler.session].samplers.append(sampler.id)
            self._used.setdefault(sampler.tenant, OrderedDict())[sampler.id] = sampler
            if sampler.adapter and not sampler.ended:
                self._snapshots.setdefault(sampler.tenant, OrderedDict())[sampler.id] = sampler

    def find(self, tenant: str, name: str) -> Sampler:
        found = self._records.get(name)
        if found is None or found.tenant != tenant:
            raise Unknown(f"there is no sampler {name!r}; create one with a sampling client, or save weights for one")
        return found

    def living(self, tenant: str, name: str) -> Sampler:
        found = self.find(tenant, name)
        if found.ended:
            raise Gone(f"sampler {name} is gone: {found.ended}")
        return found

    def add(self, sampler: Sampler) -> None:
        """Adds one whose record is written by the caller.

        Beyond the limits the one that was not used for longest is forgotten, and the snapshot ends.
        """
        self._records[sampler.id] = sampler
        self._sessions[sampler.session].samplers.append(sampler.id)
        used = self._used.setdefault(sampler.tenant, OrderedDict())
        used[sampler.id] = sampler
        if len(used) > self._limits.records:
            forgotten = next(iter(used.values()))
            self.end(forgotten, "the tenant has too many newer ones")
            self._promises.record(self.forget(forgotten.id))
        if not sampler.adapter:
            return
        snapshots = self._snapshots.setdefault(sampler.tenant, OrderedDict())
        snapshots[sampler.id] = sampler
        while len(snapshots) > self._limits.adapters:
            oldest = next(iter(snapshots.values()))
            self.end(
                oldest,
                f"the tenant has {self._limits.adapters} newer snapshots (limit adapters={self._limits.adapters}); "
                f"save weights under a name to keep them",
            )

    def end(self, sampler: Sampler, reason: str) -> None:
        """Ends a sampler: it accepts nothing anymore, and its own adapter goes."""
        if sampler.ended:
            return
        sampler.ended = reason
        self._snapshots.get(sampler.tenant, OrderedDict[str, Sampler]()).pop(sampler.id, None)
        adapter, sampler.adapter, sampler.adapter_files = sampler.adapter, "", Files()
        self._promises.record(
            put_record("sampler", sampler.id, sampler),
            then=lambda: self._adapters.drop(adapter) if adapter else None,
        )

    def forget(self, name: str) -> Change:
        """Forgets a sampler that has ended; returns the change of the record."""
        sampler = self._records.pop(name)
        self._sessions[sampler.session].samplers.remove(name)
        del self._used[sampler.tenant][name]
        return drop_record("sampler", name)

    def named(self, name: str) -> Sampler | None:
        return self._records.get(name)

    def bytes_of(self, tenant: str) -> int:
        return sum(each.adapter_files.size for each in self._snapshots.get(tenant, {}).values())

    def snapshots_of(self, tenant: str) -> int:
        return len(self._snapshots.get(tenant, ()))

    def check(self, tenant: str, request: Sample) -> None:
        """Raises DataError if the request names what the tenant cannot sample."""
        self._adapter(tenant, request)

    def start(self, promise: Promise) -> None:
        """Runs a request for samples."""
        task = asyncio.create_task(self._run(promise), name=promise.id)
        self._tasks[promise.id] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[promise.id]
            if promise.id in self._cancelled:
                self._cancelled.discard(promise.id)
                # Also if it had not begun, so that nothing in it could notice.
                if task.cancelled():
                    self._promises.settle(promise, Failed("the request was cancelled by its client", "user"))

        task.add_done_callback(ended)

    def cancel(self, promise: Promise) -> None:
        """Stops a request that runs; has no effect on one that has ended."""
        if (task := self._tasks.get(promise.id)) is not None and promise.id not in self._cancelled:
            self._cancelled.add(promise.id)
            task.cancel()

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks.values())

    def completed(self, promise: Promise) -> None:
        """Reports a completed request to its client's stream."""
        if not promise.target:
            return
        stream = self._streams.setdefault(_client_of(promise), _Stream())
        stream.completions[promise.position] = promise.id, promise.failed
        stream.arrived.set()

    def forgotten(self, promise: Promise) -> None:
        """Drops the completion of a request whose outcome is no longer kept."""
        if (stream := self._streams.get(_client_of(promise))) is not None:
            stream.completions.pop(promise.position, None)
            self._drop_empty(_client_of(promise), stream)

    def _drop_empty(self, client: tuple[str, int], stream: _Stream) -> None:
        if not stream.completions and not stream.waiting:
            self._streams.pop(client, None)

    async def completions(
        self, tenant: str, sampler: str, client: int, cursor: int, seconds: float, retrieved: Iterable[str] = ()
    ) -> tuple[Sequence[tuple[str, bool]], int]:
        """The requests that completed after a cursor, as (promise, whether it failed), and the cursor to ask with next.

        Completions up to ``cursor`` are dropped, and outcomes that the client has ``retrieved`` forgotten. Waits up to
        ``seconds`` for a first completion.
        """
        self.find(tenant, sampler)
        for name in retrieved:
            promise = self._promises.find(name)
            if promise is not None and promise.tenant == tenant and promise.target == sampler:
                self._promises.forget(promise)
        stream = self._streams.setdefault((sampler, client), _Stream())
        for position in [position for position in stream.completions if position <= cursor]:
            del stream.completions[position]
        stream.waiting += 1
        try:
            if not stream.completions and seconds > 0:
                stream.arrived.clear()
                await first_of(seconds, stream.arrived, self._promises.closing)
                if not stream.completions and self._promises.failure:
                    raise ServiceClosed(self._promises.failure)
            return list(stream.completions.values()), max(stream.completions, default=cursor)
        finally:
            stream.waiting -= 1
            self._drop_empty((sampler, client), stream)

    async def _run(self, promise: Promise) -> None:
        room = self._room.setdefault(promise.tenant, asyncio.Semaphore(self._limits.samples))
        outcome: Outcome
        try:
            async with room:
                await self._promises.writable()
                request = await self._promises.body(promise)
                assert isinstance(request, Sample)
                async with AsyncExitStack() as used:
                    outcome = await self._sample(promise.tenant, request, used)
        except DataError as error:
            outcome = Failed(str(error), "user")
        except Exception as error:  # noqa: BLE001 - whatever it is, the promise ends with it
            log.warning("Request %s for samples failed: %s", promise.id, error)
            outcome = Failed(f"the servers could not sample: {error}; repeat the request", "server")
        self._promises.settle(promise, outcome)

    async def _sample(self, tenant: str, request: Sample, used: AsyncExitStack) -> interfaces.Samples:
        """Has a request answered with its adapter, or the adapters that follow one another, which stay in ``used``."""
        taken = [""]

        async def newest() -> str:
            name, files = self._adapter(tenant, request)
            if name != taken[-1]:
                await used.enter_async_context(self._adapters.using(name))
                await asyncio.shield(self._adapters.offer(name, files))
                taken.append(name)
            return name

        async def newest_or_last() -> str:
            # What was begun is finished, whatever has become of the model.
            with suppress(DataError):
                return await newest()
            return taken[-1]

        follows = request.sampler is not None and self.find(tenant, request.sampler).inflight is not None
        return await self._servers.sample(request.sampling, await newest(), newest_or_last if follows else None)

    def _adapter(self, tenant: str, request: Sample) -> tuple[str, Files]:
        """The name and the files of the adapter to sample with. Raises DataError if there is none."""
        if request.path is not None:
            checkpoint = self._checkpoints.find(tenant, request.path)
            return checkpoint.adapter, checkpoint.files
        if request.sampler is None:
            return "", Files()
        sampler = self.living(tenant, request.sampler)
        self._used[tenant].move_to_end(sampler.id)
        if sampler.inflight is not None:
            model = self._models.get(sampler.inflight)
            if model is None or not model.inflight:
                raise Gone(f"the model {sampler.inflight} that sampler {sampler.id} follows is gone")
            return model.inflight, model.inflight_files
        if sampler.path is not None:
            checkpoint = self._checkpoints.find(tenant, sampler.path)
            return checkpoint.adapter, checkpoint.files
        if sampler.adapter:
            self._snapshots[tenant].move_to_end(sampler.id)
        return sampler.adapter, sampler.adapter_files


def _client_of(promise: Promise) -> tuple[str, int]:
    """The sampler and the number of the client that a request is of."""
    return promise.target, promise.seq // CLIENT_NUMBERS
