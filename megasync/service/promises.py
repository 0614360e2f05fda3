"""The promises of the service, and its record on disk, in SQLite: what a restarted service continues from.

    records    sessions, models, samplers and checkpoints, as MessagePack
    promises   one row per accepted request: tenant, number, key, digest; its body and outcome while needed

Invariants:

- A request is accepted once its row is on disk, and an outcome is given once it is. Every commit is flushed
  (``synchronous=FULL``), so both survive a power loss. What a change of the state needs is in one transaction.
- Outcomes and changes of records are written in the order in which they were made, so the file always holds a
  beginning of the history. A full disk stops that queue until there is room: `writable` tells the makers to wait.
- A request that cannot be recorded is refused, and fails no other.
- Nothing that was recorded is lost unnoticed. Each transaction counts itself in the file and, once it is on disk, in
  `service.mark`, which also has the file's random identity. A file that is behind its mark or of another identity (its
  write-ahead log was deleted, it is an older copy, or another run's) is refused. The mark itself is not flushed: a
  power loss may leave it behind the file, which is no error.

Writes of all tasks go to one thread, which writes what has come meanwhile in one transaction, with one flush.

The body of a request is kept while it has no outcome, and that of a pass with gradients until the state after its
optimizer step is durable. Outcomes are kept for a bounded time, number and size; then the promise is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megasync.base.files import atomic_write
from megasync.concurrency.batches import Batches, Run
from megasync.errors import DataError, LedgerError
from megasync.service.encoding import decode, encode
from megasync.service.limits import Limits
from megasync.service.requests import Busy, Failed, Gone, Outcome, Refused, Request, ServiceClosed

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE = "service.db"
MARK_FILE = "service.mark"
# Identifies the file among SQLite files: "mgsv".
APPLICATION_ID = 0x6D677376
SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE records (kind TEXT, id TEXT, data BLOB NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE promises (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, target TEXT NOT NULL, seq INTEGER NOT NULL, key TEXT,
    request_type TEXT NOT NULL, digest BLOB NOT NULL, tokens INTEGER NOT NULL, accepted REAL NOT NULL,
    position INTEGER NOT NULL DEFAULT 0, finished REAL NOT NULL DEFAULT 0, outcome_type TEXT, request BLOB, outcome BLOB
);
"""
ACCEPT = """
INSERT INTO promises (id, tenant, target, seq, key, request_type, digest, tokens, accepted, request)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
READ = """
SELECT id, tenant, target, seq, key, request_type, digest, tokens, accepted, position, finished, outcome_type,
    length(request), length(outcome) FROM promises ORDER BY position, accepted
