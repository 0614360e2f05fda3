"""The buffer's record on disk, in SQLite: what a restarted buffer or a resumed run continues from.

    standing   one row per field of `BufferStatus`, as JSON
    groups     one row per admitted group, for the whole run; a few dozen bytes each
    payloads   the headers of finished and leased groups, and of trained ones that a rollback may still need, and where
               their bodies lie (`segments`)
    partials   unfinished responses of groups that are being generated

Each `write` is one transaction. In WAL mode with ``synchronous=NORMAL`` a committed transaction is in the operating
system's hands, so it survives the death of any process. Only transactions with ``to_disk``, and everything before them,
also survive a power loss. The buffer requests that before a checkpoint is written, which could otherwise know more than
the ledger. A publication begins a flush (`flush_soon`) and does not wait for it: the log keeps its order, so a ledger
that forgot the publication after a power loss has no token of that version either.

One process at a time holds the file (``locking_mode=EXCLUSIVE``). WAL then needs no shared memory, so the run directory
may lie on a network file system.

Bodies are appended to a segment before the transaction that records them, so no row names a body that is not there.
Opening reads rows, not tokens, so the time to restart a buffer depends on its number of groups alone. A body is checked
against its checksum before it is leased for the first time.
"""

from __future__ import annotations

import copy
import json
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from megasync.base.files import fdatasync, fsync
from megasync.buffer.groups import LIVE, TRAINED, GroupEntry, GroupState
from megasync.buffer.payload import (
    LeasedGroup,
    StoredBody,
    decode_header,
    decode_partial,
    encode_header,
)
from megasync.buffer.segments import SegmentWriter, read_body, segment_number, segment_path, segments_of
from megasync.buffer.state import BufferSnapshot, BufferStatus
from megasync.errors import LedgerError

