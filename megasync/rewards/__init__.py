"""Reward functions: scoring the responses to a prompt, combining several scores into one.

`RewardRunner` (runner) calls them and `load_reward` (function) finds one by name. The built-in ones `math` and `code`
are in `integrations.math_verify` and `coding`.
"""

from megasync.rewards.function import RewardFunction, check_columns, load_reward, reward_functions
from megasync.rewards.runner import RewardRunner

__all__ = ["RewardFunction", "RewardRunner", "check_columns", "load_reward", "reward_functions"]
