"""Reward functions written for megasync, TRL and verl are loaded, called as they expect, and combined, or refused."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.coding.reward import CodeReward
from megasync.errors import ConfigError
from megasync.integrations.math_verify import math_reward
from megasync.rewards import RewardFunction, RewardRunner, check_columns, load_reward, reward_functions
from megasync.rewards.function import combine

ROW = {"prompt": "p", "answer": "a"}
CHAT = {"prompt": [{"role": "user", "content": "p"}], "answer": "a"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "p"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "a"},
    "extra_info": {"split": "train", "index": 0},
}


def ours(completions, **columns):
    return [float(text == right) for text, right in zip(completions, columns["answer"], strict=True)]


def another_name(texts, answer):
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


def trl(prompts, completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def trl_without_columns(prompts, completions):
    return [float(text == "a") for text in completions]


def trl_keywords(**kwargs):
    assert kwargs["prompts"] == kwargs["prompt"] == ["p", "p"]
    return [float(text == "a") for text in kwargs["completions"]]


def trl_late(answer, completions):
    return another_name(completions, answer)


def trl_chat(completions, prompts, **kwargs):
    assert prompts[0][0]["content"] == "p"
    return [float(completion[0]["content"] == "a") for completion in completions]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def verl_dict(solution_str, ground_truth, **kwargs):
    assert kwargs["data_source"] == "openai/gsm8k" and kwargs["extra_info"]["index"] == 0
    return {"score": float(solution_str == ground_truth), "acc": True}


async def verl_async(data_source, solution_str, ground_truth, extra_info):
    return verl(data_source, solution_str, ground_truth)


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [{"score": verl("", *pair)} for pair in zip(solution_strs, ground_truths, strict=True)]


class Instance:
    def __call__(self, completions, answer, threshold=0.5):
        return another_name(completions, answer)


CALLED = [
    (ours, ROW),
    (another_name, ROW),
    (trl, ROW),
    (trl_without_columns, ROW),
    (trl_keywords, ROW),
    (trl_late, ROW),
    (trl_chat, CHAT),
    (verl, ROW),
    (verl, VERL),
    (verl_dict, VERL),
    (verl_async, VERL),
    (verl_batch, VERL),
    (Instance(), ROW),
    (partial(trl, answer=["a", "a"]), {"prompt": "p"}),
]


@pytest.mark.parametrize(("function", "row"), CALLED)
async def test_a_function_is_called_as_it_expects(make_trajectory, function, row):
    check_columns(reward_functions(function), row, "the rows")
    scored = await RewardRunner(function).score([make_trajectory("a"), make_trajectory("b")], row)
    assert [t.reward for t in scored] == [1.0, 0.0]


def nothing():
    """Takes no completions."""


def only_prompts(prompts):
    """The same."""


def by_position(completions, answer, /):
    """Columns are passed by name."""


def verl_and_more(solution_str, ground_truth, tokenizer):
    """Nobody passes a tokenizer."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (nothing, r"nothing\(\) takes no completions; write it as `def reward\(completions, \*\*columns\)`"),
        (only_prompts, r"only_prompts\(prompts\) takes no completions"),
        (by_position, "takes answer by position only"),
        (verl_and_more, "requires tokenizer, which verl's convention does not pass"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_once(function, message):
    with pytest.raises(ConfigError, match=message):
        reward_functions(function)


@pytest.mark.parametrize(
    ("function", "columns", "missing"),
    [(trl, {"prompt"}, "answer"), (another_name, {"prompt", "solution"}, "answer"), (verl, {"prompt"}, "ground_truth")],
)
def test_a_column_that_no_row_has_is_missed_before_anything_starts(function, columns, missing):
    with pytest.raises(ConfigError, match=f"requires {missing}, but the training data has the columns {min(columns)}"):
        check_columns(reward_functions(function), columns, "the training data")


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ([ours, trl], {"ours": 1.0, "trl": 1.0}),
        ([ours, (trl, 0.5)], {"ours": 1.0, "trl": 0.5}),
        ({ours: 1, "math": 0.5}, {"ours": 1.0, "math_reward": 0.5}),
        ("megasync.integrations.math_verify:math_reward", {"math_reward": 1.0}),
        ("math", {"math_reward": 1.0}),
        ([RewardFunction("a", ours, 2.0)], {"a": 2.0}),
        (partial(ours, unused=1), {"ours": 1.0}),
        (None, {}),
    ],
)
def test_functions_are_given_in_many_forms(given, weights):
    assert {function.name: function.weight for function in reward_functions(given)} == weights


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "names no function"),
        ({}, "names no function"),
        (3, "reward=3 is not a function"),
        ([ours, 3], "reward=3 is not a function"),
        ({ours: "1"}, "the weight of the reward 'ours' is '1', which is no number"),
        ([(ours, True)], "the weight of the reward 'ours' is True"),
        ("no_such_module:reward", "no module 'no_such_module'"),
        ([ours, ours], "2 reward functions have the name 'ours'"),
        *(({ours: w}, "the weight of the reward 'ours'.*penalty") for w in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_other_forms_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        reward_functions(given)


def test_built_in_rewards_have_short_names():
    assert load_reward("math") is math_reward
    assert load_reward("megasync.integrations.math_verify:math_reward") is math_reward


@pytest.mark.processes
def test_a_class_is_instantiated_with_options():
    assert isinstance(load_reward("code", {"partial": True, "wall_seconds": 2.5}), CodeReward)


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("math", {"partial": True}, "'math' is a function, which takes no options"),
        ("code", {"partly": True}, "'code' does not accept its options .*partly"),
        ("code", {"memory_mb": 0}, "memory_mb=0 must be an integer above 0"),
        ("code", {"cpu_seconds": 1.5}, "cpu_seconds=1.5 must be an integer"),
        ("code", {"parallel": 0}, "parallel=0 must be at least 1"),
        ("maths", {}, "'maths' does not name a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_with_its_name(reference, options, message):
    with pytest.raises(ConfigError, match=message):
        load_reward(reference, options)


# Several scores

WEIGHT = st.floats(0.01, 100)
SCORE = st.floats(-100, 100)


@given(st.lists(st.tuples(WEIGHT, SCORE), min_size=1, max_size=5))
def test_all_scores_are_combined_as_a_weighted_sum(pairs):
    weights, scores = zip(*pairs, strict=True)
    assert combine(weights, scores) == sum(w * s for w, s in pairs)


@given(st.lists(st.tuples(WEIGHT, st.booleans()), min_size=1, max_size=5), SCORE)
def test_missing_scores_do_not_change_the_reward_if_all_others_are_equal(pairs, score):
    weights = [weight for weight, _ in pairs]
    reward = combine(weights, [score if present else None for _, present in pairs])
    if not any(present for _, present in pairs):
        assert reward is None
    else:
        assert reward == pytest.approx(score * sum(weights))
