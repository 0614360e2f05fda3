"""The signature of reward functions, and a DataError for every result that is not a score."""

import asyncio
import copy
import math
import os
import signal
import sys

import numpy as np
import pytest

from megasync.errors import ConfigError, DataError
from megasync.rewards.runner import RewardRunner
from megasync.trajectory import TOKEN_REWARDS

COLUMNS = {"prompt": "p", "answer": {"value": [1]}}


def text_length(completions, **columns):
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


async def test_async_functions_are_awaited(make_trajectory):
    async def reward(completions, **columns):
        await asyncio.sleep(0)
        return [2.0]

    class Judge:
        async def __call__(self, completions, **columns):
            return [3.0]

    assert rewards(await RewardRunner(reward).score([make_trajectory()], {})) == [2.0]
    assert rewards(await RewardRunner(Judge(), processes=2).score([make_trajectory()], {})) == [3.0]


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
    weighted = await RewardRunner({steps: 2.0, text_length: 0.5}).score(group, {})
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


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def polite(completions, **columns):
    return [1.0 if "please" in text else None for text in completions]


async def test_scores_are_weighted_and_missing_scores_are_left_out(make_trajectory):
    group = [make_trajectory("please"), make_trajectory("ab")]
    scored = await RewardRunner({length: 0.5, polite: 1.5}).score(group, {})
    assert rewards(scored) == [0.5 * 6 + 1.5 * 1, (0.5 * 2) * 2.0 / 0.5]
    assert [t.metrics for t in scored] == [
        {"reward/length": 6.0, "reward/length/none": 0.0, "reward/polite": 1.0, "reward/polite/none": 0.0},
        {"reward/length": 2.0, "reward/length/none": 0.0, "reward/polite/none": 1.0},
    ]


async def test_a_response_that_no_function_scores_stays_unscored(make_trajectory):
    scored = await RewardRunner({polite: 1.0}).score([make_trajectory("no", metrics={"turns": 2.0})], {})
    assert rewards(scored) == [None]
    assert scored[0].metrics == {"turns": 2.0, "reward/polite/none": 1.0}


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
        await RewardRunner({first: 1.0, second: 1.0}, timeout=20).score([make_trajectory()], {})
    assert ended == [True]


async def test_each_function_gets_its_own_copy_of_the_columns(make_trajectory):
    def careless(completions, *, answer, **columns):
        answer[0]["value"].clear()
        return [1.0]

    def careful(completions, *, answer, **columns):
        return [float(len(answer[0]["value"]))]

    assert rewards(await RewardRunner({careless: 1.0, careful: 1.0}).score([make_trajectory()], COLUMNS)) == [2.0]


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

    columns, group = copy.deepcopy(COLUMNS), [make_trajectory()]
    await RewardRunner(greedy).score(group, columns)
    assert columns == COLUMNS
    assert group == [make_trajectory()]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([float("nan")], "returned the reward nan for prompt 0:7; it must be a finite number, or None"),
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
    ],
)
async def test_an_invalid_score_is_a_data_error_that_names_function_and_prompt(make_trajectory, answer, message):
    def my_reward(completions, **columns):
        return answer

    with pytest.raises(DataError, match=message) as error:
        await RewardRunner(my_reward).score([make_trajectory()], {}, "0:7")
    assert "my_reward" in str(error.value)


async def test_an_exception_is_a_data_error_with_its_cause(make_trajectory):
    def my_reward(completions, **columns):
        raise KeyError("gold")

    with pytest.raises(DataError, match=r"my_reward raised KeyError: 'gold' \(prompt 0:7\)") as error:
        await RewardRunner(my_reward).score([make_trajectory()], {}, "0:7")
    assert isinstance(error.value.__cause__, KeyError)


async def test_a_cancellation_inside_the_function_is_an_error_like_any_other(make_trajectory):
    async def my_reward(completions, **columns):
        shared = asyncio.ensure_future(asyncio.sleep(600))
        shared.cancel()
        await shared

    with pytest.raises(DataError, match=r"my_reward raised CancelledError: .*\(prompt 0:7\)"):
        await RewardRunner(my_reward).score([make_trajectory()], {}, "0:7")


async def test_an_error_of_a_returned_generator_is_an_error_of_the_function(make_trajectory):
    def lazy(completions, **columns):
        yield 1 / len(columns["nothing"])

    with pytest.raises(DataError, match=r"lazy raised KeyError: 'nothing' \(prompt 0:7\)"):
        await RewardRunner(lazy).score([make_trajectory()], {}, "0:7")


async def test_a_nan_reward_of_the_workflow_is_refused(make_trajectory):
    with pytest.raises(DataError, match="the workflow returned the reward nan for prompt 0:7"):
        await RewardRunner(text_length).score([make_trajectory(reward=float("nan"))], {}, "0:7")


async def test_an_async_function_has_a_deadline(make_trajectory):
    async def slow(completions, **columns):
        await asyncio.sleep(60)

    with pytest.raises(DataError, match=r"slow did not answer within 0.05 s"):
        await RewardRunner(slow, timeout=0.05).score([make_trajectory()], {})


def test_a_function_that_cannot_be_pickled_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"reward_processes.*lambda.*top level of a module"):
        RewardRunner(lambda completions, **columns: [1.0], processes=1)


