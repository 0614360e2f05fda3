"""Rewards: functions that score the responses to a prompt, how several become one number, and ready ones.

`RewardRunner` (runner) calls them, `load_reward` (function) finds one by name; `math_reward` and `code_reward` are
ready.
"""

from megasync.rewards.function import RewardFunction, load_reward, reward_functions
from megasync.rewards.runner import RewardRunner

__all__ = ["RewardFunction", "RewardRunner", "load_reward", "reward_functions"]
