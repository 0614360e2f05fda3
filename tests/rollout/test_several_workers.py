"""The rollouter over several workers: each group is one worker's, and a lost worker costs no prompt."""

import asyncio
from dataclasses import dataclass, field

import pytest
from rollout_bench import FakeBuffer, FakeSource
from trajectories import trajectory

from megasync.buffer.payload import encode
from megasync.config.schema import ScheduleConfig
from megasync.rollout.inflight import InflightCap, ServerLoad
from megasync.rollout.metrics import WorkerStatus
from megasync.rollout.rollouter import Rollouter, ServerLimits
from megasync.rollout.selection import KILLS_SERVERS, Dropped, GroupEnded
from megasync.trajectory import Group


@dataclass(eq=False)
class FakeWorker:
    """Remembers what it was told. The test ends its groups."""

    groups: dict = field(default_factory=dict)
    batches: dict = field(default_factory=dict)
    told: list = field(default_factory=list)
    status: WorkerStatus = field(default_factory=WorkerStatus)

    def follow(self, on_ended, on_failed):
        self.on_ended, self.on_failed = on_ended, on_failed

    def begin(self, gated, limit):
        self.told.append(("begin", gated, limit))

    def start(self, prompt, batch, again=False):
        assert prompt.uid not in self.groups
        self.groups[prompt.uid] = again
        self.batches[prompt.uid] = batch

    def set_limit(self, limit):
        self.told.append(("limit", limit))

    async def close_gate(self, timeout):
        self.told.append("closed")

    def open_gate(self):
        self.told.append("open")

    def halt(self):
        self.groups.clear()
        return asyncio.sleep(0)

    async def end(self, buffer, uid, taken=True, drop=None):
        """As a `GroupWorker`: the buffer first, then the report."""
        del self.groups[uid]
        if drop is not None:
            await buffer.drop(uid, drop.reason)
        elif taken:
            await buffer.commit(encode(Group(uid, [trajectory(reward=1.0)])))
        self.on_ended(GroupEnded(uid, taken and drop is None, drop))


async def settled(rounds=30):
    for _ in range(rounds):
        await asyncio.sleep(0)


def start(workers, *, capacity=6, total=10**9, inflight=None, servers=None, source=None):
    buffer = FakeBuffer(total, capacity)
    schedule = ScheduleConfig(groups_per_step=2, samples_per_group=2, max_inflight_groups=inflight)
    rollouter = Rollouter(source or FakeSource(), buffer, schedule, servers=servers)
    for worker in workers:
        rollouter.add(worker)
    return buffer, rollouter, asyncio.create_task(rollouter.run())


async def stop(rollouter, run):
    rollouter.stop()
    await run


async def test_groups_are_numbered_by_batch_and_one_that_is_generated_again_goes_first():
    worker, other = FakeWorker(), FakeWorker()
    buffer, rollouter, run = start([worker], capacity=5)
    await settled()
    assert list(worker.batches.values()) == [1, 1, 2, 2, 3]
    await worker.end(buffer, list(worker.groups)[3])
    await settled()
    assert list(worker.batches.values()) == [1, 1, 2, 2, 3, 3]
    returned = next(iter(worker.groups))
    await worker.end(buffer, returned, taken=False)
    buffer.again.put_nowait(returned)
    await settled()
    assert worker.batches[returned] == 0
    assert rollouter.metrics()["rollout/groups_regenerated"] == 1.0
    rollouter.remove(worker)
    rollouter.add(other)
    await settled()
    assert other.batches == {uid: worker.batches[uid] for uid in other.groups}, "a lost worker changes no order"
    await stop(rollouter, run)


async def test_groups_of_a_lost_worker_continue_on_the_others_and_its_late_reports_are_ignored():
    lost, kept = FakeWorker(), FakeWorker()
    buffer, rollouter, run = start([lost, kept], capacity=4)
    await settled()
    moved = set(lost.groups)
    # It committed one, and was lost before it could say so.
    (finished, *_) = moved
    buffer.live.remove(finished)
    buffer.committed[finished] = None
    rollouter.remove(lost)
    await settled()
    assert moved - {finished} <= set(kept.groups)
    assert all(kept.groups[uid] for uid in moved - {finished}), "they are started again"
    assert finished not in kept.groups
    for uid in moved:
        lost.on_ended(GroupEnded(uid, taken=True))
    lost.on_failed(RuntimeError("its process is gone"))
    await settled()
    assert rollouter.finished_groups == 0
    assert rollouter.metrics()["rollout/workers_lost"] == 1.0
    await stop(rollouter, run)


@pytest.mark.parametrize("outcome", ["taken", "dropped", "declined"])
@pytest.mark.parametrize("again", [False, True], ids=["finished", "returned since"])
async def test_a_group_that_is_returned_before_its_end_is_reported_is_started_again_if_the_buffer_says_so(
    outcome, again
):
    worker = FakeWorker()
    buffer, rollouter, run = start([worker], capacity=1, total=1)
    await settled()
    buffer.again.put_nowait("0:0")
    await settled()
    assert list(worker.groups) == ["0:0"]
    del worker.groups["0:0"]
    if not again and outcome != "declined":
        buffer.live.remove("0:0")
    drop = Dropped("all_failed") if outcome == "dropped" else None
    worker.on_ended(GroupEnded("0:0", outcome == "taken", drop))
    await settled()
    assert list(worker.groups) == (["0:0"] if again or outcome == "declined" else [])
    await stop(rollouter, run)


class Fleet:
    def loads(self):
        return [ServerLoad(0.1, 1, 0)] * 2

    def metrics(self):
        return {}


async def test_the_limit_is_shared_by_the_groups_that_run():
    first, second = FakeWorker(), FakeWorker()
    cap = InflightCap(2, 0.9)
    buffer, rollouter, run = start([first], capacity=4, total=4, servers=ServerLimits(Fleet(), cap))
    await settled()
    for uid in list(first.groups)[:3]:
        await first.end(buffer, uid)
    rollouter.add(second)
    assert [worker.told[-1][1] for worker in (first, second)] == [cap.limit * 2 // 3, cap.limit // 3]
    await stop(rollouter, run)


async def test_a_worker_that_joins_takes_over_the_closed_gate_and_the_limit():
    first, second = FakeWorker(), FakeWorker()
    cap = InflightCap(2, 0.9)
    _, rollouter, run = start([first], servers=ServerLimits(Fleet(), cap))
    await settled()
    assert first.told == [("begin", False, None), ("limit", cap.limit)]
    await rollouter.gate(1.0)
    rollouter.add(second)
    assert second.told[0] == ("begin", True, cap.limit)
    limits = [worker.told[-1][1] for worker in (first, second)]
    assert sum(limits) <= cap.limit
    assert min(limits) >= 1
    rollouter.open()
    assert second.told[-1] == "open"
    await stop(rollouter, run)


async def test_the_row_of_a_prompt_that_kills_servers_is_described_with_it():
    described = []

    class Held:
        holds, busy = 0, False

        def describe(self, key, row):
            described.append((key, row["prompt"]))

        def metrics(self):
            return {}

    worker = FakeWorker()
    buffer, rollouter, run = start([worker], capacity=1, servers=ServerLimits(quarantine=Held()))
    await settled()
    await worker.end(buffer, "0:0", drop=Dropped(KILLS_SERVERS, "evidence"))
    await settled()
    assert described == [("0:0", "0")]
    await stop(rollouter, run)
