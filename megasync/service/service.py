"""The training service: sessions, models, samplers and checkpoints of several tenants, and promises that are kept.

    client ──▶ submit ──▶ checks, record ──▶ promise id ──▶ outcome
                              │                                ▲
                   models: training (one call at a time)───────┤
                   samples: samplers (many at a time)──────────┘

A request is recorded before its promise is given, and an outcome before it is given out (`promises`). All else can be
made again from the record and the folders that it names, so the service may die at any moment: whoever opens it in the
same folder continues. Closing is no different; it only ends the waits of callers with `ServiceClosed`.

The same number of the same model or sampler, or the same idempotency key, is the same promise. Another body under it is
refused. A request that is refused for good uses up its number, so that the requests behind it do not wait for it.

A tenant sees what is its own and what was published. What belongs to another is unknown to it, like what never was.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from megasync.concurrency.batches import Run
from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import DataError
from megasync.service import interfaces, tenant_logs
from megasync.service.checkpoints import Checkpoints, folder_of, holds_folders, remove_others
from megasync.service.checks import check_base, check_key, check_request, tokens_of
from megasync.service.encoding import encode
from megasync.service.interfaces import ServedModel
from megasync.service.limits import Limits
from megasync.service.promises import FILE, Promise, Promises, Store, gone, put_record
from megasync.service.records import Checkpoint, Model, Sampler, Session
from megasync.service.requests import (
    Busy,
    Compute,
    CreateModel,
    Gone,
    LoadWeights,
    OptimStep,
    Outcome,
    Refused,
    Request,
    Sample,
    SaveForSampler,
    SaveWeights,
    ServiceClosed,
    Unknown,
    UnloadModel,
)
from megasync.service.samplers import Adapters, Samplers
from megasync.service.saved_files import Files
from megasync.service.sessions import Sessions, read_sessions
from megasync.service.status import ModelStatus, Rate, Status, TenantStatus
from megasync.service.training import RESTART_SECONDS, Training, model_id, sampler_id

# Seconds between two looks at what is past its time.
TIDY_SECONDS = 1.0
# Tokens of a pass that is encoded in a thread.
LARGE_TOKENS = 1 << 14
# The record has numbers of 64 bits.
MOST_NUMBERS = 2**63
CLOSING = "the service is shutting down; promises are kept: ask again once it runs"


class Service:
    """Serves one base model from ``folder``; used as `async with Service(...) as service`.

    ``clock`` returns seconds since 1970. ``restart_seconds`` are the first and longest pause between attempts to start
    the ranks. ``run`` replaces the thread that writes the record.
    """

    def __init__(
        self,
        folder: Path,
        trainer: interfaces.Trainer,
        sampler: interfaces.Sampler,
        served: ServedModel,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
        restart_seconds: tuple[float, float] = RESTART_SECONDS,
        run: Run | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.served = served
        self.limits = limits or Limits()
        self._clock = clock
        store = Store(folder / FILE, run, named=holds_folders(folder))
        sessions = read_sessions(store)
        models, checkpoints = store.read("model", Model), store.read("checkpoint", Checkpoint)
        samplers = store.read("sampler", Sampler)
        self._promises = Promises(store, self.limits, clock, self._settled, self._forgotten)
        self._adapters = Adapters(folder, sampler)
        self._checkpoints = Checkpoints(
            folder, checkpoints, self._promises, clock, lambda checkpoint: self._adapters.drop(checkpoint.adapter)
        )
        self._samplers = Samplers(
            self._adapters, sampler, samplers, self._promises, self._checkpoints, models, sessions, self.limits
        )
        self._training = Training(
            *(folder, trainer, models, store.read("steps", int), sessions, self._promises, self._checkpoints),
            *(self._adapters, self._samplers, self.limits, clock, restart_seconds),
        )
        self._sessions = Sessions(
            sessions, self._training, self._samplers, self._checkpoints, self._promises, self.limits, clock
        )
        self._rates: dict[str, Rate] = {}
        self._tasks: list[asyncio.Task[None]] = []
        remove_others(
            folder,
            [
                *(model.state for model in models.values() if model.state and not model.ended),
                *(folder_of(model.inflight) for model in models.values() if model.inflight),
                *(folder_of(sampler.adapter) for sampler in samplers.values() if sampler.adapter),
                *(folder_of(checkpoint.adapter) for checkpoint in checkpoints.values()),
            ],
        )

    async def __aenter__(self) -> Service:
        self._sessions.begin()
        for promise in list(self._promises):
            if not promise.position:
                self._start(promise)
            elif promise.request_type == Sample.__name__ and promise.outcome_type is not None:
                self._samplers.completed(promise)
        self._tasks = [
            self._promises.vital(self._training.work(), "training"),
            self._promises.vital(self._tidy_regularly(), "tidy"),
            self._promises.vital(self._sessions.work(), "silent sessions"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._promises.close(CLOSING)
        await cancel_and_wait(*self._tasks)
        await self._samplers.close()
        await self._training.saves.finished()
        await self._promises.end()
        await self._training.close()
        await self._adapters.close()

    async def until_failed(self) -> None:
        """Waits until the service cannot go on, and raises ServiceClosed with the reason."""
        await self._promises.closing.wait()
        raise ServiceClosed(self._promises.failure)

    # Promises

    async def submit(self, tenant: str, request: Request, key: str | None = None) -> str:
        """Accepts a request and returns the id of its promise, which is durable.

        Raises DataError for a refused one: Unknown, Gone or Busy for what the names say, and otherwise what its client
        must change. Raises ServiceClosed when the service is.
        """
        check_key(key)
        tokens = tokens_of(request, self.served.context)
        # A large request takes a while, in which others are answered.
        large = isinstance(request, Compute) and tokens > LARGE_TOKENS
        body, digest = await asyncio.to_thread(encoded, request) if large else encoded(request)
        self._check_open()
        if key is not None and (same := self._promises.of_key(tenant, key)) is not None:
            return await self._repeated(same, digest)
        name, target, seq = self._identify(tenant, request)
        if (same := self._promises.find(name)) is not None:
            return await self._repeated(same, digest)
        self._check_number(target, seq)
        now = self._clock()
        try:
            check_request(request, len(body), tokens, self.served, self.limits)
            self._check_room(tenant, request, target, seq, tokens, len(body))
        except Busy:
            raise
        except DataError as error:
            if seq > 0 and model_of(request):
                await self._refuse(name, tenant, target, seq, digest, str(error))
            raise
        promise = Promise(name, tenant, target, seq, key, type(request).__name__, digest, tokens, now, request)
        made = self._make(tenant, request, target)
        self._sessions.see(tenant, target)
        if made is None:
            recorded = self._promises.accept(promise, body, self._start)
        else:
            changes, undo = put_record("model", target, made), partial(self._training.discard, made.id)
            recorded = self._promises.accept(promise, body, self._start, changes, undo=undo)
        await asyncio.shield(recorded)
        return name

    async def outcome(self, tenant: str, promise: str, seconds: float) -> Outcome | None:
        """The outcome of a promise, or None if there is none within the time.

        Raises Unknown for a promise that the tenant was not given, Gone for an outcome that is no longer kept, and
        ServiceClosed when the service closes.
        """
        return await self._promises.wait(self._find(tenant, promise), seconds)

    async def completions(
        self, tenant: str, sampler: str, client: int, cursor: int, seconds: float, retrieved: Iterable[str] = ()
    ) -> tuple[Sequence[tuple[str, bool]], int]:
        """The samples that completed after a cursor, as (promise, whether it failed), and the cursor to ask with next.

        ``client`` numbers the clients that have joined a sampler. Completions up to the cursor are dropped, and
        outcomes that the client has ``retrieved`` forgotten. Waits up to ``seconds`` for a first one.
        """
        return await self._samplers.completions(tenant, sampler, client, cursor, seconds, retrieved)

    def cancel(self, tenant: str, promise: str) -> None:
        """Stops a request for samples, which then ends as failed. Requests of models are not stopped."""
        found = self._find(tenant, promise)
        if not found.position:
            self._samplers.cancel(found)

    async def refuse(self, tenant: str, model: str, seq: int, why: str) -> None:
        """Uses up the number of a request that could not be read, so that the requests behind it do not wait."""
        self._check_open()
        name, target, seq = self._identify(tenant, OptimStep(model, seq, interfaces.Adam(0.0)))
        if self._promises.find(name) is None:
            self._check_number(target, seq)
            await self._refuse(name, tenant, target, seq, b"", why)

    # Sessions

    async def create_session(
        self,
        tenant: str,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        name: str | None = None,
        key: str | None = None,
    ) -> str:
        """Begins a session and returns its id; the same id for the same idempotency key."""
        self._check_open()
        check_key(key)
        return await self._sessions.create(tenant, tags, metadata, name, key)

    def heartbeat(self, tenant: str, session: str) -> None:
        """Takes a sign of life. Raises Gone for a session that was finished."""
        self._check_open()
        self._sessions.open(tenant, session)
        self._sessions.see(tenant, session)

    async def finish_session(self, tenant: str, session: str, status: str, detail: str | None = None) -> None:
        """Ends a session, its models and its samplers. Checkpoints stay. The first call counts."""
        self._check_open()
        await self._sessions.finish(tenant, session, status, detail)

    def session(self, tenant: str, session: str) -> Session:
        return self._sessions.find(tenant, session)

    def sessions(self, tenant: str) -> list[Session]:
        """The tenant's sessions, newest first."""
        return self._sessions.of(tenant)

    # Models

    def model(self, tenant: str, model: str) -> Model:
        found = self._training.find(model)
        if found is None or found.record.tenant != tenant:
            raise Unknown(f"there is no model {model!r}; create it, or load it from a checkpoint")
        return found.record

    def models(self, tenant: str) -> list[Model]:
        """The tenant's models, newest first, also those that have ended."""
        return [model.record for model in reversed([*self._training.of(tenant)])]

    # Samplers

    async def create_sampler(
        self, tenant: str, session: str, seq: int, path: str | None = None, base_model: str | None = None
    ) -> str:
        """Makes a sampler of a checkpoint, or of the base model, and returns its id; the same for the same number."""
        self._check_open()
        self._sessions.open(tenant, session)
        sampler = Sampler(sampler_id(session, seq), tenant, session, self._clock(), path=path)
        check_base(base_model, self.served)
        if (found := self._samplers.named(sampler.id)) is not None:
            if (found.path, found.adapter, found.inflight) != (path, "", None):
                raise DataError(f"session {session} has another sampler number {seq} already; use the next number")
            await self._promises.commit()
            return sampler.id
        if path is not None:
            self._checkpoints.find(tenant, path)
        self._samplers.add(sampler)
        self._sessions.see(tenant, session)
        await self._promises.commit(put_record("sampler", sampler.id, sampler))
        return sampler.id

    async def join_sampler(self, tenant: str, sampler: str) -> int:
        """Numbers another client of a sampler, from 1. It numbers its requests from that many times 10**9."""
        self._check_open()
        found = self._samplers.living(tenant, sampler)
        found.joined += 1
        number = found.joined
        await self._promises.commit(put_record("sampler", sampler, found))
        return number

    def sampler(self, tenant: str, sampler: str) -> Sampler:
        return self._samplers.find(tenant, sampler)

    # Checkpoints

    def checkpoints(self, tenant: str, model: str | None = None) -> list[Checkpoint]:
        """The tenant's checkpoints, or those of one of its models, newest first."""
        if model is None:
            return self._checkpoints.of(tenant)
        return self._checkpoints.of_model(self.model(tenant, model).id)

    def checkpoint(self, tenant: str, path: str) -> Checkpoint:
        """A checkpoint of the tenant, or a published one."""
        return self._checkpoints.find(tenant, path)

    async def delete_checkpoint(self, tenant: str, path: str) -> None:
        self._check_open()
        await self._checkpoints.delete(tenant, path)

    async def set_ttl(self, tenant: str, path: str, seconds: int | None) -> None:
        """Lets a checkpoint expire that many seconds from now; None keeps it."""
        self._check_open()
        await self._checkpoints.set_ttl(tenant, path, seconds)

    async def publish(self, tenant: str, path: str, public: bool) -> None:
        """Lets every tenant load and sample a checkpoint, or no longer."""
        self._check_open()
        await self._checkpoints.publish(tenant, path, public)

    @asynccontextmanager
    async def folder(self, tenant: str, path: str, file: str | None = None) -> AsyncGenerator[tuple[Path, Files]]:
        """Gives the folder and the files of a checkpoint, which stay until the end of the block.

        Raises CheckpointError unless all, or ``file`` alone, are as they were saved.
        """
        found = self._checkpoints.find(tenant, path)
        async with self._adapters.using(found.adapter):
            await self._adapters.check(found.adapter, found.files, file)
            yield self._checkpoints.folder(found), found.files

    # What is past its time, and the view

    def tidy(self) -> None:
        """Acts on what is past its time: missing requests, silent and ended sessions, checkpoints and outcomes."""
        self._training.give_up_gaps()
        self._checkpoints.delete_expired()
        self._promises.forget_old()
        self._sessions.tidy()

    def status(self) -> Status:
        """The state of the service, of each tenant and of each model."""
        now = self._clock()
        return Status(
            {tenant: self._tenant_status(tenant, now) for tenant in self._sessions.tenants()},
            self._training.restarts,
            self._promises.failure,
        )

    def _tenant_status(self, tenant: str, now: float) -> TenantStatus:
        account = self._promises.account(tenant)
        models = [
            ModelStatus(
                id=model.record.id,
                rank=model.record.spec.rank,
                steps=model.record.steps,
                loss=model.loss,
                queued=len(model.waiting),
                waited=now - min((promise.accepted for promise in model.waiting.values()), default=now),
                on_ranks=model.resident,
            )
            for model in reversed([*self._training.living(tenant)])
        ]
        return TenantStatus(
            sessions=self._sessions.living(tenant),
            models=models,
            steps=self._training.steps_of(tenant),
            tokens=self._training.tokens[tenant],
            tokens_per_second=self._rate(tenant).per_second(now),
            pending=account.pending,
            pending_tokens=account.tokens,
            kept=len(account.kept),
            snapshots=self._samplers.snapshots_of(tenant),
            checkpoints=self._checkpoints.number_of(tenant),
            disk=self._training.bytes_of(tenant) + self._checkpoints.bytes_of(tenant) + self._samplers.bytes_of(tenant),
        )

    async def _tidy_regularly(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            self.tidy()

    # Accepting

    def _check_open(self) -> None:
        if self._promises.failure:
            raise ServiceClosed(self._promises.failure)

    def _identify(self, tenant: str, request: Request) -> tuple[str, str, int]:
        """The id of a request's promise, its target, and its number there. Raises DataError for what is not its own."""
        match request:
            case CreateModel():
                return self._new_model(tenant, request.session, request.seq)
            case LoadWeights(session=str() as session, model_seq=int() as number, model=None):
                return self._new_model(tenant, session, number)
            case UnloadModel():
                self.model(tenant, request.model)
                return f"{request.model}:unload", request.model, -1
            case Sample():
                if request.sampler is None or request.seq is None:
                    if request.sampler is not None:
                        self._samplers.find(tenant, request.sampler)
                    return f"sample:{secrets.token_hex(12)}", request.sampler or "", 0
                self._samplers.find(tenant, request.sampler)
                if not 0 <= request.seq < MOST_NUMBERS:
                    raise DataError(f"request {request.seq} of sampler {request.sampler}: numbers begin with 0")
                return f"{request.sampler}:{request.seq}", request.sampler, request.seq
            case Compute() | OptimStep() | SaveWeights() | SaveForSampler() | LoadWeights():
                if request.model is None or request.seq is None:
                    raise DataError("a request needs the model that it is for and its number")
                if request.seq < 1:
                    raise DataError(f"request {request.seq} of model {request.model}: numbers begin with 1")
                self.model(tenant, request.model)
                return f"{request.model}:{request.seq}", request.model, request.seq

    def _new_model(self, tenant: str, session: str, number: int) -> tuple[str, str, int]:
        found = self._sessions.open(tenant, session)
        name = model_id(session, number)
        if number < found.first_model and self._training.find(name) is None:
            raise Gone(f"model {number} of session {session} is forgotten; use the next number")
        return f"{name}:0", name, 0

    async def _repeated(self, promise: Promise, digest: bytes) -> str:
        """The promise of a request that was accepted before."""
        if promise.digest != digest:
            raise DataError(
                f"request {promise.id} was accepted with another body; a number and an idempotency key are for one "
                f"request, so use new ones"
            )
        if promise.recorded is not None:
            await asyncio.shield(promise.recorded)
        return promise.id

    def _check_number(self, target: str, seq: int) -> None:
        """Refuses a number that was used or given up, and what has ended."""
        if (model := self._training.find(target)) is None:
            return
        if 0 <= seq < model.record.next or seq == 0:
            raise Gone(
                f"request {seq} of model {target} was answered or given up before; the model waits for request "
                f"{model.record.next}"
            )
        if model.record.ended:
            raise Gone(f"model {target} is gone: {model.record.ended}")
        if model.unload is not None:
            raise Gone(f"model {target} is being unloaded; load one of its checkpoints to go on")
        if seq > model.record.next + self.limits.pending:
            raise DataError(
                f"request {seq} of model {target} is too far ahead: the model waits for request {model.record.next}; "
                f"number the requests of a model 1, 2, 3, ..."
            )

    def _check_room(
        self, tenant: str, request: Request | Refused, target: str, seq: int, tokens: int, size: int
    ) -> None:
        """Raises Busy for what the tenant cannot have now, and another DataError for what no waiting changes."""
        account, limits = self._promises.account(tenant), self.limits
        model = self._training.find(target)
        if model is not None and model.waiting and seq == model.record.next:
            # Those that fill the limits wait for this one.
            return
        if account.pending >= limits.pending:
            raise Busy(
                f"{account.pending} requests have no outcome yet, and the limit is pending={limits.pending}; wait "
                f"for some"
            )
        if account.tokens + tokens > limits.tokens:
            raise Busy(
                f"{account.tokens} tokens of requests have no outcome yet, {tokens} more are asked for, and the limit "
                f"is tokens={limits.tokens}; wait for some"
            )
        if isinstance(request, Compute | Sample) and account.request_bytes + size > limits.recorded:
            recorded = f"{account.request_bytes} bytes of requests are recorded, and the limit is {limits.recorded}"
            if not account.pending:
                raise DataError(
                    f"{recorded}: all are passes with gradients that no optimizer step has used; take a step of each "
                    f"model, unload models, or use forward for passes whose gradients nobody needs"
                )
            raise Busy(f"{recorded}; wait for outcomes")
        if isinstance(request, CreateModel) or (isinstance(request, LoadWeights) and request.model is None):
            living = sum(not self._sessions.is_silent(model.record.session) for model in self._training.living(tenant))
            if living >= limits.models:
                raise Busy(f"the tenant has {living} models, and the limit is models={limits.models}; unload one")
            self._sessions.make_room_for_model(tenant)
        if isinstance(request, Sample):
            self._samplers.check(tenant, request)

    async def _refuse(self, name: str, tenant: str, target: str, seq: int, digest: bytes, why: str) -> None:
        """Uses up the number of a request of a model that is refused for good."""
        request = Refused(why)
        promise = Promise(name, tenant, target, seq, None, Refused.__name__, digest, 0, self._clock(), request)
        with suppress(Busy):
            self._check_room(tenant, request, target, seq, 0, 0)
            await asyncio.shield(self._promises.accept(promise, encode(request), self._start))

    def _make(self, tenant: str, request: Request, target: str) -> Model | None:
        """The model that a request makes, if it makes one."""
        if isinstance(request, CreateModel):
            session, spec, metadata = request.session, request.adapters, request.metadata
        elif isinstance(request, LoadWeights) and request.session is not None and request.model is None:
            session, metadata = request.session, request.metadata
            spec = self._checkpoints.find(tenant, request.path).spec
        else:
            return None
        return self._training.add(Model(target, tenant, session, self._clock(), spec, metadata))

    def _start(self, promise: Promise) -> None:
        """Runs a request that is recorded."""
        if promise.request_type == Sample.__name__:
            self._samplers.start(promise)
        else:
            self._training.enqueue(promise)

    def _settled(self, promise: Promise) -> None:
        """Notes an outcome that is on disk."""
        if promise.request_type == Sample.__name__:
            self._samplers.completed(promise)
        self._rate(promise.tenant).add(self._clock(), promise.tokens)
        tenant_logs.note(promise, promise.finished - promise.accepted)

    def _forgotten(self, promise: Promise) -> None:
        """Notes an outcome that is no longer kept."""
        self._samplers.forgotten(promise)

    def _find(self, tenant: str, name: str) -> Promise:
        found = self._promises.find(name)
        if found is not None and found.tenant == tenant:
            return found
        target = name.rpartition(":")[0]
        with suppress(Unknown):
            if target.rpartition(":")[0].endswith(":sample"):
                self._samplers.find(tenant, target)
            else:
                self.model(tenant, target)
            raise gone(name)
        raise Unknown(f"there is no promise {name!r}; use the id that came with the accepted request")

    def _rate(self, tenant: str) -> Rate:
        return self._rates.setdefault(tenant, Rate())


def encoded(request: Request) -> tuple[bytes, bytes]:
    """A request as it is recorded, and the digest of that. Raises DataError for what cannot be recorded."""
    body = encode(request)
    return body, hashlib.sha256(type(request).__name__.encode() + body).digest()


def model_of(request: Request) -> str | None:
    """The id of the existing model that a request is for."""
    return None if isinstance(request, CreateModel | Sample) else request.model
