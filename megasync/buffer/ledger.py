"""The buffer's record on disk, in SQLite: what a restarted buffer or a resumed run continues from.

    standing   one row per field of `BufferStatus`, as JSON
    groups     one row per admitted group, for the whole run; a few dozen bytes each
    payloads   the headers of finished and leased groups, and of trained ones that a rollback may still need, and where
               their bodies lie (`segments`)
    partials   unfinished responses of groups that are being generated

Changes are taken (`take`) on the event loop, where they are made, and written (`transact`) on one thread: a transaction
holds all changes since the last one. After a failure nothing is written anymore, so the file always holds a beginning
of the history.

In WAL mode with ``synchronous=NORMAL`` a committed transaction is in the operating system's hands, so it survives the
death of any process. Only transactions with ``to_disk``, and everything before them, also survive a power loss. The
buffer requests that before a checkpoint is written, which could otherwise know more than the ledger. The transaction
with a publication begins a flush on another thread and does not wait for it: the log keeps its order, so a ledger that
forgot the publication after a power loss has no token of that version either.

One process at a time holds the file (``locking_mode=EXCLUSIVE``). WAL then needs no shared memory, so the run directory
may lie on a network file system.

The process that makes a group writes its body (`segments`), the driver on the ledger's thread, right before the
transaction with the row. A segment is removed once no row names it and its writer has ended it: a row names a later
segment of the same writer, or the segment was there when the file was opened. The places of a writer's bodies arrive in
the order in which they were written, so no place in an ended segment is on its way then.

Opening reads rows, not tokens, so its time depends on the number of groups alone.
"""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from megasync.base.files import fdatasync, fsync
from megasync.buffer.groups import LIVE, TRAINED, GroupEntry, GroupState
from megasync.buffer.payload import EncodedGroup, LeasedGroup, StoredBody, decode_header, decode_partial, encode_header
from megasync.buffer.segments import (
    CONTENT_INTACT,
    SegmentWriter,
    load,
    segment_name,
    segment_path,
    segments_in,
    segments_of,
)
from megasync.buffer.state import BufferSnapshot, BufferStatus
from megasync.errors import DataError, LedgerError, raised_as

FILE = "ledger.db"
# Identifies a ledger among SQLite files: "mgsy".
APPLICATION_ID = 0x6D677379
SCHEMA_VERSION = 8
SCHEMA = """
CREATE TABLE standing (field TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, state TEXT NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, oldest_version INTEGER NOT NULL, claimant TEXT NOT NULL, score REAL
);
CREATE TABLE payloads (
    number INTEGER PRIMARY KEY, head BLOB NOT NULL, segment TEXT NOT NULL, offset INTEGER NOT NULL
);
CREATE TABLE partials (
    number INTEGER, sample INTEGER, turn INTEGER, data BLOB NOT NULL, PRIMARY KEY (number, sample, turn)
);
"""
UPSERT = """
INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (number) DO UPDATE SET
    state = excluded.state, step = excluded.step, reason = excluded.reason,
    oldest_version = excluded.oldest_version, claimant = excluded.claimant, score = excluded.score
"""
# Looks at the payloads, which are few, and not at every group of the run.
PRUNE = f"""
DELETE FROM payloads WHERE EXISTS (
    SELECT * FROM groups WHERE groups.number = payloads.number
    AND state IN ({", ".join(repr(state.value) for state in TRAINED)}) AND (step <= ? OR oldest_version < ?)
)
"""
# The fix for an unusable ledger.
WITHOUT = (
    "move it away (with ledger.db-wal and ledger.segments) to resume from the checkpoint alone: groups that were "
    "finished but not trained are then generated again"
)
STATUS_FIELDS = tuple(field.name for field in fields(BufferStatus))
# Fields of the status that never change after the first record. What a run began with is long, and to encode it would
# take as long as everything else.
WRITTEN_ONCE = frozenset({"inherited"})
# Seconds to wait for the file lock: the buffer of a killed run takes a moment to exit.
LOCK_SECONDS = 30.0
# 4 KiB pages that the log may grow to before they are copied into the file, which costs two disk syncs.
LOG_PAGES = 4096
# States in which a group's payload is no longer needed.
WITHOUT_PAYLOAD = (GroupState.GENERATING, GroupState.RETURNED, GroupState.DROPPED)
# Rows, and instructions of SQLite's virtual machine, between two progress reports.
ROWS, STEPS = 1000, 10_000_000

