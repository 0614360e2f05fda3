"""Reward functions: scoring the responses to a prompt, combining several scores into one, and built-in functions.

`RewardRunner` (runner) calls them and `load_reward` (function) finds one by name. `math_reward` and `code_reward` are
built in.
"""

from megasync.rewards.function import RewardFunction, check_columns, load_reward, reward_functions
from megasync.rewards.runner import RewardRunner

__all__ = ["RewardFunction", "RewardRunner", "check_columns", "load_reward", "reward_functions"]
