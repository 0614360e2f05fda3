"""Rewards and workflows that raise, block, exit and refuse to end at random: every group ends once, and so does all."""

import asyncio
import logging
import random
from collections import Counter

import pytest
import rogue_functions
from local_rollouter import local_worker
from rollout_bench import FakeSource

from megasync.buffer import AsyncBuffer
from megasync.concurrency import foreign
from megasync.config.schema import GroupConfig, ScheduleConfig
from megasync.rewards import RewardRunner
from megasync.rollout.group_worker import FailurePolicy, GroupSpec
from megasync.rollout.rollouter import Rollouter
from megasync.rollout.selection import Selection
from megasync.trajectory import Prompt, Trajectory

GROUPS, STEPS = 60, 20


class Client:
    tokenizer = None

    def metrics(self):
        return {}


async def answers(client, sample):
    await asyncio.sleep(0)
    return Trajectory([1], [2], [1], [-1.0], [0], text=random.choice("ab"))


def test_every_group_ends_once_and_the_loop_ends(monkeypatch, caplog):
    monkeypatch.setattr(rogue_functions, "single_turn", answers)
    monkeypatch.setattr(rogue_functions, "BLOCKED_SECONDS", 0.2)
    monkeypatch.setattr(rogue_functions, "SHARE", 0.3)
    monkeypatch.setattr(foreign, "LEAVE_SECONDS", 0.02)
    monkeypatch.setattr(foreign, "CUT_SECONDS", 0.05)
    random.seed(7)
    schedule = ScheduleConfig(total_steps=GROUPS, groups_per_step=1, samples_per_group=2, max_staleness=GROUPS)
    counts, failed = {}, []

    async def main():
        buffer = AsyncBuffer(schedule, total_groups=GROUPS)
        rollouter = Rollouter(FakeSource(10**6), buffer, schedule, max_drop_share=1.0)
        spec = GroupSpec(
            rogue_functions.rollout,
            RewardRunner(rogue_functions.reward, timeout=0.1),
            Selection(GroupConfig(), 2, 8),
        )
        rollouter.add(local_worker(Client(), buffer, spec, FailurePolicy(max_attempts=2)))
        loop = asyncio.create_task(rollouter.run(), name="rollout")
        for step in range(1, STEPS + 1):
            lease = asyncio.create_task(buffer.lease(step, step - 1))
            await asyncio.wait({lease, loop}, return_when=asyncio.FIRST_COMPLETED)
            if loop.done():
                failed.append(loop.exception())
                break
            await buffer.ack(step)
            await buffer.publish(step)
        counts.update(await buffer.counts())
        rollouter.stop()
        await asyncio.wait({loop})
        failed.append(loop.exception())
        await buffer.close("over")

    with caplog.at_level(logging.CRITICAL, "megasync"):
        asyncio.run(main())
    assert failed == [None]
    assert counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["live"]
    assert counts["trained"] == STEPS
    assert set(Counter(counts["dropped"])) <= {"no_response", "reward_error", "lone_survivor"}
    assert sum(counts["dropped"].values()), "nothing failed: the test tests nothing"


@pytest.mark.parametrize("failure", range(len(rogue_functions.FAILURES)))
async def test_each_failure_is_named_in_the_reason_of_its_group(failure):
    class Sink:
        async def commit(self, group):
            return True

        async def drop(self, uid, reason):
            return True

    async def workflow(client, sample):
        rogue_functions.FAILURES[failure]()

    def reward(completions, **columns):
        rogue_functions.FAILURES[failure]()

    for flow, name in ((workflow, "the workflow"), (answers, "the reward function")):
        ended = asyncio.get_running_loop().create_future()
        worker = local_worker(Client(), Sink(), GroupSpec(flow, RewardRunner(reward), Selection(GroupConfig(), 2, 8)))
        worker.follow(ended.set_result, ended.set_exception)
        worker.begin(False, None)
        worker.start(Prompt("0:1", [1], {"prompt": "p"}), 0)
        group = await ended
        assert group.dropped.problem.startswith(name) and " raised " in group.dropped.problem