# Receives the progress of a long read.
Report = Callable[[str], None]


def begun(path: Path) -> bool:
    """Whether a run has a ledger there. An empty file is none: `begin_ledger` renames a complete one into place."""
    return path.is_file() and path.stat().st_size > 0


@dataclass(slots=True)
class Changes:
    """The rows that changes of the buffer write, and the last trained step that they leave."""

    last_step: int
    status: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    groups: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    # Numbers of groups, with their headers and the places of their bodies; and of those without.
    payloads: list[tuple[int, LeasedGroup]] = field(default_factory=list[tuple[int, LeasedGroup]])
    # Bodies of these that are still to be written, and where.
    bodies: list[tuple[StoredBody, Sequence[Any]]] = field(default_factory=list[tuple[StoredBody, Sequence[Any]]])
    without_payload: list[tuple[int]] = field(default_factory=list[tuple[int]])
    partials: list[tuple[int, int, int, bytes]] = field(default_factory=list[tuple[int, int, int, bytes]])
    without_partials: list[tuple[int]] = field(default_factory=list[tuple[int]])
    # The oldest step and the least version that a rollback may need, where they have changed: headers and bodies of
    # trained groups up to this step, or with older tokens, are removed.
    needed: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of a call to the transaction with its changes. With ``to_disk`` the changes survive a power loss.

    ``read`` is called before the changes are written.
    """

    to_disk: bool = False
    read: Callable[[], Any] | None = None


class Ledger:
    """Opens the file, or creates it. Every method raises LedgerError.

    `place`, `mark` and `take` belong to the event loop, `transact` and everything that reads to one other thread at a
    time. With ``shared`` other machines read the bodies of groups, over a file system that they share.
    """

    def __init__(self, path: str | Path, shared: bool = False, lock_seconds: float = LOCK_SECONDS) -> None:
        self.path = Path(path)
        self._shared = shared
        # Entries changed since they were last taken, by number.
        self._changed: dict[int, GroupEntry] = {}
        # What was taken: status fields as JSON, and by group number the very objects.
        self._status: dict[str, str] = {}
        self._groups: dict[int, LeasedGroup] = {}
        # Numbers of groups with unfinished responses.
        self._with_partials: set[int] = set()
        self._folder = segments_of(self.path.absolute())
        self._segments = SegmentWriter(self._folder)
        # Bodies of groups that were placed since the last `take`.
        self._unwritten: dict[StoredBody, Sequence[Any]] = {}
        self._log = self.path.with_name(f"{self.path.name}-wal")
        self._flusher = ThreadPoolExecutor(1, "ledger flush")
        self._flushes: deque[Future[None]] = deque()
        # Segments with bodies that may not be on disk yet; those that were there; the last one named of each writer.
        self._unsynced: set[str] = set()
        self._ended = {segment.name for segment in segments_in(self._folder)}
        self._named: dict[str, int] = {}
        self._error: LedgerError | None = None
        # The last trained step on record.
        self.last_step = 0
        with self._explaining("opened"):
            self._db = sqlite3.connect(self.path, timeout=lock_seconds, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    @property
    def empty(self) -> bool:
        """Whether nothing was ever written."""
        with self._explaining("read"):
            return self._db.execute("SELECT count(*) FROM standing").fetchone() == (0,)

    def close(self) -> None:
        self._flusher.shutdown()
        self._segments.close()
        self._db.close()

    # Reading

    def check(self, report: Report = lambda text: None) -> None:
        """Checks the whole file for damage, and every unfinished response against its checksum."""
        with self._explaining("read"):
            self._db.set_progress_handler(lambda: report("checking its pages"), STEPS)
            try:
                (result,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            finally:
                self._db.set_progress_handler(None, 0)
            if result != "ok":
                raise self._damaged(result)
            for (data,) in self._db.execute("SELECT data FROM partials"):
                decode_partial(data)

    def admitted(self) -> list[str]:
        """The uid of every group ever admitted, in order of admission."""
        with self._explaining("read"):
            return [uid for (uid,) in self._db.execute("SELECT uid FROM groups ORDER BY number")]

    def scores(self) -> list[tuple[str, float]]:
        """Uid and mean reward of every group that has one, in order of admission."""
        with self._explaining("read"):
            return self._db.execute("SELECT uid, score FROM groups WHERE score IS NOT NULL ORDER BY number").fetchall()

    def read(self, rollback_step: int | None = None, report: Report = lambda text: None) -> BufferSnapshot:
        """Everything that a buffer needs to continue, or to roll back to that step, however old it is.

        Leaves out entries that only the counts need.
        """
        with self._explaining("read"):
            rows = self._db.execute("SELECT field, value FROM standing")
            status = msgspec.convert({field: json.loads(value) for field, value in rows}, BufferStatus)
            self._status = {name: _text(getattr(status, name)) for name in STATUS_FIELDS}
            self.last_step = status.last_step
            if rollback_step is not None:
                status.oldest_kept = min(status.oldest_kept, rollback_step)
            counted = self._db.execute("SELECT state, reason, count(*) FROM groups GROUP BY state, reason").fetchall()
            return BufferSnapshot(
                status,
                self._entries(status.oldest_kept, report),
                admitted=sum(number for _, _, number in counted),
                trained=sum(number for state, _, number in counted if state in TRAINED),
                dropped={reason: number for state, reason, number in counted if state == GroupState.DROPPED},
            )

    def read_or_close(self) -> BufferSnapshot | None:
        """Reads as `read` does; None if nothing was ever written. After an error the file is closed."""
        try:
            return None if self.empty else self.read()
        except LedgerError:
            self.close()
            raise

    def payloads(self, uids: Sequence[str]) -> dict[str, LeasedGroup]:
        """The groups among those uids that are still recorded."""
        find = "SELECT head, segment, offset FROM payloads JOIN groups USING (number) WHERE uid = ?"
        with self._explaining("read"):
            rows = {uid: self._db.execute(find, (uid,)).fetchone() for uid in uids}
            return {uid: self._recorded(*row) for uid, row in rows.items() if row is not None}

    def _recorded(self, head: bytes, segment: str, offset: int) -> LeasedGroup:
        return LeasedGroup(decode_header(head), StoredBody(str(segment_path(self._folder, segment)), offset))

    # Writing

    def place(self, group: EncodedGroup) -> EncodedGroup:
        """The group with a place for its body, which is written right before the row that names it, if one does."""
        if group.place is not None:
            return group
        with raised_as(LedgerError, f"{self._folder} cannot be read", CONTENT_INTACT):
            place = self._segments.reserve(group.header.body_bytes)
        self._unwritten[place] = group.pieces
        return group.stored(place)

    def mark(self, entry: GroupEntry) -> None:
        """This entry has changed since the last `take`."""
        self._changed[entry.number] = entry

    def take(self, status: BufferStatus, least_version: int = 0) -> Changes | None:
        """The rows of the marked entries and of the changed fields of the status, to be written; None without any.

        No rollback needs groups with tokens older than ``least_version``.
        """
        texts = {
            name: text
            for name in STATUS_FIELDS
            if not (name in WRITTEN_ONCE and name in self._status)
            and (text := _text(getattr(status, name))) != self._status.get(name)
        }
        entries, self._changed = self._changed.values(), {}
        unwritten, self._unwritten = self._unwritten, {}
        if not texts and not entries:
            return None
        changes = Changes(status.last_step, [*texts.items()])
        if "version" in texts or "oldest_kept" in texts:
            changes.needed = status.oldest_kept, least_version
        self._status |= texts
        for entry in entries:
            self._take_entry(entry, changes)
        if unwritten:
            # The others were refused.
            kept = {group.body for _, group in changes.payloads}
            changes.bodies = [(place, pieces) for place, pieces in unwritten.items() if place in kept]
        return changes

    def write(self, status: BufferStatus, to_disk: bool = False) -> None:
        """Takes and writes what has changed."""
        self.transact(self.take(status), [Job(to_disk)])

    def transact(self, changes: Changes | None, jobs: Sequence[Job]) -> list[Any]:
        """Does all of it in one transaction, and returns what each job has read."""
        if self._error is not None:
            raise self._error
        to_disk = any(job.to_disk for job in jobs)
        try:
            with self._explaining("written"):
                self._finish_flushes(wait=to_disk)
                removed: list[str] | None = None
                for place, pieces in changes.bodies if changes is not None else ():
                    self._segments.write(place, pieces)
                if self._shared:
                    self._segments.sync()
                with self._transaction():
                    # What a call has found in memory is in the file until later changes are written.
                    answers = [job.read() if job.read is not None else None for job in jobs]
                    if changes is not None:
                        self._write(changes)
                        if changes.needed is not None:
                            self._db.execute(PRUNE, changes.needed)
                            removed = self._unneeded()
                    if to_disk:
                        self._sync_bodies(self._take_unsynced())
                if changes is not None:
                    self.last_step = changes.last_step
                if to_disk:
                    fsync(self._log)
                if removed is not None:
                    self._flushes.append(self._flusher.submit(self._flush, self._take_unsynced(), removed))
        except LedgerError as error:
            self._error = error
            raise
        return answers

    def _unneeded(self) -> list[str]:
        """The names of the segments that nothing lies in, or will. A writer's last one stays: its number is taken."""
        needed = {name for (name,) in self._db.execute("SELECT DISTINCT segment FROM payloads")}
        present = segments_in(self._folder)
        last = {each.writer: each.number for each in sorted(present, key=lambda each: each.number)}
        return [
            each.name
            for each in present
            if each.name not in needed
            and each.number < last[each.writer]
            and (each.name in self._ended or each.number < self._named.get(each.writer, 0))
        ]

    def _take_unsynced(self) -> set[str]:
        unsynced, self._unsynced = self._unsynced, set()
        return unsynced

    def _sync_bodies(self, segments: Collection[str]) -> None:
        for name in segments:
            with suppress(FileNotFoundError):
                fdatasync(segment_path(self._folder, name))

    def _flush(self, unsynced: Collection[str], unneeded: Sequence[str]) -> None:
        self._sync_bodies(unsynced)
        fdatasync(self._log)
        for name in unneeded:
            segment_path(self._folder, name).unlink(missing_ok=True)

    def _finish_flushes(self, wait: bool) -> None:
        """Raises the OSError of one that failed."""
        while self._flushes and (wait or self._flushes[0].done()):
            self._flushes.popleft().result()

    def merge_log(self) -> None:
        """Copies the log into the file, which then needs no log."""
        with self._explaining("written"):
            busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise LedgerError(f"{self.path} is held by another process")

    def _prepare(self) -> None:
        """Locks the file for this process, and creates the tables in a new one."""
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
        self._db.execute("PRAGMA synchronous=NORMAL")
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        new = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        if not new and application != APPLICATION_ID:
            raise LedgerError(f"{self.path} is a database, but not a ledger; move it away")
        if not new and version != SCHEMA_VERSION:
            raise LedgerError(
                f"{self.path} has format {version}, but this version of megasync reads {SCHEMA_VERSION}; resume with "
                f"the version that started the run, or {WITHOUT}"
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        with self._transaction():
            if new:
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _load_partial(self, number: int, sample: int, turn: int) -> bytes:
        find = "SELECT data FROM partials WHERE number = ? AND sample = ? AND turn = ?"
        with self._explaining("read"):
            row = self._db.execute(find, (number, sample, turn)).fetchone()
            if row is None:
                raise ValueError(f"group number {number} has no response {sample} in turn {turn}")
            return row[0]

    def _entries(self, oldest_kept: int, report: Report) -> list[GroupEntry]:
        """Groups that are live, unpublished or may be reopened, all after the oldest of them, and recent ones."""
        names = [state.value for state in (*LIVE, GroupState.UNPUBLISHED)]
        marks = ", ".join("?" * len(names))
        (front,) = self._db.execute(
            f"SELECT min(number) FROM groups WHERE state IN ({marks}) OR state = ? AND step > ?",
            (*names, GroupState.PUBLISHED.value, oldest_kept),
        ).fetchone()
        rows = self._db.execute(
            "SELECT number, uid, state, step, reason, oldest_version, claimant, score, head, segment, offset "
            "FROM groups LEFT JOIN payloads USING (number) WHERE number >= ifnull(?, number + 1) OR step > ?",
            (front, oldest_kept),
        )
        entries: list[GroupEntry] = []
        for number, uid, state, step, reason, oldest, claimant, score, *payload in rows:
            entry = GroupEntry(
                uid, number, GroupState(state), 0.0, step, reason, oldest_version=oldest, claimant=claimant, score=score
            )
            if entry.state in (GroupState.FINISHED, GroupState.LEASED):
                if payload[0] is None:
                    raise ValueError(f"group {uid} is {entry.state} and has no payload")
                entry.group = self._groups[number] = self._recorded(*payload)
            entries.append(entry)
            if len(entries) % ROWS == 0:
                report(f"{len(entries)} groups")
        by_number = {entry.number: entry for entry in entries}
        for number, sample, turn in self._db.execute("SELECT number, sample, turn FROM partials"):
            by_number[number].partials[sample, turn] = partial(self._load_partial, number, sample, turn)
        self._with_partials = {entry.number for entry in entries if entry.partials}
        return entries

    def _take_entry(self, entry: GroupEntry, changes: Changes) -> None:
        e, number = entry, entry.number
        changes.groups.append((number, e.uid, e.state.value, e.step, e.reason, e.oldest_version, e.claimant, e.score))
        if entry.group is None:
            # A trained group's payload stays in the file until it is pruned.
            self._groups.pop(number, None)
            if entry.state in WITHOUT_PAYLOAD:
                changes.without_payload.append((number,))
        elif self._groups.get(number) is not entry.group:
            self._groups[number] = entry.group
            changes.payloads.append((number, entry.group))
        if not entry.partials and number in self._with_partials:
            self._with_partials.discard(number)
            changes.without_partials.append((number,))
        for (sample, turn), response in entry.partials.items():
            if not callable(response):
                changes.partials.append((number, sample, turn, response))
                entry.partials[sample, turn] = partial(self._load_partial, number, sample, turn)
                self._with_partials.add(number)

    def _write(self, changes: Changes) -> None:
        for statement, rows in (
            ("INSERT OR REPLACE INTO standing VALUES (?, ?)", changes.status),
            (UPSERT, changes.groups),
            ("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?)", [self._payload(*row) for row in changes.payloads]),
            ("DELETE FROM payloads WHERE number = ?", changes.without_payload),
            ("DELETE FROM partials WHERE number = ?", changes.without_partials),
            ("INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?)", changes.partials),
        ):
            if rows:
                self._db.executemany(statement, rows)

    def _payload(self, number: int, group: LeasedGroup) -> tuple[int, bytes, str, int]:
        if not isinstance(group.body, StoredBody):
            raise TypeError(f"the body of group {group.uid} lies in no segment")
        name = segment_name(group.body)
        self._unsynced.add(name)
        writer, _, last = name.rpartition("-")
        self._named[writer] = max(int(last), self._named.get(writer, 0))
        return number, encode_header(group.header), name, group.body.offset

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have rolled the transaction back already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _explaining(self, action: str) -> Generator[None]:
        """Turns errors of SQLite and of the payload codec into a LedgerError that says what to do."""
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"{self.path} already has this group: {error}") from error
        except sqlite3.OperationalError as error:
            raise LedgerError(f"{self.path} cannot be {action}: {error}; {_remedy(error)}") from error
        except OSError as error:
            raise LedgerError(f"{self._folder} cannot be {action}: {error}; {CONTENT_INTACT}") from error
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, how: str) -> LedgerError:
        return LedgerError(f"{self.path} is damaged or not a ledger: {how}; {WITHOUT}")


def find_damaged(groups: Collection[LeasedGroup]) -> dict[str, str]:
    """The groups whose bodies cannot be read: by uid, the reason."""
    damaged: dict[str, str] = {}
    for group in groups:
        try:
            load(group)
        except DataError as error:
            damaged[group.uid] = str(error)
    return damaged


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _remedy(error: sqlite3.OperationalError) -> str:
    if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another process holds it: is the run still alive?"
    return CONTENT_INTACT
