"""A conversation that forks is one sample of its group, from the workflow to the buffer and in every mean."""

import asyncio
from dataclasses import replace

import pytest
from local_rollouter import local_rollouter
from trajectories import trajectory

from megasync.buffer import AsyncBuffer
from megasync.config.schema import Config, GroupConfig, ScheduleConfig
from megasync.data.curriculum import Curriculum
from megasync.rewards import RewardFunction, RewardRunner
from megasync.rollout.group_worker import GroupSpec
from megasync.rollout.rollouter import Rollouter
from megasync.rollout.selection import Selection, summarize
from megasync.trajectory import sample_rewards


def forking(*rewards):
    """A workflow whose n-th sample has the n-th reward, in as many trajectories as its number says."""

    async def workflow(client, sample):
        reply = await client.generate(sample["prompt_ids"])
        number = (int(reply.text) - 1) % len(rewards)
        return [replace(reply.trajectory(rewards[number]), text=reply.text) for _ in range(number + 1)]

    return workflow


async def test_trajectories_of_a_sample_have_its_number(make_bench):
    bench = make_bench(total=1, samples=3, workflow=forking(1.0, 0.0, 0.5), reward=None)
    await bench.rollouter.run()
    (group,) = bench.buffer.committed.values()
    assert [t.sample for t in group.trajectories] == [0, 1, 1, 2, 2, 2]
    assert (group.least, group.score, sample_rewards(group.trajectories)) == (2, 0.5, [1.0, 0.0, 0.5])


def test_a_metric_is_averaged_over_the_samples_that_have_it():
    forked = [trajectory(reward=1.0, metrics={"reward/exact": 1.0}) for _ in range(3)]
    forked[-1].metrics["turns"] = 3.0
    alone = trajectory(reward=0.0, metrics={"reward/exact": 0.0, "turns": 1.0})
    summary = summarize([*(replace(t, sample=0) for t in forked), replace(alone, sample=1)])
    assert summary["reward/exact"] == (1.0, 2) and summary["turns"] == (4.0, 2) and summary["reward_mean"] == (1.0, 2)


async def test_the_score_of_a_prompt_is_of_all_its_samples_without_penalties(make_bench):
    """By which a curriculum judges it: with a penalty for length no prompt would ever be solved."""
    rules = {"overlong": "punish", "overlong_tokens": 8, "keep": "spread", "extra_samples": 1}
    bench = make_bench(
        total=1,
        samples=2,
        workflow=forking(1.0, 1.0, 1.0),
        reward=None,
        groups=rules,
        curriculum=Curriculum(lambda history, epoch: True, rows=4),
    )
    await bench.rollouter.run()
    (group,) = bench.buffer.committed.values()
    assert group.score == 1.0 and max(sample_rewards(group.trajectories)) < 1.0


@pytest.mark.parametrize("advantage", ["gae", "reinforce_plus_plus", "remax"])
async def test_one_scored_sample_is_enough_for_an_estimator_that_compares_none(make_bench, fake_client, advantage):
    """Through the real buffer, which would otherwise drop what the selection has passed."""
    config = Config()
    config.algorithm.advantage = advantage
    config.schedule = ScheduleConfig(groups_per_step=2, samples_per_group=4, max_staleness=0)
    rewards = RewardRunner(lambda completions, **columns: [1.0] + [None] * (len(completions) - 1))
    spec = GroupSpec.of(config, forking(None), rewards, None, None)
    buffer = AsyncBuffer(config.schedule, total_groups=2)
    source = make_bench().source
    rollouter: Rollouter = local_rollouter(
        *(fake_client(), source, buffer, forking(None), config.schedule), rewards=rewards, selection=spec.selection
    )
    running = asyncio.create_task(rollouter.run())
    batch = await buffer.lease(1, 0)
    rollouter.stop()
    await running
    assert [[t.reward for t in group.header.trajectories] for group in batch] == [[1.0], [1.0]]
    assert (await buffer.counts())["dropped"] == {}


def several():
    return [
        RewardFunction("exact", lambda completions, **columns: [1.0, 0.0][: len(completions)]),
        RewardFunction("brief", lambda completions, **columns: [-1.0, -3.0][: len(completions)], 0.5),
    ]


async def test_a_group_knows_the_weights_of_the_functions_that_scored_it(make_bench):
    bench = make_bench(total=1, reward=several())
    await bench.rollouter.run()
    (group,) = bench.buffer.committed.values()
    assert group.weights == {"exact": 1.0, "brief": 0.5}
    bench = make_bench(total=1, reward=several()[:1])
    await bench.rollouter.run()
    assert next(iter(bench.buffer.committed.values())).weights == {}


async def test_a_reward_that_is_not_made_of_the_compared_scores_is_an_error(fake_client, make_bench):
    """Otherwise each of its advantages would be zero."""
    bench = make_bench(total=1)
    selection = Selection(GroupConfig(), 2, 8, compared=("exact", "brief"))
    workflow = forking(1.0, 0.0)
    rollouter = local_rollouter(
        *(fake_client(), bench.source, bench.buffer, workflow, ScheduleConfig(groups_per_step=1, samples_per_group=2)),
        rewards=RewardRunner(several()),
        selection=selection,
    )
    with pytest.raises(
        Exception, match=r"(?s)all of the first 8 groups.*reward_error.*has set the reward.*exact, brief"
    ):
        await rollouter.run()


def test_scores_are_compared_only_where_the_estimator_does():
    for advantage, reward_coef, compared in (("gdpo", 1.0, ("exact", "brief")), ("gdpo", 0.0, ()), ("grpo", 1.0, ())):
        config = Config()
        config.algorithm.advantage, config.algorithm.reward_coef = advantage, reward_coef
        spec = GroupSpec.of(config, forking(1.0), RewardRunner(several()), None, None)
        assert spec.selection.compared == compared
