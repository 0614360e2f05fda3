"""Advantage estimators: pure functions of the rewards of a step, one file each. With a critic, of tokens.

Their names and options are in `config.builtin.ADVANTAGES`; docs/adding_an_algorithm.md shows how to add one.
"""

from megasync.algorithms.advantages.rewards import StepRewards, TokenRewards

__all__ = ["StepRewards", "TokenRewards"]
