"""Sessions of clients, and the end of what they made: models, samplers, and records that nobody can use anymore.

A session, and with it its models and samplers, passes through these states. Only the time of the first begins anew
with a restart:

    living ──no sign of life──▶ silent ──longer──▶ ended ──later, without checkpoints──▶ forgotten
       ◀──────a sign of life──────┘                  ▲
       └───────────────────finished──────────────────┘

A silent session's models leave the ranks. Before silence ends it, the last states of its models become checkpoints
(`end_silent`), so nothing is lost that its client did not give up. Records are bounded for each tenant: beyond the
bound the oldest that nobody can use anymore is forgotten early (`_forget_beyond`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, TypeVar

from megasync.service.checkpoints import Checkpoints
from megasync.service.checks import check_metadata
from megasync.service.limits import Limits
from megasync.service.promises import Promises, Store, drop_record, put_record
from megasync.service.records import Session
from megasync.service.requests import Busy, Gone, Unknown
from megasync.service.samplers import Samplers
from megasync.service.training import ModelQueue, Training

log = logging.getLogger(__name__)

Forgettable = TypeVar("Forgettable")

# Sessions that are acted on at one look.
AT_ONCE = 1_000
# Seconds between two looks for sessions that are silent for too long.
SILENT_SECONDS = 60.0


def read_sessions(store: Store) -> dict[str, Session]:
    """The sessions in the order in which they began, before anything was added to them."""
    found = sorted(store.read("session", Session).values(), key=lambda each: each.created)
    for session in found:
        session.models, session.samplers = [], []
    return {session.id: session for session in found}


class Sessions:
    """The sessions of all tenants.

    ``records`` are those of `read_sessions`, to which ``training`` and ``samplers`` have added what these made.
    """

    def __init__(
        self,
        records: dict[str, Session],
        training: Training,
        samplers: Samplers,
        checkpoints: Checkpoints,
        promises: Promises,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._training = training
        self._samplers = samplers
        self._checkpoints = checkpoints
        self._promises = promises
        self._limits = limits
        self._clock = clock
        self._by_key: dict[tuple[str, str], Session] = {}
        # The sessions of each tenant in the order in which they began, and how many of them live.
        self._of: dict[str, dict[str, Session]] = {}
        self._living = Counter[str]()
        # When each living session last showed a sign of life, the first of them first; the same of silent ones; and
        # the time since when nothing changed of those that have ended.
        self._seen: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        # Tenants whose record is full, until it is looked at again.
        self._full: set[tuple[str, str]] = set()
        for session in sorted(records.values(), key=lambda each: each.ended_at or each.silent):
            self._place(session)
        for session in records.values():
            self._index(session)

    def begin(self) -> None:
        """Ends what an earlier process left of sessions that it had ended."""
        for name in self._ended:
            self._end_members(self._records[name])

    def find(self, tenant: str, name: str) -> Session:
        found = self._records.get(name)
        if found is None or found.tenant != tenant:
            raise Unknown(f"there is no session {name!r}; create a session first")
        return found

    def open(self, tenant: str, name: str) -> Session:
        """A session that has not ended."""
        found = self.find(tenant, name)
        if found.ended:
            raise Gone(f"session {name} was finished ({found.ended}); begin a new one")
        return found

    def of(self, tenant: str) -> list[Session]:
        """The tenant's sessions, newest first."""
        return [*reversed(self._of.get(tenant, {}).values())]

    def tenants(self) -> list[str]:
        """The tenants that have sessions."""
        return sorted(self._of)

    def living(self, tenant: str) -> int:
        """The number of a tenant's sessions whose clients show signs of life."""
        return self._living[tenant]

    def is_silent(self, name: str) -> bool:
        return name in self._silent

    async def create(
        self, tenant: str, tags: Sequence[str], metadata: Mapping[str, Any] | None, name: str | None, key: str | None
    ) -> str:
        """Begins a session and returns its id; the same id for the same idempotency key."""
        if key is not None and (known := self._by_key.get((tenant, key))) is not None:
            await self._promises.commit()
            return known.id
        if (living := self._living[tenant]) >= self._limits.sessions:
            raise Busy(
                f"the tenant has {living} sessions, and the limit is sessions={self._limits.sessions}; finish one"
            )
        session = Session(secrets.token_hex(8), tenant, self._clock(), list(tags), dict(metadata or {}), name, key)
        check_metadata([session.tags, session.metadata, session.name])
        change = put_record("session", session.id, session)
        self._forget_beyond("sessions", tenant, self._of.get(tenant, {}).values(), self._useless, self._forget)
        self._records[session.id] = session
        self._index(session)
        self._place(session)
        await self._promises.commit(change)
        return session.id

    def see(self, tenant: str, target: str) -> None:
        """Notes a sign of life of the session that a session's, model's or sampler's id begins with."""
        session = self._records.get(target.partition(":")[0])
        if session is None or session.tenant != tenant or session.ended:
            return
        was_silent, session.silent = session.silent, 0.0
        self._place(session)
        if was_silent:
            self._promises.record(put_record("session", session.id, session))

    async def finish(self, tenant: str, name: str, status: str, detail: str | None) -> None:
        """Ends a session, its models and its samplers. Checkpoints stay. The first call counts."""
        session = self.find(tenant, name)
        check_metadata(detail)
        if not session.ended:
            self._end(session, status, detail)
        await self._promises.commit()

    def make_room_for_model(self, tenant: str) -> None:
        """Forgets a model that nobody can use anymore if the tenant has too many. Raises Busy if there is none."""
        models = self._training.of(tenant)
        self._forget_beyond("models", tenant, models, lambda each: self._unused(each.record.id), self._forget_model)

    def tidy(self) -> None:
        """Acts on sessions whose time as living or as ended is over."""
        self._full.clear()
        now = self._clock()
        for session in self._before(self._seen, now - self._limits.heartbeat_seconds):
            if not all(self._training.idle(model) for model in session.models):
                continue
            log.info("Session %s of tenant %s is silent; its models leave the ranks", session.id, session.tenant)
            session.silent = self._seen[session.id]
            self._place(session)
            self._promises.record(put_record("session", session.id, session))
            for model in session.models:
                self._training.evict(model)
        # By then no outcome of them is kept either.
        for session in self._before(self._ended, now - self._limits.kept_seconds):
            if self._useless(session):
                self._forget(session)
            else:
                # The last in line.
                del self._ended[session.id]
                self._ended[session.id] = now

    async def work(self) -> None:
        """Ends silent sessions until it is cancelled."""
        while True:
            await asyncio.sleep(SILENT_SECONDS)
            await self.end_silent()

    async def end_silent(self) -> None:
        """Ends sessions that are silent for too long. The last states of their models become checkpoints first."""
        for session in self._before(self._silent, self._clock() - self._limits.silent_seconds):
            if session.id not in self._records:
                continue
            kept = [await self._training.keep(model) for model in [*session.models]]
            await asyncio.sleep(0)
            # It may have shown a sign of life, or been finished or forgotten, meanwhile.
            if all(kept) and session.id in self._silent:
                days = (self._clock() - session.silent) / 86_400
                log.info("Session %s of tenant %s ends: it is silent for %.1f days", session.id, session.tenant, days)
                self._end(session, "interrupted", f"it showed no sign of life for {days:.1f} days")

    def _index(self, session: Session) -> None:
        self._of.setdefault(session.tenant, {})[session.id] = session
        if session.key is not None:
            self._by_key[session.tenant, session.key] = session

    def _place(self, session: Session) -> None:
        """Makes a session the last in the line of its state."""
        self._displace(session)
        if session.ended:
            self._ended[session.id] = session.ended_at
        elif session.silent:
            self._silent[session.id] = session.silent
        else:
            self._seen[session.id] = self._clock()
            self._living[session.tenant] += 1

    def _displace(self, session: Session) -> None:
        self._living[session.tenant] -= self._seen.pop(session.id, None) is not None
        self._silent.pop(session.id, None)
        self._ended.pop(session.id, None)

    def _before(self, times: Mapping[str, float], time: float) -> list[Session]:
        """The sessions up to a time, of times in ascending order; a part of many, so that clients are answered soon."""
        early = takewhile(lambda item: item[1] < time, islice(times.items(), AT_ONCE))
        return [self._records[name] for name, _ in early]

    def _end(self, session: Session, status: str, detail: str | None) -> None:
        session.ended, session.detail, session.ended_at = status, detail, self._clock()
        self._place(session)
        self._promises.record(put_record("session", session.id, session))
        self._end_members(session)

    def _end_members(self, session: Session) -> None:
        """Ends the models and samplers of a finished session, those that have not ended."""
        reason = f"its session was finished ({session.ended})"
        for name in session.models:
            self._training.end(name, reason)
            self._training.drop_inflight(name)
        for name in session.samplers:
            self._samplers.end(self._samplers.find(session.tenant, name), reason)

    def _useless(self, session: Session) -> bool:
        """Whether nobody can use a session anymore, or it is silent and has made nothing."""
        if session.ended:
            return all(self._unused(model) for model in session.models)
        return session.id in self._silent and not session.models and not session.samplers

    def _unused(self, model: str) -> bool:
        """Whether a model has ended and has left no checkpoints."""
        return self._training.gone(model) and not self._checkpoints.of_model(model)

    def _forget(self, session: Session) -> None:
        """Forgets a session with its models and samplers; without it the record would grow with every session."""
        changes = [change for model in [*session.models] for change in self._training.forget(model)]
        changes += [self._samplers.forget(sampler) for sampler in [*session.samplers]]
        self._displace(session)
        del self._records[session.id], self._of[session.tenant][session.id]
        if not self._of[session.tenant]:
            del self._of[session.tenant]
        self._by_key.pop((session.tenant, session.key or ""), None)
        self._promises.record(*changes, drop_record("session", session.id))

    def _forget_model(self, model: ModelQueue) -> None:
        """Forgets a model that has ended. Its number stays used, because names of adapters have it."""
        session = self._records[model.record.session]
        session.first_model = max(session.first_model, 1 + int(model.record.id.rpartition(":")[2]))
        self._promises.record(*self._training.forget(model.record.id), put_record("session", session.id, session))

    def _forget_beyond(
        self,
        kind: str,
        tenant: str,
        records: Collection[Forgettable],
        useless: Callable[[Forgettable], bool],
        forget: Callable[[Forgettable], None],
    ) -> None:
        """Forgets the oldest record of a tenant that nobody can use anymore, if there are too many. Raises Busy."""
        if len(records) < self._limits.records:
            return
        found = None if (kind, tenant) in self._full else next(filter(useless, records), None)
        if found is None:
            self._full.add((kind, tenant))
            raise Busy(
                f"the tenant has {len(records)} {kind} whose checkpoints are kept or that have not ended, and the "
                f"limit is {self._limits.records}; delete checkpoints, and finish sessions"
            )
        forget(found)
