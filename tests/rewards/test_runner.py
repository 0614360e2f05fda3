"""The signature of reward functions, and a DataError for every result that is not a score."""

import asyncio
import copy
import math
import os
import signal
import sys
from collections import UserString
from itertools import repeat

import numpy as np
import pytest
from waits import PATIENCE, until

from megasync.errors import ConfigError, DataError
from megasync.rewards.runner import RewardRunner
from megasync.trajectory import TOKEN_REWARDS

COLUMNS = {"prompt": "p", "answer": {"value": [1]}}


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def rewards(trajectories):
    return [t.reward for t in trajectories]


async def test_the_function_is_called_once_per_group_with_repeated_columns(make_trajectory):
    calls = []

    def reward(completions, *, prompt, answer, completion_ids, finish_reasons):
        calls.append((completions, prompt, answer, completion_ids, finish_reasons))
        return [1, 0.5]

    group = [make_trajectory("a"), make_trajectory("bc", tokens=3, finish_reason="length")]
    assert rewards(await RewardRunner(reward).score(group, COLUMNS)) == [1.0, 0.5]
    answers = [COLUMNS["answer"]] * 2
    assert calls == [(["a", "bc"], ["p", "p"], answers, [[5, 5], [5, 5, 5]], ["stop", "length"])]


class Judge:
    async def __call__(self, completions, **columns):
        await asyncio.sleep(0)
        return [3.0]


@pytest.mark.parametrize("processes", [0, 2])
async def test_an_async_function_is_awaited_on_the_event_loop(make_trajectory, processes):
    assert rewards(await RewardRunner(Judge(), processes=processes).score([make_trajectory()], {})) == [3.0]


async def test_none_leaves_a_response_unscored_and_own_rewards_are_kept(make_trajectory):
    group = [make_trajectory("a"), make_trajectory("b", reward=7.0), make_trajectory("ccc")]
    scored = await RewardRunner(lambda completions, **c: [None, 3.0][: len(completions)]).score(group, {})
    assert rewards(scored) == [None, 7.0, 3.0]
    assert rewards(await RewardRunner(None).score(group, {})) == [None, 7.0, None]


async def test_a_function_may_reward_single_tokens(make_trajectory):
    group = [make_trajectory("a", tokens=3), make_trajectory("b", tokens=2)]

    def steps(completions, *, completion_ids, **columns):
        return [[None, 0.5, 1.0], np.array([0.0, 2.0])]

    scored = await RewardRunner(steps).score(group, {})
    assert rewards(scored) == [1.5, 2.0]
    assert [str(t.arrays[TOKEN_REWARDS].tolist()) for t in scored] == ["[nan, 0.5, 1.0]", "[0.0, 2.0]"]
    weighted = await RewardRunner({steps: 2.0, length: 0.5}).score(group, {})
    assert rewards(weighted) == [3.5, 4.5]
    # The other function's part is not that of a token.
    assert [np.nansum(t.arrays[TOKEN_REWARDS]).item() for t in weighted] == [3.0, 4.0]
    assert weighted[0].metrics["reward/steps"] == 1.5


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        ([1.0], "1 rewards of tokens .*has 2 tokens"),
        ([1.0, "x"], "the reward 'x'"),
        ([1.0, math.inf], "the reward inf"),
    ],
)
async def test_rewards_of_tokens_are_one_number_each(make_trajectory, score, problem):
    with pytest.raises(DataError, match=problem):
        await RewardRunner(lambda completions, **columns: [score]).score([make_trajectory("a")], {})


# Several functions


def polite(completions, **columns):
    return [1.0 if "please" in text else None for text in completions]


async def test_scores_are_weighted_and_missing_scores_are_left_out(make_trajectory):
    group = [make_trajectory("please"), make_trajectory("ab", metrics={"turns": 2.0})]
    scored = await RewardRunner({length: 0.5, polite: 1.5}).score(group, {})
    assert rewards(scored) == [0.5 * 6 + 1.5 * 1, (0.5 * 2) * 2.0 / 0.5]
    assert [t.metrics for t in scored] == [
        {"reward/length": 6.0, "reward/length/none": 0.0, "reward/polite": 1.0, "reward/polite/none": 0.0},
        {"turns": 2.0, "reward/length": 2.0, "reward/length/none": 0.0, "reward/polite/none": 1.0},
    ]
    assert rewards(await RewardRunner({polite: 1.0}).score(group, {})) == [1.0, None]


