"""Rejected groups and surplus samples against the real buffer: every slot comes back, every prompt is accounted for."""

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from local_rollouter import local_rollouter
from rollout_bench import FakeSource

from megasync.buffer import AsyncBuffer
from megasync.config.schema import GroupConfig, ScheduleConfig
from megasync.rollout.conversation import Generation
from megasync.rollout.selection import Selection

STEPS = 4
LOST = {"all_solved", "all_failed", "uniform", "overlong"}


class FakeClient:
    """Answers after an uneven while, with rewards that are often all equal, and at times cut by the length limit."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.running = self.started = self.version = 0
        self.easy = {}

    def metrics(self):
        return {}

    async def generate(self, prompt_ids, *, routing_key, **options):
        self.started += 1
        self.running += 1
        try:
            await asyncio.sleep(self.random.choice([0, 0, 0.001, 0.002]))
        finally:
            self.running -= 1
        odds = self.easy.setdefault(routing_key, self.random.choice([0.0, 1.0, 0.5, 0.5]))
        finish = "length" if self.random.random() < 0.2 else "stop"
        reward = float(self.random.random() < odds)
        return Generation.of(list(prompt_ids), [5, 5], [-0.1] * 2, [self.version] * 2, finish, text=str(reward))


async def answer(client, sample):
    """The text of what was generated is its reward."""
    generation = await client.generate(sample["prompt_ids"])
    return generation.trajectory(float(generation.text))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    extra=st.integers(0, 3),
    keep=st.sampled_from(["first", "spread"]),
    overlong=st.sampled_from(["keep", "mask"]),
    staleness=st.integers(0, 2),
    inflight=st.none() | st.integers(1, 4),
)
async def test_dropped_groups_give_their_slots_back_and_the_run_gets_its_batches(
    seed, extra, keep, overlong, staleness, inflight
):
    schedule = ScheduleConfig(
        groups_per_step=2, samples_per_group=3, max_staleness=staleness, max_inflight_groups=inflight
    )
    groups = GroupConfig(drop_uniform=True, extra_samples=extra, keep=keep, overlong=overlong)
    client, source = FakeClient(seed), FakeSource(10**6)
    buffer = AsyncBuffer(schedule, total_groups=STEPS * 2)
    rollouter = local_rollouter(client, source, buffer, answer, schedule, selection=Selection(groups, 3, 8))
    run = asyncio.create_task(rollouter.run())
    for step in range(1, STEPS + 1):
        batch = await buffer.lease(step, step - 1)
        for group in batch:
            trajectories = group.header.trajectories
            assert 2 <= len(trajectories) <= 3
            assert len({t.reward for t in trajectories}) == 2
            assert overlong == "keep" or all(t.finish_reason == "stop" for t in trajectories)
        await buffer.ack(step)
        client.version = step
        await buffer.publish(step)
    counts = await buffer.counts()
    rollouter.stop()
    await run
    assert client.running == 0
    metrics = rollouter.metrics()
    dropped = {name: n for name, n in counts["dropped"].items() if n}
    assert set(dropped) <= LOST
    assert counts["admitted"] == counts["trained"] + sum(dropped.values()) + counts["live"]
    assert metrics["rollout/groups_dropped"] == sum(dropped.values())
    assert (counts["trained"], counts["live"], sum(counts["slots"].values())) == (STEPS * 2, 0, 0)
    if keep == "first":
        groups_ended = rollouter.finished_groups + sum(dropped.values())
        unused = metrics.get("rollout/samples_unused", 0.0)
        assert client.started - unused <= 3 * groups_ended <= client.started
        assert unused <= extra * groups_ended
