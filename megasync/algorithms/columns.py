"""The per-token columns of a training step: those that each stage makes, and those that it reads.

A column has one value for each target (a trained token) of a microbatch: [targets]. What no stage reads is neither
loaded nor computed, so these sets decide which passes over the model a step makes.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megasync.algorithms.choose import takes_tokens
from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.schema import AlgorithmConfig

# Of trajectories: log-probs of the server and of a teacher (NaN where it has none), the weight version that sampled the
# token, the reward that it was given for itself, and whether it was given one.
Selected = Literal["behaviour", "teacher", "versions", "token_rewards", "rewarded"]
# Before the first optimizer step: log-probs of the policy and of the reference, and the squared norms of the gradients
# of the former by their logits.
Scored = Literal["old", "reference", "norms"]
# `old` less `reference`, the KL penalties that are subtracted from rewards, a critic's values and what it learns, and
# the advantages of tokens.
Estimated = Literal["log_ratios", "penalties", "values", "returns", "token_advantages"]
# The policy's log-probs and entropies, and what the loss knows of its tokens.
Updated = Literal["logprobs", "entropy", "advantages", "teacher_gap", "chosen", "weights", "segments", "ages", "mask"]
Column = Selected | Scored | Estimated | Updated
Columns = dict[Column, Tensor]


def estimate_columns(config: AlgorithmConfig, critic: bool) -> frozenset[Column]:
    """The columns from which advantages are estimated; none if the rewards of samples are enough."""
    builtin = ADVANTAGES.get(config.advantage)
    columns: set[Column] = set()
    if takes_tokens(config, critic):
        columns |= {"token_rewards", "rewarded"}
    if config.kl_coef and config.kl_in == "reward":
        columns |= {"penalties", "old", "reference"}
    if builtin is not None and builtin.norms:
        columns |= {"norms", "old"}
    if builtin is not None and builtin.reference:
        columns |= {"log_ratios", "old", "reference"}
    return frozenset(columns)


def loss_columns(config: AlgorithmConfig) -> frozenset[Column]:
    """The columns that `policy_loss` cannot do without."""
    columns: set[Column] = {"logprobs", "old", "behaviour", "advantages", "mask"}
    if config.kl_coef:
        columns.add("reference")
    if config.entropy_coef:
        columns.add("entropy")
    if config.loss in LOSSES and LOSSES[config.loss].chooses:
        columns.add("chosen")
    return frozenset(columns)


def update_columns(config: AlgorithmConfig, minibatches: int, teachers: bool) -> frozenset[Column]:
    """The columns that optimizer steps read."""
    columns: set[Column] = {*loss_columns(config), "versions"}
    if teachers:
        columns.add("teacher")
    if minibatches == 1:
        # Before a single optimizer step these are the current log-probs, which the loss computes anyway.
        columns.remove("old")
    return frozenset(columns)