async def test_functions_run_concurrently_and_all_end_before_an_error_is_raised(make_trajectory):
    both, ended = asyncio.Barrier(2), []

    async def first(completions, **columns):
        await both.wait()
        raise ValueError("broken")

    async def second(completions, **columns):
        await both.wait()
        await asyncio.sleep(0.01)
        ended.append(True)
        return [1.0]

    with pytest.raises(DataError, match="first raised ValueError: broken"):
        await RewardRunner({first: 1.0, second: 1.0}, timeout=PATIENCE).score([make_trajectory()], {})
    assert ended == [True]


async def test_a_function_that_keeps_its_own_deadlines_gets_no_other_deadline(make_trajectory):
    class Queueing:
        keeps_own_deadlines = True

        async def __call__(self, completions, **columns):
            await asyncio.sleep(0.05)
            return [1.0]

    assert rewards(await RewardRunner(Queueing(), timeout=0.001).score([make_trajectory()], {})) == [1.0]


async def test_the_callers_columns_and_trajectories_are_not_changed(make_trajectory):
    def greedy(completions, *, answer, completion_ids, **columns):
        answer[0]["value"].append(2)
        completion_ids[0].clear()
        completions.clear()
        return [1.0]

    def careful(completions, *, answer, **columns):
        return [float(len(answer[0]["value"]))]

    columns, group = copy.deepcopy(COLUMNS), [make_trajectory()]
    assert rewards(await RewardRunner({greedy: 1.0, careful: 1.0}).score(group, columns)) == [2.0]
    assert columns == COLUMNS
    assert group == [make_trajectory()]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([float("nan")], "my_reward returned the reward nan for prompt 0:7; it must be a finite number, or None"),
        ([float("inf")], "returned the reward inf"),
        ([10**400], "returned the reward 1000.* for prompt 0:7"),
        (["1.0"], "returned the reward .1.0. "),
        ([1.0, 2.0], r"must return 1 scores, one per completion, not \[1.0, 2.0\] \(prompt 0:7\)"),
        ([], "must return 1 scores"),
        (1.0, "must return one score per completion, not 1.0"),
        (None, "must return one score per completion, not None"),
        ({"score": 1}, "must return 1 scores"),
        ("1", "must return 1 scores"),
        (["good"], "returned the reward 'good'"),
        # Without an order, or of no scores.
        ({1.0}, r"must return 1 scores, one per completion, not \{1.0\}"),
        (bytearray(b"1"), "must return 1 scores"),
        (UserString("1"), "must return 1 scores"),
        # Without an end.
        (repeat(1.0), r"must return 1 scores, one per completion, not repeat\(1.0\)"),
    ],
)
async def test_an_invalid_score_is_a_data_error_that_names_function_and_prompt(make_trajectory, answer, message):
    def my_reward(completions, **columns):
        return answer

    with pytest.raises(DataError, match=message) as error:
        await RewardRunner(my_reward).score([make_trajectory()], {}, "0:7")
    assert "my_reward" in str(error.value)


def raising(completions, **columns):
    raise KeyError("gold")


async def cancelled(completions, **columns):
    shared = asyncio.ensure_future(asyncio.sleep(600))
    shared.cancel()
    await shared


def lazy(completions, **columns):
    yield 1 / len(columns["nothing"])


class Hostile:
    def __float__(self):
        sys.exit(0)

    __repr__ = __float__


def hostile(completions, **columns):
    return [Hostile()]


def alarmed(completions, **columns):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "raising raised KeyError: 'gold'"),
        (cancelled, "cancelled raised CancelledError: .*"),
        (lazy, "lazy raised KeyError: 'nothing'"),
        (hostile, "hostile raised SystemExit: 0"),
        (alarmed, r"alarmed raised ValueError: signal only .*set rollout.reward_processes.*"),
    ],
)
async def test_what_a_function_raises_is_a_data_error_with_its_cause(make_trajectory, function, message):
    with pytest.raises(DataError, match=rf"{message} \(prompt 0:7\)") as error:
        await RewardRunner(function).score([make_trajectory()], {}, "0:7")
    assert error.value.__cause__ is not None