"""
# Seconds between attempts to write to a full disk.
FULL_DISK_SECONDS = 1.0
# Seconds to wait for the file: a killed service takes a moment to exit.
LOCK_SECONDS = 30.0
# Bytes of outcomes that are kept in memory too, and of a tenant's requests: later ones are read when they run.
MEMORY = 256 * 10**6

# A statement and its parameters.
Change = tuple[str, Sequence[Any]]


def put_record(kind: str, name: str, record: Any) -> Change:
    return "INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (kind, name, encode(record))


def drop_record(kind: str, name: str) -> Change:
    return "DELETE FROM records WHERE kind = ? AND id = ?", (kind, name)


class Store:
    """The file. `read` and `rows` are for the time before the first `put`.

    ``named`` tells that there is something which only the file can name, so that it cannot be a new one.
    """

    def __init__(self, path: Path, run: Run | None = None, named: bool = False) -> None:
        self._path = path
        self._named = named
        try:
            self._db = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
            self._prepare()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damaged(error) from error
            fix = "free space on its disk" if is_full(error) else "is another service running in this folder?"
            raise LedgerError(f"{path} cannot be opened: {error}; {fix}") from error
        self._identity, self._transactions = self._check_mark()
        self._batches: Batches[Callable[[], Any], Any] = Batches(
            lambda items: partial(self._transact, items), FILE, run
        )

    def read(self, kind: str, record_type: type[T]) -> dict[str, T]:
        decoder = msgspec.msgpack.Decoder(record_type)
        try:
            rows = self._select("SELECT id, data FROM records WHERE kind = ?", kind)
            return {name: decoder.decode(data) for name, data in rows}
        except msgspec.DecodeError as error:
            raise self._damaged(error) from error

    def rows(self) -> Iterable[tuple[Any, ...]]:
        return self._select(READ)

    def _select(self, statement: str, *values: str) -> Iterable[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    def _damaged(self, why: object) -> LedgerError:
        self._db.close()
        return LedgerError(
            f"{self._path} is damaged: {why}; restore it from a copy, or move it away with all that is beside it"
        )

    def _check_mark(self) -> tuple[str, int]:
        """Returns the identity of the file and the number of its transactions, which the mark confirms."""
        file = self._path.with_name(MARK_FILE)
        found = next(iter(self.read("mark", int).items()), None)
        identity, transactions = found or (secrets.token_hex(8), 0)
        try:
            if found is None:
                self._db.execute(*put_record("mark", identity, transactions))
            # A crash may have come between the two files.
            text = file.read_text(encoding="ascii").strip() if transactions or file.exists() else ""
            if text and (not text.startswith(f"{identity} ") or int(text.split()[1]) > transactions):
                self._db.close()
                raise LedgerError(
                    f"{self._path} is the record {identity} with {transactions} transactions, but {file.name} beside "
                    f"it says {text}: it is another file, an older copy, or its {FILE}-wal was removed, so accepted "
                    f"requests are missing. Restore the whole folder from one copy; or empty {file.name}, to continue "
                    f"without them"
                )
            atomic_write(file, _mark(identity, transactions))
            self._mark = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        except (OSError, ValueError, IndexError) as error:
            raise self._damaged(f"{file.name} beside it cannot be used: {error}") from error
        return identity, transactions

    async def put(self, changes: Sequence[Change]) -> None:
        """Returns once all of the changes are on disk, or raises and none of them is made."""

        def write() -> None:
            for statement, values in changes:
                self._db.execute(statement, values)

        await self._do(write)

    async def fetch(self, column: str, promise: str) -> bytes | None:
        """The body of a request or an outcome."""
        find = f"SELECT {column} FROM promises WHERE id = ?"
        row = await self._do(lambda: self._db.execute(find, (promise,)).fetchone())
        return row[0] if row else None

    async def close(self) -> None:
        await self._batches.close()
        self._db.close()
        os.close(self._mark)

    async def _do(self, call: Callable[[], T]) -> T:
        result = await asyncio.shield(self._batches.put(call))
        if isinstance(result, Exception):
            raise result
        return result

    def _transact(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes all calls in one transaction. If that fails, each has its own, so that one fails no other."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            before = self._db.total_changes
            results = [call() for call in calls]
            if changed := self._db.total_changes > before:
                self._db.execute(*put_record("mark", self._identity, self._transactions + 1))
            self._db.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - what is wrong with one item must not fail others
            # A full disk may have rolled the transaction back already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return [error] if len(calls) == 1 else [self._transact([call])[0] for call in calls]
        if changed:
            self._transactions += 1
            # A mark that cannot be written stays behind the file, so that less is noticed.
            with suppress(OSError):
                os.pwrite(self._mark, _mark(self._identity, self._transactions), 0)
        return results

    def _prepare(self) -> None:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA synchronous=FULL")
        new = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        if new and self._named:
            raise self._damaged("it has no tables, but there are states and checkpoints beside it")
        found = tuple(self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if not new and found != (APPLICATION_ID, SCHEMA_VERSION):
            raise LedgerError(
                f"{self._path} is not the record of a service of this version of megasync (found {found}, expected "
                f"{(APPLICATION_ID, SCHEMA_VERSION)}); move it away, or use the version that wrote it"
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        if new:
            self._db.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self._db.execute("COMMIT")


def _mark(identity: str, transactions: int) -> bytes:
    """The content of the mark, which always has the same length."""
    return f"{identity} {transactions:020d}\n".encode()


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of room."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,
    )


@dataclass(eq=False, slots=True)
class Promise:
    """An accepted request. ``target`` is its model or sampler, ``seq`` its number there.

    ``position`` is its place in the order of outcomes, 0 without one. ``request`` is None when it is not in memory,
    and ``request_bytes`` are 0 when it is not on disk either.
    """

    id: str
    tenant: str
    target: str
    seq: int
    key: str | None
    request_type: str
    digest: bytes
    tokens: int
    accepted: float
    request: Request | Refused | None = None
    request_bytes: int = 0
    position: int = 0
    finished: float = 0.0
    outcome_type: str | None = None
    outcome_bytes: int = 0
    outcome: Outcome | None = None
    # Set once the outcome is on disk.
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    # Done once the request is on disk.
    recorded: asyncio.Future[None] | None = None
    # Times that the ranks were lost while they worked on it.
    attempts: int = 0

    @property
    def failed(self) -> bool:
        return self.outcome_type == Failed.__name__


@dataclass(slots=True)
class Account:
    """The promises of a tenant: those without an outcome, their tokens, and those with one, oldest first."""

    pending: int = 0
    tokens: int = 0
    # Bytes of the requests that are kept, whether they have an outcome or not.
    request_bytes: int = 0
    kept: OrderedDict[str, Promise] = field(default_factory=OrderedDict[str, Promise])
    kept_bytes: int = 0


class Promises:
    """All promises that are kept, by id.

    ``settled`` is called with each, in order, once its outcome is on disk, and ``forgotten`` once it is dropped.
    """

    def __init__(
        self,
        store: Store,
        limits: Limits,
        clock: Callable[[], float],
        settled: Callable[[Promise], None],
        forgotten: Callable[[Promise], None],
    ) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._settled = settled
        self._forgotten = forgotten
        self._by_id: dict[str, Promise] = {}
        self._by_key: dict[tuple[str, str], Promise] = {}
        self._accounts: dict[str, Account] = {}
        # The position of the last outcome.
        self._position = store.read("counter", int).get("position", 0)
        # Outcomes in memory, least recently made first.
        self._memory: OrderedDict[str, Promise] = OrderedDict()
        self._memory_bytes = 0
        # What is made and not yet written, in order.
        self._unwritten: deque[tuple[Sequence[Change], Callable[[], None] | None]] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._accepting: set[asyncio.Future[None]] = set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = ""
        self._closing = asyncio.Event()
        for row in store.rows():
            self._restore(Promise(*row[:9]), *row[9:])

    def __iter__(self) -> Iterator[Promise]:
        return iter(self._by_id.values())

    def account(self, tenant: str) -> Account:
        return self._accounts.setdefault(tenant, Account())

    def find(self, name: str) -> Promise | None:
        return self._by_id.get(name)

    def of_key(self, tenant: str, key: str) -> Promise | None:
        return self._by_key.get((tenant, key))

    @property
    def failure(self) -> str:
        """Why nothing is given out anymore; empty while all is well."""
        return self._closed

    def accept(
        self,
        promise: Promise,
        body: bytes,
        begin: Callable[[Promise], None],
        *changes: Change,
        undo: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[None]:
        """Adds a promise with the records that it makes. Once it is on disk, calls ``begin``.

        On a full disk calls ``undo`` and raises `Busy`. Nothing of this depends on whether anybody waits for it.
        """
        self._add(promise)
        account = self.account(promise.tenant)
        account.pending += 1
        account.tokens += promise.tokens
        promise.request_bytes = len(body)
        account.request_bytes += len(body)
        if account.request_bytes > MEMORY:
            promise.request = None
        row = (
            *(promise.id, promise.tenant, promise.target, promise.seq, promise.key, promise.request_type),
            *(promise.digest, promise.tokens, promise.accepted, body),
        )
        promise.recorded = asyncio.ensure_future(self._accept(promise, [(ACCEPT, row), *changes], begin, undo))
        self._accepting.add(promise.recorded)
        promise.recorded.add_done_callback(self._accepted)
        return promise.recorded

    def _accepted(self, recorded: asyncio.Future[None]) -> None:
        self._accepting.discard(recorded)
        # Whoever waits for it may be gone.
        if not recorded.cancelled():
            recorded.exception()

    async def _accept(
        self,
        promise: Promise,
        changes: Sequence[Change],
        begin: Callable[[Promise], None],
        undo: Callable[[], None],
    ) -> None:
        try:
            await self._store.put(changes)
        except Exception as error:
            self._remove(promise)
            undo()
            self._release(promise)
            account = self.account(promise.tenant)
            account.pending -= 1
            account.tokens -= promise.tokens
            raise Busy(
                f"the request cannot be recorded: {error}; free space on the disk of the run, then repeat it"
            ) from error
        if not self._closed:
            begin(promise)

    def settle(
        self,
        promise: Promise,
        outcome: Outcome,
        *changes: Change,
        keep_request: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Gives a promise its outcome, which is given out once it is on disk with the changes. Then calls ``then``."""
        try:
            data = encode(outcome)
        except DataError as error:
            outcome = Failed(f"the outcome of the request cannot be recorded: {error}", "server")
            data = encode(outcome)
        self._position += 1
        promise.position, promise.finished = self._position, self._clock()
        promise.outcome_type, promise.outcome_bytes = type(outcome).__name__, len(data)
        promise.request = None
        if not keep_request:
            self._release(promise)
        account = self.account(promise.tenant)
        account.pending -= 1
        account.tokens -= promise.tokens
        request = "" if keep_request else ", request = NULL"
        change = (
            f"UPDATE promises SET position = ?, finished = ?, outcome_type = ?, outcome = ?{request} WHERE id = ?",
            (promise.position, promise.finished, promise.outcome_type, data, promise.id),
        )

        def written() -> None:
            if then is not None:
                then()
            self._remember(promise, outcome)
            promise.settled.set()
            self._keep(promise)
            self._settled(promise)

        self.record(change, *changes, then=written)

    def record(self, *changes: Change, then: Callable[[], None] | None = None) -> None:
        """Writes changes after everything that was made before them."""
        self._unwritten.append((changes, then))
        if self._writer is None or self._writer.done():
            self._writer = self.vital(self._write(), "promises")

    def vital(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Begins a task without which nothing is given out: if it fails, every wait ends with the reason."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("The service stops: task %s failed", name, exc_info=error)
                self.close(f"the service failed: {error!r}; start it again to resume")

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    async def commit(self, *changes: Change) -> None:
        """Records changes, and returns once they and all before them are on disk. Raises ServiceClosed."""
        done = asyncio.Event()
        self.record(*changes, then=done.set)
        await first_of(None, done, self._closing)
        if not done.is_set():
            raise ServiceClosed(self._closed)

    async def end(self) -> None:
        """Waits for what is being written, and closes the file."""
        if self._accepting:
            await asyncio.wait(self._accepting)
        if self._writer is not None:
            await asyncio.wait([self._writer])
        await self._store.close()

    async def writable(self) -> None:
        """Waits while the disk is full."""
        await self._writable.wait()

    @property
    def closing(self) -> asyncio.Event:
        """Set once nothing is given out anymore."""
        return self._closing

    async def _write(self) -> None:
        while self._unwritten:
            batch = list(self._unwritten)
            try:
                await self._store.put([change for changes, _ in batch for change in changes])
            except sqlite3.Error as error:
                if not is_full(error):
                    log.error("The record of the service cannot be written: %s", error)
                    self.close(f"the record of the service cannot be written: {error}")
                    return
                if self._closed:
                    return
                if self._writable.is_set():
                    log.warning("The disk of the service is full: outcomes wait until there is room")
                self._writable.clear()
                await asyncio.sleep(FULL_DISK_SECONDS)
                continue
            self._writable.set()
            for _ in batch:
                self._unwritten.popleft()
            for _, then in batch:
                if then is not None:
                    then()

    async def wait(self, promise: Promise, seconds: float) -> Outcome | None:
        """The outcome, or None if there is none within the time. Raises ServiceClosed, or Gone for one not kept."""
        if not promise.settled.is_set():
            await first_of(seconds, promise.settled, self._closing)
        if not promise.settled.is_set():
            if self._closed:
                raise ServiceClosed(self._closed)
            return None
        if promise.outcome is not None:
            return promise.outcome
        if promise.outcome_type is None:
            raise gone(promise.id)
        if self._closed:
            raise ServiceClosed(self._closed)
        kind = promise.outcome_type
        data = await self._store.fetch("outcome", promise.id)
        if data is None:
            raise gone(promise.id)
        return decode(kind, data)

    async def body(self, promise: Promise) -> Request | Refused:
        """The request of a promise that has it."""
        if promise.request is not None:
            return promise.request
        data = await self._store.fetch("request", promise.id)
        if data is None:
            raise LedgerError(f"the body of request {promise.id} is missing in {FILE}")
        return decode(promise.request_type, data)

    def release_request(self, promise: Promise) -> Change:
        """The change that drops the body of a request, which nothing needs anymore."""
        self._release(promise)
        if promise.outcome_type is None:
            self._remove(promise)
            return "DELETE FROM promises WHERE id = ?", (promise.id,)
        return "UPDATE promises SET request = NULL WHERE id = ?", (promise.id,)

    def _release(self, promise: Promise) -> None:
        self.account(promise.tenant).request_bytes -= promise.request_bytes
        promise.request_bytes = 0

    def forget(self, promise: Promise) -> None:
        """Drops an outcome that its client has, or that is past its time."""
        account = self.account(promise.tenant)
        if account.kept.pop(promise.id, None) is None:
            return
        account.kept_bytes -= promise.outcome_bytes
        self._unremember(promise)
        self._forgotten(promise)
        promise.outcome_type = None
        position = put_record("counter", "position", self._position)
        if promise.request_bytes:
            self.record(
                ("UPDATE promises SET outcome = NULL, outcome_type = NULL WHERE id = ?", (promise.id,)), position
            )
        else:
            self._remove(promise)
            self.record(("DELETE FROM promises WHERE id = ?", (promise.id,)), position)

    def forget_old(self) -> None:
        """Drops outcomes past their time."""
        oldest = self._clock() - self._limits.kept_seconds
        for account in self._accounts.values():
            while account.kept and (first := next(iter(account.kept.values()))).finished < oldest:
                self.forget(first)

    def close(self, reason: str) -> None:
        """Ends every wait, now and later, with ServiceClosed(reason)."""
        self._closed = self._closed or reason
        self._closing.set()
        self._writable.set()

    def _keep(self, promise: Promise) -> None:
        account, limits = self.account(promise.tenant), self._limits
        account.kept[promise.id] = promise
        account.kept_bytes += promise.outcome_bytes
        while len(account.kept) > limits.kept or (account.kept_bytes > limits.kept_bytes and len(account.kept) > 1):
            self.forget(next(iter(account.kept.values())))

    def _remember(self, promise: Promise, outcome: Outcome) -> None:
        promise.outcome = outcome
        self._memory[promise.id] = promise
        self._memory_bytes += promise.outcome_bytes
        while self._memory_bytes > MEMORY:
            self._unremember(next(iter(self._memory.values())))

    def _unremember(self, promise: Promise) -> None:
        if self._memory.pop(promise.id, None) is not None:
            self._memory_bytes -= promise.outcome_bytes
            promise.outcome = None

    def _add(self, promise: Promise) -> None:
        self._by_id[promise.id] = promise
        if promise.key is not None:
            self._by_key[promise.tenant, promise.key] = promise

    def _remove(self, promise: Promise) -> None:
        self._by_id.pop(promise.id, None)
        if promise.key is not None:
            self._by_key.pop((promise.tenant, promise.key), None)

    def _restore(
        self,
        promise: Promise,
        position: int,
        finished: float,
        outcome_type: str | None,
        body: int | None,
        size: int | None,
    ) -> None:
        promise.position, promise.finished, promise.outcome_type = position, finished, outcome_type
        promise.request_bytes, promise.outcome_bytes = body or 0, size or 0
        self._add(promise)
        account = self.account(promise.tenant)
        account.request_bytes += promise.request_bytes
        if not position:
            account.pending += 1
            account.tokens += promise.tokens
            return
        self._position = max(self._position, position)
        promise.settled.set()
        if outcome_type is not None:
            account.kept[promise.id] = promise
            account.kept_bytes += promise.outcome_bytes


async def first_of(seconds: float | None, *events: asyncio.Event) -> None:
    """Waits until one of the events is set, or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


def gone(name: str) -> Gone:
    return Gone(
        f"the outcome of {name} is no longer kept: it was given, or is past the limits of kept outcomes. Do not repeat "
        f"the request: it has had its effect"
    )