@pytest.mark.processes
async def test_worker_processes_run_the_function_and_survive_a_stuck_or_dying_call(
    make_trajectory, tmp_path, monkeypatch
):
    # Functions of a test file cannot be imported by another process, so these live in a module of their own.
    (tmp_path / "pool_rewards.py").write_text(
        "import os, time\n"
        "def reward(completions, *, how, **columns):\n"
        "    if how[0] == 'sleep': time.sleep(600)\n"
        "    if how[0] == 'exit': os._exit(3)\n"
        "    if how[0] == 'raise': raise ValueError('broken')\n"
        "    return [float(os.getpid())] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from pool_rewards import reward

    runner = RewardRunner(reward, processes=1, timeout=20)
    group = [make_trajectory(), make_trajectory()]
    try:
        first = rewards(await runner.score(group, {"how": "go"}))
        assert first[0] != float(os.getpid())
        with pytest.raises(DataError, match="raised ValueError: broken"):
            await runner.score(group, {"how": "raise"})
        with pytest.raises(DataError, match="ended its worker process"):
            await runner.score(group, {"how": "exit"})
        assert rewards(await runner.score(group, {"how": "go"})) != first
        runner._timeout = 1.0
        with pytest.raises(DataError, match="did not answer within 1 s"):
            await runner.score(group, {"how": "sleep"})
        runner._timeout = 20
        assert rewards(await runner.score(group, {"how": "go"})) != first
    finally:
        await runner.close()


@pytest.mark.processes
@pytest.mark.parametrize(("how", "message"), [("exit", "ended its worker process"), ("sleep", "did not answer within")])
async def test_a_call_that_loses_its_process_does_not_affect_concurrent_calls(
    make_trajectory, tmp_path, monkeypatch, how, message
):
    (tmp_path / "neighbours.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "def reward(completions, *, how, **columns):\n"
        "    here = Path(__file__).parent\n"
        "    if how[0] == 'exit': os._exit(3)\n"
        "    if how[0] == 'sleep': time.sleep(600)\n"
        "    (here / f'begun-{os.getpid()}').touch()\n"
        "    while not (here / 'proceed').exists(): time.sleep(0.01)\n"
        "    return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "neighbours", raising=False)
    from neighbours import reward

    runner = RewardRunner(reward, processes=2, timeout=60)
    try:
        other_call = asyncio.create_task(runner.score([make_trajectory()], {"how": "wait"}))
        async with asyncio.timeout(60):
            while not list(tmp_path.glob("begun-*")):
                await asyncio.sleep(0.01)
        if how == "sleep":
            runner._timeout = 1.0
        # The second process is started for this call, while the first one waits.
        with pytest.raises(DataError, match=message):
            await runner.score([make_trajectory()], {"how": how})
        (tmp_path / "proceed").touch()
        assert rewards(await other_call) == [1.0]
        assert len(list(tmp_path.glob("begun-*"))) == 1, "the other call was not repeated"
    finally:
        await runner.close()


@pytest.mark.processes
async def test_an_idle_process_that_died_is_replaced(make_trajectory, tmp_path, monkeypatch):
    (tmp_path / "whereabouts.py").write_text(
        "import os\ndef reward(completions, **columns):\n    return [float(os.getpid())] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from whereabouts import reward

    runner = RewardRunner(reward, processes=2, timeout=60)
    try:
        (first,) = rewards(await runner.score([make_trajectory()], {}))
        assert rewards(await runner.score([make_trajectory()], {})) == [first], "the process is reused"
        os.kill(int(first), signal.SIGKILL)
        (second,) = rewards(await runner.score([make_trajectory()], {}))
        assert second != first
    finally:
        await runner.close()


@pytest.mark.processes
async def test_the_process_of_a_cancelled_call_is_not_reused(make_trajectory, tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "def reward(completions, *, how, **columns):\n"
        "    if how[0] == 'sleep':\n"
        "        Path(__file__).with_name('begun').touch()\n"
        "        time.sleep(600)\n"
        "    return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from endless import reward

    runner = RewardRunner(reward, processes=1, timeout=60)
    try:
        endless = asyncio.create_task(runner.score([make_trajectory()], {"how": "sleep"}))
        async with asyncio.timeout(60):
            while not (tmp_path / "begun").exists():
                await asyncio.sleep(0.01)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        runner._timeout = 20
        assert rewards(await runner.score([make_trajectory()], {"how": "go"})) == [1.0]
    finally:
        await runner.close()


def test_rows_are_checked_before_anything_starts_by_functions_that_can():
    class Strict:
        def __call__(self, completions, **columns):
            return [0.0 for _ in completions]

        def check_row(self, row):
            if "tests" not in row:
                raise DataError("no tests")

    RewardRunner({text_length: 1.0, Strict(): 1.0}).check_rows([{"tests": ""}, {"tests": ""}], "the data")
    with pytest.raises(DataError, match="the data, row 1: no tests"):
        RewardRunner({text_length: 1.0, Strict(): 1.0}).check_rows([{"tests": ""}, {}], "the data")
    RewardRunner(text_length).check_rows([{}], "the data")
