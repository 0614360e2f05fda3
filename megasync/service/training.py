"""The models' queues, and the one task that calls the ranks.

    submit ──▶ waiting (by number) ──▶ turn ──▶ restore ──▶ call ──▶ outcome, state and records in one transaction
                  n runs after n-1      fair by     the model's last durable state,
                                        tokens      then its recorded passes again

    waits for           ends with
    ------------------  ---------------------------------------------------------------------------------
    an earlier number   its request; after `gap_seconds` those behind it fail, and it is given up
    its turn            the end of the calls before it
    a call of the ranks the call, which has deadlines of its own; a lost rank restarts all of them
    room on the disk    room; passes that are done keep their order
    its own state       the file that the state is written to; other models' requests run meanwhile

Invariants:

- Requests of a model take effect in the order of their numbers, and the cursor (`Model.next`), the outcome and what
  changed are written together. So a request has its outcome and its effect, or neither.
- After an optimizer step the model's state is saved in a folder of its own before the outcome is recorded, and the
  folder before it is removed after that. The state on the ranks is always the last durable one plus the recorded passes
  with gradients after it (`replay`), so it can be made again at any time: after a crash, a lost rank, an eviction.
- Adapters and moments change with steps and loads alone. So whatever is saved of a model is the files of its last state
  under other names, without a call of the ranks; only of a model that has none yet they copy it.
- The ranks only copy a state. It is written while they compute for other models (`saves`); the model itself waits for
  it (`ModelQueue.saving`).
- Whatever an unexpected error leaves on the ranks is not used: they are restarted. A request that has lost the ranks
  `ATTEMPTS` times fails, and runs alone after the first time, so that it takes nobody with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megasync.concurrency.tasks import Backoff
from megasync.errors import CheckpointError, DataError, ProcessLost
from megasync.layout.adapter import OPTIMIZER
from megasync.service import interfaces
from megasync.service.checkpoints import (
    STATES,
    Checkpoints,
    adapter_of,
    check_name,
    check_ttl,
    file_name,
    folder_of,
    path_of,
    remove,
    state_folder,
)
from megasync.service.interfaces import PassResult
from megasync.service.limits import Limits
from megasync.service.promises import Change, Promise, Promises, drop_record, put_record
from megasync.service.records import Checkpoint, CheckpointKind, Model, Sampler, Session
from megasync.service.requests import (
    Compute,
    CreateModel,
    Failed,
    LoadWeights,
    ModelReady,
    OptimStep,
    Outcome,
    Refused,
    Request,
    Saved,
    SaveForSampler,
    SaveWeights,
    ServiceClosed,
    UnloadModel,
    Updated,
)
from megasync.service.samplers import Adapters, Samplers
from megasync.service.saved_files import Files, check_files
from megasync.service.saves import Saves
from megasync.service.scheduler import FairTurns

log = logging.getLogger(__name__)

# Times that the ranks may be lost under a request, or while a model is restored, before that is at fault.
ATTEMPTS = 3
# Attempts to start the ranks again, and the first and longest seconds between them.
RESTARTS = 5
RESTART_SECONDS = (1.0, 60.0)
# Requests that need no state on the ranks.
WITHOUT_STATE = frozenset(kind.__name__ for kind in (LoadWeights, UnloadModel, Refused))
# Requests that need none if it is on disk.
SAVING = frozenset(kind.__name__ for kind in (SaveWeights, SaveForSampler))
# Tokens that a request costs which computes none, as an optimizer step.
STEP_TOKENS = 1_000


@dataclass(eq=False, slots=True)
class ModelQueue:
    """A model and its requests. ``resident`` tells whether the ranks have its state."""

    record: Model
    waiting: dict[int, Promise] = field(default_factory=dict[int, Promise])
    # Finished passes with gradients since the last durable state, in order.
    replay: list[Promise] = field(default_factory=list[Promise])
    unload: Promise | None = None
    resident: bool = False
    # Requests at the head that are in the batch being made or run.
    taken: int = 0
    # Whether its state is being written, which ends the request at the head.
    saving: bool = False
    # Since when an earlier number is missing.
    gap_since: float | None = None
    # Times that the ranks were lost while the model was restored.
    restores: int = 0
    # The loss per token of the last pass.
    loss: float | None = None

    def head(self) -> Promise | None:
        """The next request that can run."""
        if self.saving:
            return None
        found = self.waiting.get(self.record.next + self.taken)
        return self.unload if found is None and not self.taken else found


@dataclass(frozen=True, slots=True)
class _Turn:
    model: ModelQueue
    promise: Promise


class _NotRestored(Exception):
    """An error while a model was restored: while its state was ``loading``, or its gradients were computed again."""

    def __init__(self, model: ModelQueue, loading: bool) -> None:
        super().__init__(model.record.id)
        self.model = model
        self.loading = loading


class Training:
    """Runs the requests of all models, one call of the ranks at a time."""

    def __init__(
        self,
        run: Path,
        trainer: interfaces.Trainer,
        records: dict[str, Model],
        past_steps: Mapping[str, int],
        sessions: Mapping[str, Session],
        promises: Promises,
        checkpoints: Checkpoints,
        adapters: Adapters,
        samplers: Samplers,
        limits: Limits,
        clock: Callable[[], float],
        restart_seconds: tuple[float, float] = RESTART_SECONDS,
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._records = records
        self._models: dict[str, ModelQueue] = {}
        # The models of each tenant in the order in which they were made, and those of them that have not ended.
        self._of: dict[str, dict[str, ModelQueue]] = {}
        self._living: dict[str, dict[str, ModelQueue]] = {}
        self._sessions = sessions
        self._promises = promises
        self._checkpoints = checkpoints
        self._adapters = adapters
        self._samplers = samplers
        self._limits = limits
        self._clock = clock
        self._backoff = Backoff(restart_seconds)
        self._tenants = FairTurns()
        self._turns: dict[str, FairTurns] = {}
        # Models that the ranks are to forget.
        self._leaving: set[str] = set()
        # Models that have requests.
        self._busy: set[str] = set()
        self._background: set[asyncio.Future[None]] = set()
        self.saves = Saves(run, trainer, promises)
        self._wake = asyncio.Event()
        self.restarts = 0
        # Steps of each tenant's models that are forgotten, and tokens of all passes since the service opened.
        self._past_steps = Counter(past_steps)
        self.tokens = Counter[str]()
        for record in sorted(records.values(), key=lambda each: each.created):
            self.add(record)
        for promise in promises:
            if (model := self._models.get(promise.target)) is not None and promise.position and promise.request_bytes:
                model.replay.append(promise)
        for model in self._models.values():
            model.replay.sort(key=lambda promise: promise.seq)

    # Queues

    def find(self, name: str) -> ModelQueue | None:
        return self._models.get(name)

    def of(self, tenant: str) -> Collection[ModelQueue]:
        """The tenant's models in the order in which they were made, also those that have ended."""
        return self._of.get(tenant, {}).values()

    def living(self, tenant: str) -> Collection[ModelQueue]:
        return self._living.get(tenant, {}).values()

    def steps_of(self, tenant: str) -> int:
        """The optimizer steps of all models that the tenant ever had."""
        return self._past_steps[tenant] + sum(model.record.steps for model in self.of(tenant))

    def add(self, record: Model) -> Model:
        """Adds a model whose record is written by the caller."""
        self._records[record.id] = record
        self._models[record.id] = model = ModelQueue(record)
        self._of.setdefault(record.tenant, {})[record.id] = model
        if not record.ended:
            self._living.setdefault(record.tenant, {})[record.id] = model
        self._sessions[record.session].models.append(record.id)
        return record

    def discard(self, name: str) -> None:
        """Takes back a model whose first request was not accepted, or forgets one."""
        record = self._records.pop(name)
        del self._models[name], self._of[record.tenant][name]
        self._living.get(record.tenant, {}).pop(name, None)
        self._sessions[record.session].models.remove(name)

    def enqueue(self, promise: Promise) -> None:
        """Queues a request that is recorded."""
        model = self._models[promise.target]
        if model.record.ended:
            self._promises.settle(promise, Failed(f"model {model.record.id} is gone: {model.record.ended}", "user"))
            return
        model.record.last_request = self._clock()
        if promise.request_type == UnloadModel.__name__:
            model.unload = promise
        else:
            model.waiting[promise.seq] = promise
        self._busy.add(model.record.id)
        self._note_gap(model)
        self._wake.set()

    def idle(self, name: str) -> bool:
        """Whether a model has nothing to do."""
        model = self._models[name]
        return not model.waiting and model.unload is None

    def evict(self, name: str) -> None:
        """Lets the ranks forget an idle model; it comes back with its next request."""
        if self._models[name].resident:
            self._leaving.add(name)
            self._wake.set()

    def drop_inflight(self, name: str) -> None:
        """Ends the inflight samplers of a model."""
        record = self._models[name].record
        if record.inflight:
            adapter, record.inflight, record.inflight_files = record.inflight, "", Files()
            self._promises.record(put_record("model", name, record), then=lambda: self._adapters.drop(adapter))

    def end(self, name: str, reason: str) -> None:
        """Ends a model: its requests fail, except those that run, and its state goes. Its checkpoints stay."""
        model = self._models[name]
        if model.record.ended:
            return
        model.record.ended = reason
        del self._living[model.record.tenant][name]
        running = {model.record.next + index for index in range(model.taken)}
        for promise in [promise for seq, promise in sorted(model.waiting.items()) if seq not in running]:
            del model.waiting[promise.seq]
            self._promises.settle(promise, Failed(f"model {name} is gone: {reason}; the request had no effect", "user"))
        if model.unload is not None and not model.taken:
            promise, model.unload = model.unload, None
            self._promises.settle(promise, ModelReady(name))
        self._promises.record(*self._drop_replay(model), put_record("model", name, model.record))
        self._leaving.add(name)
        self._wake.set()

    async def keep(self, name: str) -> bool:
        """Makes the last state of a model without work a checkpoint for a time, unless one has been saved since.

        Returns whether there is nothing to lose.
        """
        record = self._models[name].record
        last = int(record.state.rpartition("/")[2] or 0)
        saved = (each for each in self._checkpoints.of_model(name) if each.kind == "weights")
        if record.ended or not record.state or any(int(each.adapter.rpartition("-")[2]) >= last for each in saved):
            return True
        if not (self._run / record.state).is_dir():
            log.warning("The state of model %s is lost: there is no folder %s", name, record.state)
            return True
        adapter, written = adapter_of(name, last), asyncio.get_running_loop().create_future()
        source = record.state, record.state_files
        await self.saves.begin(name, folder_of(adapter), True, source, written.set_result)
        files: Files | Exception = await asyncio.shield(written)
        if isinstance(files, Exception):
            return False
        expires = (now := self._clock()) + self._limits.silent_kept_seconds
        path = path_of(name, "weights", called := f"silent-{last}")
        checkpoint = Checkpoint(
            path, record.tenant, name, "weights", called, now, record.spec, adapter, files, None, expires
        )
        self._checkpoints.add(checkpoint)
        self._promises.record(put_record("checkpoint", path, checkpoint))
        return True

    def forget(self, name: str) -> list[Change]:
        """Forgets a model that has ended; returns the changes of the record."""
        record = self._models[name].record
        self.discard(name)
        self._busy.discard(name)
        if (turns := self._turns.get(record.tenant)) is not None:
            turns.forget(name)
        self._past_steps[record.tenant] += record.steps
        return [drop_record("model", name), put_record("steps", record.tenant, self._past_steps[record.tenant])]

    def gone(self, name: str) -> bool:
        """Whether a model has ended, and nothing of it is on the ranks or being written."""
        model = self._models[name]
        return bool(model.record.ended) and not (
            model.resident or model.saving or model.waiting or name in self._leaving
        )

    def give_up_gaps(self) -> None:
        """Fails requests that have waited too long for one with an earlier number."""
        for model in [self._models[name] for name in self._busy]:
            since = model.gap_since
            if since is None or self._clock() - since < self._limits.gap_seconds:
                continue
            missing, first = model.record.next, min(model.waiting)
            until = first
            while until in model.waiting:
                promise = model.waiting.pop(until)
                until += 1
                model.record.next = until
                self._promises.settle(
                    promise,
                    Failed(
                        f"request {missing} of model {model.record.id} did not arrive within "
                        f"{self._limits.gap_seconds:g} s, so request {promise.seq} had no "
                        f"effect; repeat both under new numbers",
                        "user",
                    ),
                    put_record("model", model.record.id, model.record),
                )
            model.gap_since = None
            self._note_gap(model)
            self._wake.set()

    def _note_gap(self, model: ModelQueue) -> None:
        missing = bool(model.waiting) and not model.taken and model.record.next not in model.waiting
        model.gap_since = (self._clock() if model.gap_since is None else model.gap_since) if missing else None

    # The task

    async def work(self) -> None:
        """Runs requests until it is cancelled, or the ranks cannot be started."""
        with suppress(ServiceClosed):
            while True:
                await self._promises.writable()
                if leaving := [name for name in self._leaving if not self._models[name].saving]:
                    await self._guarded((), self._forget(leaving))
                elif batch := self._take():
                    await self._guarded(batch, self._perform(batch))
                else:
                    self._wake.clear()
                    await self._wake.wait()

    async def close(self) -> None:
        """Waits for what runs in the background."""
        if self._background:
            await asyncio.wait(self._background)

    def _take(self) -> list[_Turn]:
        """The passes of several models, or one other request, whose turn it is."""
        batch: list[_Turn] = []
        tokens = 0
        while tokens < self._limits.batch:
            ready: dict[str, dict[str, ModelQueue]] = {}
            for name in list(self._busy):
                model = self._models[name]
                if model.head() is not None:
                    ready.setdefault(model.record.tenant, {})[name] = model
                elif not model.waiting and model.unload is None:
                    self._busy.discard(name)
            if not ready:
                break
            tenant = self._tenants.next(ready)
            turns = self._turns.setdefault(tenant, FairTurns())
            model = ready[tenant][turns.next(ready[tenant])]
            promise = model.head()
            assert promise is not None
            alone = promise.request_type != Compute.__name__ or promise.attempts > 0
            if alone and batch:
                break
            cost = max(promise.tokens, STEP_TOKENS)
            self._tenants.charge(tenant, cost)
            turns.charge(model.record.id, cost)
            model.taken += 1
            tokens += cost
            batch.append(_Turn(model, promise))
            if alone:
                break
        return batch

    async def _guarded(self, batch: Sequence[_Turn], work: Awaitable[None]) -> None:
        """Runs a call; if it fails unexpectedly, the ranks are restarted, and its requests run again or fail."""
        try:
            await work
        except ServiceClosed:
            raise
        except _NotRestored as error:
            # What is wrong with the model's own files or data leaves the ranks as they were.
            own = isinstance(error.__cause__, DataError | CheckpointError | OSError)
            if not own:
                await self._restart(error.__cause__ or error)
            error.model.restores += 1
            if own or error.model.restores >= ATTEMPTS:
                self._give_up_restoring(error, batch)
        except Exception as error:  # noqa: BLE001 - what it leaves on the ranks is not used
            await self._restart(error)
            for turn in batch:
                if turn.promise.position:
                    continue
                turn.promise.attempts += 1
                if turn.promise.attempts >= ATTEMPTS:
                    message = f"the trainer ranks failed {ATTEMPTS} times at this request: {error}; it had no effect"
                    self._finish(turn, Failed(message, "server"))
        for turn in batch:
            if not turn.model.saving:
                self._turned(turn)

    def _turned(self, turn: _Turn) -> None:
        """Lets a model go on after its turn."""
        model = turn.model
        model.taken = 0
        self._note_gap(model)
        if not turn.promise.position and model.record.ended:
            self._finish(turn, Failed(f"model {model.record.id} is gone: {model.record.ended}", "user"))

    def _give_up_restoring(self, error: _NotRestored, batch: Sequence[_Turn]) -> None:
        """Gives up gradients that cannot be made again, or else the request that needs the model; its state stays."""
        model, cause = error.model, error.__cause__
        model.restores = 0
        if not error.loading:
            first, last = model.replay[0].seq, model.replay[-1].seq
            model.record.lost = f"the gradients of requests {first} to {last} are lost, and not made again: {cause}"
            changes = self._drop_replay(model)
            self._promises.record(*changes, put_record("model", model.record.id, model.record))
            return
        turn = next(turn for turn in batch if turn.model is model)
        state = model.record.state or "its first state"
        message = (
            f"the model cannot be brought back from {state}: {cause}; the request had no effect: repeat it, or load a "
            f"checkpoint into the model first if that does not help"
        )
        log.warning("Model %s: %s", model.record.id, message)
        self._finish(turn, Failed(message, "server"))

    async def _restart(self, error: BaseException) -> None:
        for model in self._models.values():
            model.resident = False
        self._backoff.reset()
        for _ in range(RESTARTS):
            log.warning("The trainer ranks are restarted: %s", error)
            self.restarts += 1
            try:
                await self._trainer.restart()
            except Exception as failure:  # noqa: BLE001 - it is repeated, and the last one is reported
                error = failure
                await asyncio.sleep(self._backoff.next())
            else:
                return
        reason = f"the trainer ranks could not be started {RESTARTS} times: {error}; start the service again to resume"
        log.error("The service stops: %s", reason)
        self._promises.close(reason)
        raise ServiceClosed(reason)

    async def _forget(self, leaving: Sequence[str]) -> None:
        for name in leaving:
            model = self._models[name]
            if model.resident:
                await self._trainer.unload(name)
                model.resident = False
            if model.record.ended and model.record.state:
                await self._promises.commit()
                await asyncio.to_thread(remove, self._run / STATES / file_name(name))
            self._leaving.discard(name)

    async def _restore(self, model: ModelQueue) -> None:
        """Brings a model's state to the ranks: the last durable one, and the gradients since."""
        record = model.record
        if model.resident or record.next == 0:
            return
        loading = True
        try:
            if record.state:
                folder = self._run / record.state
                await asyncio.to_thread(check_files, folder, record.state_files)
                await self._trainer.load(record.id, record.spec, folder, True)
            else:
                await self._trainer.create(record.id, record.spec)
            loading = False
            replay = list(model.replay)
            while replay:
                tokens, passes = 0, list[tuple[str, interfaces.Pass]]()
                while replay and tokens < self._limits.batch:
                    promise = replay.pop(0)
                    request = await self._promises.body(promise)
                    assert isinstance(request, Compute)
                    passes.append((record.id, request.work))
                    tokens += promise.tokens
                for result in await self._trainer.compute(passes):
                    if isinstance(result, Exception):
                        raise result
        except Exception as error:
            raise _NotRestored(model, loading) from error
        model.resident = True
        model.restores = 0

    async def _make_room(self, batch: Sequence[_Turn]) -> None:
        """Takes models from the ranks, those idle for longest first, of tenants with more than their limit there.

        Models of silent sessions do not count when others are made, and come back all the same.
        """
        needed = {turn.model for turn in batch if turn.promise.request_type not in (*SAVING, UnloadModel.__name__)}
        for tenant in {model.record.tenant for model in needed if not model.resident}:
            there = [model for model in self.living(tenant) if model.resident or model in needed]
            others = [model for model in there if model not in needed and not model.saving]
            others.sort(key=lambda model: model.record.last_request)
            for model in others[: max(0, len(there) - self._limits.models)]:
                await self._trainer.unload(model.record.id)
                model.resident = False

    async def _perform(self, batch: Sequence[_Turn]) -> None:
        await self._make_room(batch)
        for turn in batch:
            saving = turn.promise.request_type in SAVING and turn.model.record.state
            if not saving and turn.promise.request_type not in WITHOUT_STATE:
                await self._restore(turn.model)
        requests = [await self._promises.body(turn.promise) for turn in batch]
        if isinstance(requests[0], Compute):
            await self._compute(batch, [request for request in requests if isinstance(request, Compute)])
            return
        (turn,), (request,) = batch, requests
        try:
            await self._one(turn, request)
        except DataError as error:
            self._finish(turn, Failed(str(error), "user"))

    async def _compute(self, batch: Sequence[_Turn], requests: Sequence[Compute]) -> None:
        try:
            results = await self._trainer.compute([(each.model, each.work) for each in requests])
        except DataError as error:
            if len(batch) > 1:
                # Each alone, to learn whose fault it is.
                for turn in batch:
                    turn.promise.attempts = max(1, turn.promise.attempts)
                return
            results = [error]
        spoilt: set[ModelQueue] = set()
        for turn, request, result in zip(batch, requests, results, strict=True):
            if isinstance(result, DataError):
                self._finish(turn, Failed(str(result), "user"))
            elif isinstance(result, ProcessLost):
                raise result
            elif isinstance(result, Exception):
                message = f"the trainer ranks could not compute this pass: {result}; it had no effect"
                self._finish(turn, Failed(message, "server"))
                # Its gradients may be in part among the model's.
                spoilt.add(turn.model)
            else:
                self._computed(turn, request, result)
        for model in spoilt:
            model.resident = False
            await self._trainer.unload(model.record.id)

    def _computed(self, turn: _Turn, request: Compute, result: PassResult) -> None:
        model = turn.model
        self.tokens[model.record.tenant] += turn.promise.tokens
        if "loss:sum" in result.metrics:
            model.loss = result.metrics["loss:sum"] / max(1, turn.promise.tokens)
        if request.work.backward:
            model.replay.append(turn.promise)
        self._finish(turn, result, keep_request=request.work.backward)

    async def _one(self, turn: _Turn, request: Request | Refused) -> None:
        """Runs any other request. Raises DataError for what its client must change; then it had no effect."""
        record = turn.model.record
        match request:
            case CreateModel():
                await self._trainer.create(record.id, record.spec)
                turn.model.resident = True
                self._finish(turn, ModelReady(record.id))
            case OptimStep():
                await self._step(turn, request)
            case LoadWeights():
                await self._load(turn, request)
            case SaveWeights():
                await self._save(turn, request)
            case SaveForSampler():
                await self._save_for_sampler(turn, request)
            case UnloadModel():
                self._unload(turn)
            case Refused():
                raise DataError(request.message)
            case _:
                raise TypeError(f"a model cannot run {type(request).__name__}")

    async def _step(self, turn: _Turn, request: OptimStep) -> None:
        model, record = turn.model, turn.model.record
        if record.lost:
            message = f"{record.lost}; all gradients since the last step were dropped: repeat those passes and the step"
            await self._trainer.unload(record.id)
            model.resident, record.lost = False, ""
            self._finish(turn, Failed(message, "server"), *self._drop_replay(model))
            return
        metrics = await self._trainer.update(record.id, request.adam)
        if metrics.get("skipped:sum", 0):
            # Only the gradients are gone.
            self._finish(turn, Updated(metrics), *self._drop_replay(model))
            return

        def durable() -> None:
            record.steps += 1
            self._finish(turn, Updated(metrics), *self._drop_replay(model), then=self._removal(model))

        await self._save_state(turn, durable)

    async def _load(self, turn: _Turn, request: LoadWeights) -> None:
        model, record = turn.model, turn.model.record
        checkpoint = self._checkpoints.find(record.tenant, request.path)
        mine, its = record.spec, checkpoint.spec
        if (its.rank, its.attention, its.mlp, its.unembed) != (mine.rank, mine.attention, mine.mlp, mine.unembed):
            raise DataError(
                f"{request.path} has adapters {its}, but model {record.id} has {mine}; make a model from it"
            )
        if request.optimizer and checkpoint.kind != "weights":
            raise DataError(
                f"{request.path} was saved for samplers, without the optimizer's state; load it without, or load "
                f"weights that save_state wrote"
            )
        async with self._adapters.using(checkpoint.adapter):
            folder, files = self._run / folder_of(checkpoint.adapter), checkpoint.files
            try:
                # Whatever is wrong with the optimizer's state alone is no reason to refuse the adapters.
                needed = files if request.optimizer else files.without(OPTIMIZER)
                await asyncio.to_thread(check_files, folder, needed, files.described)
                await self._trainer.load(record.id, record.spec, folder, request.optimizer)
            except (OSError, CheckpointError) as error:
                self._finish(turn, Failed(f"{request.path} cannot be loaded: {error}", "server"))
                return
        model.resident = True

        def durable() -> None:
            record.lost = ""
            ready = ModelReady(record.id, request.path)
            self._finish(turn, ready, *self._drop_replay(model), then=self._removal(model))

        await self._save_state(turn, durable)

    async def _save_state(self, turn: _Turn, durable: Callable[[], None]) -> None:
        """Has the state on the ranks saved. Calls ``durable`` then; without room the request fails without effect."""
        record = turn.model.record
        state = state_folder(record.id, turn.promise.seq)

        def saved(files: Files) -> None:
            record.state, record.state_files = state, files
            durable()

        def failed(error: Exception) -> None:
            # The ranks go back to the last state that is saved.
            self._leaving.add(record.id)
            message = (
                f"the state after request {turn.promise.seq} cannot be saved: {error}; the request had no effect, and "
                f"gradients are kept: repeat it"
            )
            if isinstance(error, DataError):
                self._finish(turn, Failed(message, "user"))
            else:
                self._finish(turn, Failed(f"{message} once there is room", "server"))

        await self._save_behind(turn, state, True, None, saved, failed)

    def _removal(self, model: ModelQueue) -> Callable[[], None]:
        """Removes the states before the present one."""
        present = self._run / model.record.state

        def remove_earlier() -> None:
            for folder in present.parent.iterdir() if present.parent.is_dir() else ():
                if folder != present and folder.name.isdigit() and int(folder.name) < int(present.name):
                    remove(folder)

        return lambda: self._in_background(asyncio.to_thread(remove_earlier))

    async def _save(self, turn: _Turn, request: SaveWeights) -> None:
        name = check_name(request.name or str(turn.promise.seq))
        await self._checkpoint(turn, "weights", name, request.overwrite, request.ttl_seconds, request.metadata)

    async def _checkpoint(
        self,
        turn: _Turn,
        kind: CheckpointKind,
        name: str,
        overwrite: bool,
        ttl: int | None,
        metadata: Mapping[str, str] | None,
    ) -> None:
        record, now = turn.model.record, self._clock()
        path = path_of(record.id, kind, name)
        check_ttl(ttl)
        if not overwrite and self._checkpoints.named(path) is not None:
            raise DataError(f"{path} exists; choose another name, delete it, or save with overwrite=True")

        def saved(files: Files) -> None:
            checkpoint = Checkpoint(
                path=path,
                tenant=record.tenant,
                model=record.id,
                kind=kind,
                name=name,
                created=now,
                spec=record.spec,
                adapter=adapter_of(record.id, turn.promise.seq),
                files=files,
                metadata=metadata,
                expires=None if ttl is None else now + ttl,
            )
            replaced = self._checkpoints.add(checkpoint)
            self._finish(
                turn,
                Saved(path=checkpoint.path),
                put_record("checkpoint", checkpoint.path, checkpoint),
                then=None if replaced is None else lambda: self._adapters.drop(replaced.adapter),
            )

        await self._save_adapter(turn, kind == "weights", saved)

    async def _save_for_sampler(self, turn: _Turn, request: SaveForSampler) -> None:
        record, seq = turn.model.record, turn.promise.seq
        if request.name is not None or request.sampler_seq is None:
            name = check_name(request.name or str(seq))
            kind = "external_weights" if request.external else "sampler_weights"
            await self._checkpoint(turn, kind, name, False, request.ttl_seconds, request.metadata)
            return
        session = record.session
        sampler = Sampler(sampler_id(session, request.sampler_seq), record.tenant, session, self._clock())
        exists = f"session {session} has a sampler number {request.sampler_seq} already; use the next number"
        if self._samplers.named(sampler.id) is not None:
            raise DataError(exists)

        def saved(files: Files) -> None:
            adapter, before = adapter_of(record.id, seq), ""
            # Another model may have made it meanwhile, or the session may have ended.
            gone = f"model {record.id} is gone: {record.ended}" if record.ended else ""
            if refusal := gone or (exists if self._samplers.named(sampler.id) is not None else ""):
                self._finish(turn, Failed(refusal, "user"), then=lambda: self._adapters.drop(adapter))
                return
            if request.inflight:
                sampler.inflight = record.id
                before, record.inflight, record.inflight_files = record.inflight, adapter, files
            else:
                sampler.adapter, sampler.adapter_files = adapter, files
            self._adapters.offer(adapter, files)
            self._samplers.add(sampler)
            self._finish(
                turn,
                Saved(sampler=sampler.id),
                put_record("sampler", sampler.id, sampler),
                then=(lambda: self._adapters.drop(before)) if before else None,
            )

        await self._save_adapter(turn, False, saved)

    async def _save_adapter(self, turn: _Turn, optimizer: bool, saved: Callable[[Files], None]) -> None:
        """Has the adapters saved in the folder of the request. Calls ``saved`` with its files, or the request fails."""
        record = turn.model.record
        used = (
            self.bytes_of(record.tenant)
            + self._checkpoints.bytes_of(record.tenant)
            + self._samplers.bytes_of(record.tenant)
        )
        if used >= self._limits.disk:
            raise DataError(
                f"the checkpoints, samplers and states of the tenant have {used} bytes, and the limit is "
                f"disk={self._limits.disk}; delete checkpoints or finish sessions, then repeat the request"
            )
        if (number := self._checkpoints.number_of(record.tenant)) >= self._limits.records:
            raise DataError(
                f"the tenant has {number} checkpoints, and the limit is {self._limits.records}; delete some, then "
                f"repeat the request"
            )

        def failed(error: Exception) -> None:
            until = "then" if isinstance(error, CheckpointError) else "once there is room"
            message = f"the checkpoint cannot be written: {error}; repeat the request {until}"
            self._finish(turn, Failed(message, "server"))

        folder = folder_of(adapter_of(record.id, turn.promise.seq))
        source = (record.state, record.state_files) if record.state else None
        await self._save_behind(turn, folder, optimizer, source, saved, failed)

    async def _save_behind(
        self,
        turn: _Turn,
        folder: str,
        optimizer: bool,
        source: tuple[str, Files] | None,
        saved: Callable[[Files], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Takes a model's state from the folder ``source``, or else the ranks, and begins to write it.

        One of the two functions ends the request then.
        """
        model = turn.model

        def ended(result: Files | Exception) -> None:
            # Nothing is awaited here, so all that changes is recorded together.
            if isinstance(result, Exception):
                failed(result)
            else:
                saved(result)
            model.saving = False
            self._turned(turn)
            self._wake.set()

        model.saving = True
        try:
            await self.saves.begin(model.record.id, folder, optimizer, source, ended)
        except BaseException:
            model.saving = False
            raise

    def _unload(self, turn: _Turn) -> None:
        turn.model.unload = None
        turn.model.taken = 0
        self._promises.settle(turn.promise, ModelReady(turn.model.record.id))
        self.end(turn.model.record.id, "it was unloaded; load one of its checkpoints to go on")

    def bytes_of(self, tenant: str) -> int:
        """The bytes of the states of a tenant's models, and of their inflight adapters."""
        return sum(model.record.state_files.size + model.record.inflight_files.size for model in self.living(tenant))

    # Outcomes

    def _finish(
        self,
        turn: _Turn,
        outcome: Outcome,
        *changes: Change,
        keep_request: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Records a request's outcome with everything that it changed."""
        model, promise = turn.model, turn.promise
        if promise.request_type == UnloadModel.__name__:
            model.unload = None
        else:
            model.waiting.pop(promise.seq)
            model.record.next = promise.seq + 1
            # The head of the queue moved by one.
            model.taken = max(0, model.taken - 1)
        if promise.seq == 0 and isinstance(outcome, Failed) and not model.record.ended:
            self.end(model.record.id, f"it could not be made: {outcome.message}")
        record = put_record("model", model.record.id, model.record)
        self._promises.settle(promise, outcome, *changes, record, keep_request=keep_request, then=then)

    def _drop_replay(self, model: ModelQueue) -> list[Change]:
        replay, model.replay = model.replay, []
        return [self._promises.release_request(promise) for promise in replay]

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def sampler_id(session: str, number: int) -> str:
    return f"{session}:sample:{number}"


def model_id(session: str, number: int) -> str:
    return f"{session}:train:{number}"
