"""The algorithm of a configuration: the estimator and the loss, their options, and the columns they read.

A column has one value for each target (a trained token) of a microbatch: [targets]. What no stage of a step reads is
neither loaded nor computed, so these sets decide which passes over the model a step makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from megasync.algorithms import advantages
from megasync.algorithms.advantages import Floats, TokenRewards
from megasync.base.importing import check_call, load_function
from megasync.concurrency.foreign import guard
from megasync.config.builtin import ADVANTAGES, LOSSES, Algorithm
from megasync.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    # With torch, which a plan does not need.
    from torch import Tensor

    from megasync.algorithms.losses import Bools, PolicyTokens, StepTokens, TokenLoss

GroupInput = Literal["relative", "scores", "baseline"]


def estimator_of(config: AlgorithmConfig) -> Callable[[Any], Floats]:
    """A function of StepRewards, or of TokenRewards (`takes_tokens`). Raises ConfigError if it cannot be loaded."""
    name = config.advantage
    function = getattr(advantages, name) if name in ADVANTAGES else load_function(name)
    return _with_options(config, ADVANTAGES, name, function, config.advantage_options)


def loss_of(config: AlgorithmConfig) -> Callable[[PolicyTokens], TokenLoss]:
    """Raises ConfigError if the function cannot be loaded."""
    name, options = config.loss, config.loss_options
    if name not in LOSSES:
        return _with_options(config, LOSSES, name, load_function(name), options)
    function = _builtin_loss(name)
    return _with_options(config, LOSSES, name, function, _named_by(function, options))


def chooser_of(config: AlgorithmConfig) -> Callable[[StepTokens], Bools] | None:
    """The function that chooses the tokens of a minibatch that the loss treats apart; None if it has none."""
    if config.loss not in LOSSES or not LOSSES[config.loss].chooses:
        return None
    function = _builtin_loss(config.loss, "_tokens")
    return _with_options(config, LOSSES, config.loss, function, _named_by(function, config.loss_options))


def _builtin_loss(name: str, suffix: str = "") -> Callable[..., Any]:
    """Imports a loss, or what chooses its tokens, when it is asked for: it needs torch."""
    module = "covariance" if LOSSES[name].chooses else "losses"
    return load_function(f"megasync.algorithms.{module}:{name}{suffix}")


def group_inputs(config: AlgorithmConfig) -> frozenset[GroupInput]:
    """The parts of a group that the estimator reads beside the rewards of each sample by itself.

    "relative": the rewards of other samples, so one of them is not enough. "scores": those of each reward function by
    itself. "baseline": the reward of a greedy response. One of a user's own is taken to read none of them.
    """
    builtin = ADVANTAGES.get(config.advantage)
    if builtin is None or not config.reward_coef:
        return frozenset()
    return frozenset(name for name in get_args(GroupInput) if getattr(builtin, name))


def takes_tokens(config: AlgorithmConfig, critic: bool) -> bool:
    """Whether the estimator takes the rewards of tokens and estimates their advantages.

    One of a user's own does if there is a ``critic``, or if its first parameter is annotated as TokenRewards.
    """
    if config.advantage in ADVANTAGES:
        return ADVANTAGES[config.advantage].tokens
    first = next(iter(inspect.signature(load_function(config.advantage)).parameters.values()), None)
    annotation: Any = first and first.annotation
    return critic or str(getattr(annotation, "__name__", annotation)).rpartition(".")[2] == TokenRewards.__name__


def ignores_zeros(config: AlgorithmConfig) -> bool:
    """Whether a response without an advantage has no gradient in the loss. In one of a user's own it may have one."""
    return config.loss in LOSSES and not LOSSES[config.loss].whole


def _with_options(
    config: AlgorithmConfig,
    builtin: Mapping[str, Algorithm],
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    shared = {key for item in builtin.values() for key in item.keys}
    wanted = [key for key in inspect.signature(function).parameters if key in shared]
    chosen = partial(function, **{key: getattr(config, key) for key in wanted}, **options)
    if name in builtin:
        return chosen
    check_call(chosen, f"{name!r} must take one argument beside its options {sorted(options)}", object())
    return guard(chosen, f"the function {name!r}")


def _named_by(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the function takes: a loss and the function that chooses its tokens share them."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


# Columns

# Of trajectories: log-probs of the server and of a teacher (NaN where it has none), the versions since the token was
# sampled, the reward that it was given for itself, and whether it was given one.
Selected = Literal["behaviour", "teacher", "ages", "token_rewards", "rewarded"]
# Before the first optimizer step: log-probs of the policy and of the reference, and the squared norms of the gradients
# of the former by their logits.
Scored = Literal["old", "reference", "norms"]
# `old` less `reference`, the KL penalties that are subtracted from rewards, a critic's values and what it learns, and
# the advantages of tokens.
Estimated = Literal["log_ratios", "penalties", "values", "returns", "token_advantages"]
# The policy's log-probs and entropies, and what the loss knows of its tokens.
Updated = Literal["logprobs", "entropy", "advantages", "teacher_gap", "chosen", "weights", "segments", "mask"]
Column = Selected | Scored | Estimated | Updated
Columns = dict[Column, "Tensor"]


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
    columns: set[Column] = {*loss_columns(config), "ages"}
    if teachers:
        columns.add("teacher")
    if minibatches == 1:
        # Before a single optimizer step these are the current log-probs, which the loss computes anyway.
        columns.remove("old")
    return frozenset(columns)
