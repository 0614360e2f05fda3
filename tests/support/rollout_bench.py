"""In-memory fakes of the rollout's collaborators, on one event loop."""

import asyncio
from dataclasses import dataclass, field

import pytest
from local_rollouter import local_rollouter
from trajectories import trajectory

from megasync.buffer import BufferClosed
from megasync.buffer.payload import decode
from megasync.config.schema import GroupConfig, ScheduleConfig
from megasync.rewards import RewardRunner
from megasync.rollout.conversation import Generation
from megasync.rollout.group_worker import FailurePolicy
from megasync.rollout.rollouter import Rollouter, ServerLimits
from megasync.rollout.selection import Selection
from megasync.rollout.workflow import single_turn
from megasync.trajectory import Prompt


class FakeClient:
    """Answers with numbered texts. `behave(prompt_ids, options)` may raise, wait, or return the text."""

    def __init__(self, behave=None):
        self.behave = behave
        self.calls = []
        self.running = 0
        self.most_running = 0

    def metrics(self):
        return {}

    async def generate(self, prompt_ids, **options):
        self.calls.append((list(prompt_ids), options))
        number = len(self.calls)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            answer = self.behave(prompt_ids, options) if self.behave else str(number)
            text = await answer if asyncio.iscoroutine(answer) else answer
            return Generation.of(list(prompt_ids), [5, 5], [-0.1] * 2, [0] * 2, "stop", text)
        finally:
            self.running -= 1

    async def chat(self, messages, *, conversation, **options):
        return await self.generate([len(messages)], **options)


class FakeSource:
    """Rows 0..size-1, in repeated epochs."""

    def __init__(self, size=4):
        self.size, self.drawn, self.unconfirmed = size, 0, []

    def next(self):
        uid = f"{self.drawn // self.size}:{self.drawn % self.size}"
        self.drawn += 1
        self.unconfirmed.append(uid)
        return self.get(uid)

    def get(self, uid):
        row = int(uid.split(":")[1])
        return Prompt(uid, [row], {"prompt": str(row), "answer": {"value": row}})

    def admitted(self, uid):
        self.unconfirmed.remove(uid)


@dataclass
class FakeBuffer:
    """Admits up to `capacity` live groups, and `total` groups that are not dropped. Closes after the last commit."""

    total: int = 10**9
    capacity: int = 10**9
    live: list = field(default_factory=list)
    committed: dict = field(default_factory=dict)
    dropped: dict = field(default_factory=dict)
    admitted: int = 0

    def __post_init__(self):
        self.changed = asyncio.Condition()
        self.again = asyncio.Queue()
        self.reason = None
        self.saved = {}

    async def admit(self, uid):
        async with self.changed:
            await self.changed.wait_for(lambda: self.reason or self._has_room())
            if self.reason:
                raise BufferClosed(self.reason)
            assert uid not in self.live and uid not in self.committed and uid not in self.dropped
            self.live.append(uid)
            self.admitted += 1

    def _has_room(self):
        return len(self.live) < self.capacity and len(self.live) + len(self.committed) < self.total

    async def commit(self, group):
        await self._end(group.uid, self.committed, decode(group.header, group.body))
        if len(self.committed) == self.total:
            await self.close("all groups are there")
        return True

    async def drop(self, uid, reason):
        await self._end(uid, self.dropped, reason)
        return True

    async def _end(self, uid, ended, value):
        await asyncio.sleep(0)  # as with an answer from another process: other tasks may finish meanwhile
        async with self.changed:
            if self.reason:
                raise BufferClosed(self.reason)
            self.live.remove(uid)
            ended[uid] = value
            self.changed.notify_all()

    async def save_partials(self, partials):
        self.saved |= {key: partial.data for key, partial in partials.items()}

    async def partials(self, uid):
        return {(sample, turn): partial for (of, sample, turn), partial in self.saved.items() if of == uid}

    async def unfinished(self, uids):
        return [uid for uid in uids if uid in self.live]

    async def reclaim(self):
        uid = await self.again.get()
        if uid is None:
            raise BufferClosed(self.reason)
        return uid

    async def close(self, reason):
        async with self.changed:
            self.reason = reason
            self.changed.notify_all()
        self.again.put_nowait(None)


@dataclass
class Bench:
    """A rollouter with fake collaborators."""

    client: FakeClient
    source: FakeSource
    buffer: FakeBuffer
    rollouter: Rollouter


def by_place(completions, **columns):
    """Rewards that differ within a group."""
    return [float(n) for n, _ in enumerate(completions)]


@pytest.fixture(scope="session")
def make_bench():
    def make(
        *,
        total=10**9,
        capacity=8,
        size=4,
        samples=2,
        behave=None,
        workflow=single_turn,
        reward=by_place,
        inflight=None,
        groups=None,
        relative=True,
        seed=None,
        max_attempts=1,
        max_drop_share=0.5,
        fleet=None,
        cap=None,
        quarantine=None,
        save_seconds=0.0,
        **options,
    ):
        client, source, buffer = FakeClient(behave), FakeSource(size), FakeBuffer(total, capacity)
        schedule = ScheduleConfig(groups_per_step=4, samples_per_group=samples, max_inflight_groups=inflight)
        selection = Selection(GroupConfig(**(groups or {})), samples, 8, relative)
        rollouter = local_rollouter(
            *(client, source, buffer, workflow, schedule),
            rewards=RewardRunner(reward),
            selection=selection,
            seed=seed,
            failures=FailurePolicy(max_attempts, (0.0, 0.0), save_seconds),
            max_drop_share=max_drop_share,
            servers=ServerLimits(fleet, cap, quarantine),
            **options,
        )
        return Bench(client, source, buffer, rollouter)

    return make


@pytest.fixture(scope="session")
def make_trajectory():
    return trajectory


@pytest.fixture(scope="session")
def fake_client():
    return FakeClient