FILE = "ledger.db"
# Identifies a ledger among SQLite files: "mgsy".
APPLICATION_ID = 0x6D677379
SCHEMA_VERSION = 6
SCHEMA = """
CREATE TABLE standing (field TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, state TEXT NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, oldest_version INTEGER NOT NULL, claimant TEXT NOT NULL, score REAL
);
CREATE TABLE payloads (
    number INTEGER PRIMARY KEY, head BLOB NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL
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
PRUNE = f"""
DELETE FROM payloads WHERE number IN (
    SELECT number FROM payloads JOIN groups USING (number)
    WHERE state IN ({", ".join(repr(state.value) for state in TRAINED)}) AND (step <= ? OR oldest_version < ?)
)
"""
# The fix for an unusable ledger.
WITHOUT = (
    "move it away (with ledger.db-wal and ledger.segments) to resume from the checkpoint alone: groups that were "
    "finished but not trained are then generated again"
)
CONTENT_INTACT = "its content is intact: check the disk, then continue with `megasync resume`"
STATUS_FIELDS = tuple(field.name for field in fields(BufferStatus))
# Fields of the status that never change after the first record. What a run began with is long, and a comparison of it
# would take as long as everything else.
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


class Ledger:
    """Opens the file, or creates it. Use it from one thread at a time. Every method raises LedgerError."""

    def __init__(self, path: str | Path, lock_seconds: float = LOCK_SECONDS) -> None:
        self.path = Path(path)
        # What the file holds: status fields, and by group number the very objects that were written.
        self._status: dict[str, Any] = {}
        self._groups: dict[int, LeasedGroup] = {}
        # Numbers of groups with unfinished responses.
        self._with_partials: set[int] = set()
        self._folder = segments_of(self.path)
        self._segments = SegmentWriter(self._folder)
        self._log = self.path.with_name(f"{self.path.name}-wal")
        self._flusher = ThreadPoolExecutor(1, "ledger")
        # One that runs, and one that will.
        self._flushes: deque[Future[None]] = deque()
        self._unneeded: list[Path] = []
        # Uids of groups whose bodies an earlier process wrote, or may be to blame for a failed step.
        self._unchecked: set[str] = set()
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

    def find_damaged(self, groups: Collection[LeasedGroup]) -> dict[str, str]:
        """What is wrong with the bodies that cannot be read, by uid. Those that were checked before are not again."""
        damaged: dict[str, str] = {}
        for group in groups:
            if group.uid in self._unchecked:
                try:
                    read_body(group)
                    self._unchecked.discard(group.uid)
                except (OSError, ValueError) as error:
                    damaged[group.uid] = str(error)
        return damaged

    def check_again(self, uids: Collection[str]) -> None:
        """Makes `find_damaged` read the bodies of these groups once more."""
        self._unchecked.update(uids)

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
            self._status = {name: _copy(name, value) for name, value in _values(status).items()}
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

    def payloads(self, uids: Sequence[str]) -> dict[str, LeasedGroup]:
        """The groups among those uids that are still recorded."""
        find = "SELECT head, segment, offset FROM payloads JOIN groups USING (number) WHERE uid = ?"
        with self._explaining("read"):
            rows = {uid: self._db.execute(find, (uid,)).fetchone() for uid in uids}
            return {uid: self._recorded(*row) for uid, row in rows.items() if row is not None}

    def _recorded(self, head: bytes, segment: int, offset: int) -> LeasedGroup:
        group = LeasedGroup(decode_header(head), StoredBody(str(segment_path(self._folder, segment)), offset))
        self._unchecked.add(group.uid)
        return group

    # Writing

    def write(self, status: BufferStatus, entries: Collection[GroupEntry], to_disk: bool = False) -> None:
        """Records these entries and the changed fields of the status. Writes nothing when nothing changed."""
        changed = {name: value for name, value in _values(status).items() if self._differs(name, value)}
        if not changed and not entries:
            return
        with self._explaining("written"):
            self._finish_flushes(wait=to_disk)
            with self._transaction(to_disk):
                rows = ((name, json.dumps(value, default=asdict)) for name, value in changed.items())
                self._db.executemany("INSERT OR REPLACE INTO standing VALUES (?, ?)", rows)
                self._write(entries)
                if to_disk:
                    self._segments.sync()
        self._status |= {name: _copy(name, value) for name, value in changed.items()}

    def sync(self) -> None:
        """Flushes everything written so far to disk."""
        with self._explaining("written"):
            self._finish_flushes(wait=True)
            self._segments.sync()
            fsync(self._log)

    def flush_soon(self) -> None:
        """Begins to flush everything written so far to disk, on another thread. A later call raises its error."""
        with self._explaining("written"):
            self._finish_flushes(wait=False)
        # A second one has not begun, so it flushes this too.
        if len(self._flushes) < 2:
            self._flushes.append(self._flusher.submit(self._flush))

    def _flush(self) -> None:
        self._segments.flush()
        fdatasync(self._log)
        unneeded, self._unneeded = self._unneeded, []
        for segment in unneeded:
            segment.unlink(missing_ok=True)

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

    def prune(self, oldest_kept: int, least_version: int) -> None:
        """Removes the headers and bodies of trained groups that no rollback needs: those of steps up to
        ``oldest_kept``, and those with tokens older than ``least_version``, which would be generated again anyway.
        Another thread flushes what remains, and removes segments that nothing lies in: both take long."""
        with self._explaining("written"):
            with self._transaction():
                self._db.execute(PRUNE, (oldest_kept, least_version))
            needed = self._db.execute("SELECT DISTINCT segment FROM payloads").fetchall()
            self._unneeded += self._segments.without(segment for (segment,) in needed)
        self.flush_soon()

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

    def _differs(self, name: str, value: Any) -> bool:
        return name not in self._status or (name not in WRITTEN_ONCE and self._status[name] != value)

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

    def _write(self, entries: Collection[GroupEntry]) -> None:
        rows = [
            (e.number, e.uid, e.state.value, e.step, e.reason, e.oldest_version, e.claimant, e.score) for e in entries
        ]
        self._db.executemany(UPSERT, rows)
        payloads: list[tuple[int, bytes, int, int]] = []
        without: list[tuple[int]] = []
        for entry in entries:
            number = entry.number
            if entry.group is None:
                # A trained group's payload stays in the file until it is pruned.
                self._groups.pop(number, None)
                if entry.state in WITHOUT_PAYLOAD:
                    without.append((number,))
            elif self._groups.get(number) is not entry.group:
                self._groups[number] = entry.group = self._stored(entry.group)
                head, body = encode_header(entry.group.header), entry.group.body
                assert isinstance(body, StoredBody)
                payloads.append((number, head, segment_number(body), body.offset))
            self._write_partials(entry)
        self._db.executemany("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?)", payloads)
        self._db.executemany("DELETE FROM payloads WHERE number = ?", without)

    def _stored(self, group: LeasedGroup) -> LeasedGroup:
        if isinstance(group.body, StoredBody):
            return group
        return LeasedGroup(group.header, self._segments.append(group.body))

    def _write_partials(self, entry: GroupEntry) -> None:
        if not entry.partials and entry.number in self._with_partials:
            self._with_partials.discard(entry.number)
            self._db.execute("DELETE FROM partials WHERE number = ?", (entry.number,))
        for (sample, turn), response in entry.partials.items():
            if not callable(response):
                self._db.execute(
                    "INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?)", (entry.number, sample, turn, response)
                )
                entry.partials[sample, turn] = partial(self._load_partial, entry.number, sample, turn)
                self._with_partials.add(entry.number)

    @contextmanager
    def _transaction(self, to_disk: bool = False) -> Generator[None]:
        if to_disk:
            self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have rolled the transaction back already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if to_disk:
            self._db.execute("PRAGMA synchronous=NORMAL")

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


def _copy(name: str, value: Any) -> Any:
    """The ledger's own copy of a status field, to compare later values with."""
    return None if name in WRITTEN_ONCE else copy.deepcopy(value)


def _values(status: BufferStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in STATUS_FIELDS}


def _remedy(error: sqlite3.OperationalError) -> str:
    if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another process holds it: is the run still alive?"
    return CONTENT_INTACT
