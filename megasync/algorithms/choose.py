"""The advantage estimator and the policy loss that a configuration names, with its options filled in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megasync.algorithms.advantages.rewards import Floats, TokenRewards
from megasync.algorithms.losses.tokens import Bools, PolicyTokens, StepTokens, TokenLoss
from megasync.base.importing import check_call, load_function
from megasync.concurrency.foreign import guard
from megasync.config.builtin import ADVANTAGES, LOSSES, Algorithm
from megasync.config.schema import AlgorithmConfig


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


def needs_two(config: AlgorithmConfig) -> bool:
    """Whether the estimator compares the samples of a group. One of a user's own is taken not to."""
    return bool(config.reward_coef) and config.advantage in ADVANTAGES and ADVANTAGES[config.advantage].relative


def needs_reference(config: AlgorithmConfig) -> bool:
    """Whether a reference policy scores the responses: for a KL penalty, or for the estimator."""
    return bool(config.kl_coef) or compares_with_reference(config)


def compares_with_reference(config: AlgorithmConfig) -> bool:
    """Whether the estimator takes log-ratios to the reference."""
    return config.advantage in ADVANTAGES and ADVANTAGES[config.advantage].reference


def takes_tokens(config: AlgorithmConfig, critic: bool) -> bool:
    """Whether the estimator takes the rewards of tokens and estimates their advantages.

    One of a user's own does if there is a ``critic``, or if its first parameter is annotated as TokenRewards.
    """
    if config.advantage in ADVANTAGES:
        return ADVANTAGES[config.advantage].tokens
    first = next(iter(inspect.signature(load_function(config.advantage)).parameters.values()), None)
    annotation: Any = first and first.annotation
    return critic or str(getattr(annotation, "__name__", annotation)).rpartition(".")[2] == TokenRewards.__name__


def needs_norms(config: AlgorithmConfig) -> bool:
    """Whether the estimator takes the squared norms of the gradients of log-probs by logits."""
    return config.advantage in ADVANTAGES and ADVANTAGES[config.advantage].norms


def takes_scores(config: AlgorithmConfig) -> bool:
    """Whether the estimator compares the scores of each reward function by itself."""
    return bool(config.reward_coef) and config.advantage in ADVANTAGES and ADVANTAGES[config.advantage].scores


def needs_baseline(config: AlgorithmConfig) -> bool:
    """Whether the estimator takes the reward of a greedy response to each prompt."""
    return bool(config.reward_coef) and config.advantage in ADVANTAGES and ADVANTAGES[config.advantage].baseline


def needs_all_tokens(config: AlgorithmConfig) -> bool:
    """Whether responses without an advantage matter to the loss. To one of a user's own they may."""
    return config.loss not in LOSSES or LOSSES[config.loss].whole


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