async def test_an_async_function_has_a_deadline(make_trajectory):
    async def slow(completions, **columns):
        await asyncio.sleep(60)

    with pytest.raises(DataError, match=r"slow did not answer within 0.05 s"):
        await RewardRunner(slow, timeout=0.05).score([make_trajectory()], {})


def test_a_function_that_cannot_be_pickled_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"reward_processes.*lambda.*top level of a module"):
        RewardRunner(lambda completions, **columns: [1.0], processes=1)


@pytest.fixture
async def make_runner(tmp_path, monkeypatch):
    """A runner of a function in worker processes, which lies in a module that these can import."""
    (tmp_path / "process_reward.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "def reward(completions, *, how, **columns):\n"
        "    here = Path(__file__).parent\n"
        "    (here / f'{how[0]}-{os.getpid()}').touch()\n"
        "    if how[0] == 'sleep': time.sleep(600)\n"
        "    if how[0] == 'exit': os._exit(3)\n"
        "    if how[0] == 'raise': raise ValueError('broken')\n"
        "    while how[0] == 'wait' and not (here / 'proceed').exists(): time.sleep(0.01)\n"
        "    return [float(os.getpid())] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "process_reward", raising=False)
    from process_reward import reward

    made = []

    def make(processes):
        made.append(RewardRunner(reward, processes=processes, timeout=PATIENCE))
        return made[-1]

    yield make
    for runner in made:
        await runner.close()


async def until_called(folder, how):
    await until(lambda: list(folder.glob(f"{how}-*")))


@pytest.mark.processes
async def test_a_process_is_reused_until_a_call_ends_or_blocks_it_or_it_dies_or_its_call_is_cancelled(
    make_runner, make_trajectory, tmp_path
):
    runner = make_runner(processes=1)

    async def call(how):
        return rewards(await runner.score([make_trajectory()], {"how": how}))[0]

    processes = [await call("go")]
    with pytest.raises(DataError, match="raised ValueError: broken"):
        await call("raise")
    assert await call("go") == processes[0] != float(os.getpid())
    with pytest.raises(DataError, match="ended its worker process"):
        await call("exit")
    processes.append(await call("go"))
    runner._timeout = 1.0
    with pytest.raises(DataError, match="did not answer within 1 s"):
        await call("sleep")
    runner._timeout = 60.0
    processes.append(await call("go"))
    os.kill(int(processes[-1]), signal.SIGKILL)
    processes.append(await call("go"))
    waiting = asyncio.create_task(call("wait"))
    await until_called(tmp_path, "wait")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    processes.append(await call("go"))
    assert len(set(processes)) == 5


@pytest.mark.processes
@pytest.mark.parametrize(("how", "message"), [("exit", "ended its worker process"), ("sleep", "did not answer within")])
async def test_a_call_that_loses_its_process_does_not_affect_concurrent_calls(
    make_runner, make_trajectory, tmp_path, how, message
):
    runner = make_runner(processes=2)
    other_call = asyncio.create_task(runner.score([make_trajectory()], {"how": "wait"}))
    await until_called(tmp_path, "wait")
    if how == "sleep":
        runner._timeout = 1.0
    # The second process is started for this call, while the first one waits.
    with pytest.raises(DataError, match=message):
        await runner.score([make_trajectory()], {"how": how})
    (tmp_path / "proceed").touch()
    await other_call
    assert len(list(tmp_path.glob("wait-*"))) == 1, "the other call was not repeated"


def test_rows_are_checked_before_anything_starts_by_functions_that_can():
    class Strict:
        def __call__(self, completions, **columns):
            return [0.0 for _ in completions]

        def check_row(self, row):
            if "tests" not in row:
                raise DataError("no tests")

    RewardRunner({length: 1.0, Strict(): 1.0}).check_rows([{"tests": ""}, {"tests": ""}], "the data")
    with pytest.raises(DataError, match="the data, row 1: no tests"):
        RewardRunner({length: 1.0, Strict(): 1.0}).check_rows([{"tests": ""}, {}], "the data")
    RewardRunner(length).check_rows([{}], "the data")
