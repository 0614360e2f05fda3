"""Temporary: rollback and idempotent calls until the ledger's buffer has them."""

from __future__ import annotations

from typing import Any

from megasync.buffer.errors import BufferStateError
from megasync.buffer.handle import AsyncBuffer
from megasync.buffer.state import State, TrajectoryBuffer, _Entry


class RollbackState(TrajectoryBuffer):
    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._kept: dict[int, dict[str, Any]] = {}

    def admit(self, uid):
        entry = self._entries.get(uid)
        if entry is not None and entry.state is State.GENERATING:
            return True
        return super().admit(uid)

    def commit(self, group):
        entry = self._entries.get(group.uid)
        if entry is not None and entry.state is not State.GENERATING:
            return entry.state is not State.RETURNED
        if entry is None and group.uid in self._outcomes:
            return self._outcomes[group.uid] is None
        return super().commit(group)

    def ack(self, step):
        if self._lease is None and step == self._last_step:
            return
        self._kept[step] = {uid: self._entries[uid].group for uid in self._lease[2]}
        super().ack(step)

    def publish(self, version):
        if version == self.version:
            return
        super().publish(version)

    def checkpointed(self, step, oldest_kept):
        self._kept = {at: groups for at, groups in self._kept.items() if at > oldest_kept}

    def lease(self, step, version):
        if self._lease is None and step > self._last_step + 1:
            raise BufferStateError(f"step {step} asks for a batch, but step {self._last_step} is the last trained")
        return super().lease(step, version)

    def rollback(self, step, version):
        if self._lease is not None:
            for uid in self._lease[2]:
                self._entries[uid].state = State.FINISHED
            self._lease = None
        back = {}
        for at in sorted(self._kept):
            if at > step:
                back |= self._kept.pop(at)
        for uid, group in back.items():
            self._outcomes.pop(uid, None)
            self._trained -= 1
            entry = _Entry(uid, State.FINISHED, self._clock(), group, group.oldest_version)
            back[uid] = entry
        rest = {uid: e for uid, e in self._entries.items() if uid not in back}
        self._entries = {**back, **rest}
        for entry in list(self._entries.values()):
            if entry.state is State.FINISHED:
                self._check_age(entry)
        self._last_step = step


class RollbackBuffer(AsyncBuffer):
    def __init__(self, schedule, total_groups=None, version=0, counters=None, **kw: Any) -> None:
        super().__init__(schedule, total_groups, version, counters, **kw)
        old = self._state
        self._state = RollbackState(
            old.pacing, over_age=schedule.over_age, total_groups=total_groups, version=version, clock=self._clock
        )

    async def rollback(self, step, version):
        self._state.rollback(step, version)
        self._wake_all()

    async def checkpointed(self, step, oldest_kept):
        self._state.checkpointed(step, oldest_kept)
