"""Rewards are loaded by a built-in name or by module and function; a refusal names the fix."""

import pytest

from megasync.errors import ConfigError
from megasync.rewards import RewardFunction, load_reward, reward_functions
from megasync.rewards.code_reward import CodeReward
from megasync.rewards.math_reward import math_reward


def test_built_in_rewards_have_short_names():
    assert load_reward("math") is math_reward
    assert load_reward("megasync.rewards.math_reward:math_reward") is math_reward


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


def one(completions, **columns):
    return [1.0] * len(completions)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_must_be_above_zero(weight):
    with pytest.raises(ConfigError, match="the weight of the reward 'one'.*penalty"):
        reward_functions({one: weight})


def test_two_functions_with_the_same_name_are_refused():
    with pytest.raises(ConfigError, match="2 reward functions have the name 'a'"):
        reward_functions([RewardFunction("a", one), RewardFunction("a", math_reward)])
