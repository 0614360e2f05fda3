"""Workers record the groups that they drop: responses, rewards, why they are not trained; and all reference answers."""

import asyncio
import sys

import pytest
from local_rollouter import local_worker

from megasync.config.schema import Config, GroupConfig, ObserveConfig
from megasync.errors import DataError
from megasync.observe.rollouts import NO_SAMPLE, RolloutLog
from megasync.rewards import RewardRunner
from megasync.rollout.group_worker import DropRecord, GroupSpec
from megasync.rollout.selection import Selection
from megasync.trajectory import Prompt, Trajectory
from megasync.watch.recorded import RolloutIndex


class Client:
    def metrics(self):
        return {}


class Sink:
    """A buffer that takes everything."""

    async def commit(self, group):
        return True

    async def drop(self, uid, reason):
        return True


async def work(record, workflow, reward, **columns):
    ended = asyncio.get_running_loop().create_future()
    spec = GroupSpec(workflow, RewardRunner(reward), Selection(GroupConfig(drop_uniform=True), 2, sys.maxsize))
    worker = local_worker(Client(), Sink(), spec, record=record)
    worker.follow(ended.set_result, ended.set_exception)
    worker.start(Prompt("0:7", [1, 2, 3], columns), 0)
    return await ended


async def answers(client, sample):
    return Trajectory(sample["prompt_ids"], [4, 5], [1, 1], [-0.5, -0.25], [3, 4], text="the answer")


def rows_of(folder):
    index = RolloutIndex(folder)
    index.update()
    return index, index.group("0:7")


def broken(completions, **_):
    raise ZeroDivisionError("division by zero in the reward")


def equal(completions, **_):
    return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("reward", "reason", "score", "problem"),
    [(equal, "uniform", 0.5, ""), (broken, "reward_error", None, "division by zero in the reward")],
)
async def test_a_dropped_group_is_recorded_with_its_reason_rewards_and_text(tmp_path, reward, reason, score, problem):
    ended = await work(DropRecord(RolloutLog(tmp_path, "worker-0", 2**20), share=1.0), answers, reward)
    assert ended.dropped.reason == reason
    index, rows = rows_of(tmp_path)
    assert [(row.sample, row.step, row.version, row.staleness) for row in rows] == [(0, 0, 4, 1), (1, 0, 4, 1)]
    assert {(row.dropped, row.reward, row.tokens, row.prompt_tokens) for row in rows} == {(reason, score, 2, 3)}
    response = index.read(rows[0])
    assert (response.text, response.ids.tolist(), response.logprobs.tolist()) == ("the answer", [4, 5], [-0.5, -0.25])
    assert response.trainer_logprobs is None and problem in response.problem


async def test_a_group_without_a_response_has_one_row(tmp_path):
    async def fails(client, sample):
        raise DataError("the tool is gone")

    await work(DropRecord(RolloutLog(tmp_path, "worker-0", 2**20), 1.0), fails, None)
    index, rows = rows_of(tmp_path)
    assert [(row.sample, row.dropped, row.tokens, row.prompt_tokens) for row in rows] == [
        (NO_SAMPLE, "no_response", 0, 3)
    ]
    assert "the tool is gone" in index.read(rows[0]).problem


async def test_committed_groups_and_those_outside_the_share_are_not_recorded(tmp_path):
    record = DropRecord(RolloutLog(tmp_path, "worker-0", 2**20), 1.0)
    assert (await work(record, answers, lambda completions, **_: [0.0, 1.0])).taken
    await work(DropRecord(RolloutLog(tmp_path, "worker-0", 2**20), 0.0), answers, lambda completions, **_: [0.5, 0.5])
    index, rows = rows_of(tmp_path)
    assert rows == [] and index.answer("0:7") is None
    assert DropRecord.of(Config(observe=ObserveConfig(rollouts=0)), tmp_path, "driver") is None


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.5, 0.5]], ids=["committed", "dropped"])
@pytest.mark.parametrize("columns", [{"answer": 42}, {"reward_model": {"style": "rule", "ground_truth": 42}}])
async def test_the_reference_answer_of_every_group_is_recorded(tmp_path, columns, rewards):
    record = DropRecord(RolloutLog(tmp_path, "worker-0", 2**20), 0.0)
    await work(record, answers, lambda completions, **_: rewards, **columns)
    assert rows_of(tmp_path)[0].answer("0:7") == "42"
