"""Policy losses: pure functions of the tokens of a microbatch, one file each.

Their names and options are in `config.builtin.LOSSES`; docs/adding_an_algorithm.md shows how to add one.
"""

from megasync.algorithms.losses.tokens import PolicyTokens, StepTokens, TokenLoss

__all__ = ["PolicyTokens", "StepTokens", "TokenLoss"]
