"""The advantage estimator and the policy loss that a configuration names, with its options filled in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from megasync.algorithms.advantages.rewards import Floats, TokenRewards
from megasync.algorithms.losses.tokens import Bools, PolicyTokens, StepTokens, TokenLoss
from megasync.base.importing import check_call, load_function
from megasync.concurrency.foreign import guard
from megasync.config.builtin import ADVANTAGES, LOSSES, Algorithm
from megasync.config.schema import AlgorithmConfig

GroupInput = Literal["relative", "scores", "baseline"]


def estimator_of(config: AlgorithmConfig) -> Callable[[Any], Floats]:
    """A function of StepRewards, or of TokenRewards (`takes_tokens`). Raises ConfigError if it cannot be loaded."""
    builtin = ADVANTAGES.get(config.advantage)
    function = load_function(config.advantage if builtin is None else builtin.function)
    return _with_options(config, ADVANTAGES, config.advantage, function, config.advantage_options)


def loss_of(config: AlgorithmConfig) -> Callable[[PolicyTokens], TokenLoss]:
    """Raises ConfigError if the function cannot be loaded."""
    builtin = LOSSES.get(config.loss)
    function = load_function(config.loss if builtin is None else builtin.function)
    options = config.loss_options
    if builtin is not None and builtin.chooses:
        options = _named_by(function, options)
    return _with_options(config, LOSSES, config.loss, function, options)


def chooser_of(config: AlgorithmConfig) -> Callable[[StepTokens], Bools] | None:
    """The function that chooses the tokens of a minibatch that the loss treats apart; None if it has none."""
    if config.loss not in LOSSES or not LOSSES[config.loss].chooses:
        return None
    function = load_function(LOSSES[config.loss].chooses)
    return _with_options(config, LOSSES, config.loss, function, _named_by(function, config.loss_options))


def group_inputs(config: AlgorithmConfig) -> frozenset[GroupInput]:
    """The parts of a group that the estimator reads beside the rewards of each sample by itself.

    "relative": the rewards of other samples, so one of them is not enough. "scores": those of each reward function by
    itself. "baseline": the reward of a greedy response. One of a user's own is taken to read none of them.
    """
    builtin = ADVANTAGES.get(config.advantage)
    if builtin is None or not config.reward_coef:
        return frozenset()
    flags: dict[GroupInput, bool] = {
        "relative": builtin.relative,
        "scores": builtin.scores,
        "baseline": builtin.baseline,
    }
    return frozenset(name for name, read in flags.items() if read)


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
