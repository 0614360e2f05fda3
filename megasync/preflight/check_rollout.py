"""Refuses contradictions among rewards, groups and environments; a part of `check`, with the same rules for messages."""

from __future__ import annotations

import math
import re

from megasync.config.limits import REWARD
from megasync.config.schema import Config, GroupConfig
from megasync.errors import ConfigError


def check_rewards(config: Config) -> None:
    """Raises ConfigError for rewards that contradict each other or cannot be named."""
    rollout = config.rollout
    if rollout.reward is not None and rollout.rewards:
        raise ConfigError(
            f"rollout.reward={rollout.reward} and rollout.rewards ({', '.join(rollout.rewards)}) exclude each other; "
            f"move the first into rollout.rewards, or set it to null"
        )
    for name, reward in rollout.rewards.items():
        key, function = f"rollout.rewards.{name}", reward.function or name
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"{key}: a reward's name in the metrics may have letters, digits, '_' and '-' only")
        if reward.model is not None:
            for option, value in (("function", reward.function), ("options", dict(reward.options))):
                if value:
                    raise ConfigError(
                        f"{key}.model={reward.model} and {key}.{option}={value} exclude each other; drop one (what a reward "
                        f"model is asked stands in reward_models.{reward.model})"
                    )
        elif not REWARD.fullmatch(function):
            raise ConfigError(f"{key}.function={function!r} must be math, code or package.module:function")
        if not 0 < reward.weight < math.inf:
            raise ConfigError(
                f"{key}.weight={reward.weight:g} must be above 0; a penalty is a function whose scores are negative"
            )


def check_groups(config: Config) -> None:
    """Raises ConfigError for group rules that do nothing, or contradict the rest."""
    groups, defaults = config.rollout.groups, GroupConfig()
    if groups.keep != defaults.keep and not groups.extra_samples:
        raise ConfigError(
            f"rollout.groups.keep={groups.keep} chooses among more responses than a group needs, but "
            f"rollout.groups.extra_samples=0; raise it, or leave keep at {defaults.keep}"
        )
    if groups.extra_samples and groups.keep == "first" and config.rollout.deterministic:
        raise ConfigError(
            f"rollout.deterministic=true repeats runs exactly, but which of the responses end first "
            f"(rollout.groups.extra_samples={groups.extra_samples}, keep=first) depends on the clock; set keep=spread"
        )
    longest = config.rollout.sampling.max_new_tokens
    if groups.overlong == "punish":
        if not 1 <= groups.overlong_tokens <= longest:
            raise ConfigError(
                f"rollout.groups.overlong=punish needs rollout.groups.overlong_tokens from 1 to "
                f"rollout.sampling.max_new_tokens={longest}, got {groups.overlong_tokens}"
            )
        return
    for key in ("overlong_tokens", "overlong_penalty"):
        if (value := getattr(groups, key)) != getattr(defaults, key):
            raise ConfigError(
                f"rollout.groups.{key}={value:g} does nothing with rollout.groups.overlong={groups.overlong}; set "
                f"overlong=punish, or leave {key} at {getattr(defaults, key):g}"
            )


def check_environment(config: Config) -> None:
    """Raises ConfigError when two things would play a sample, or a chat cannot be had."""
    rollout = config.rollout
    if rollout.environment is None:
        return
    if rollout.workflow is not None:
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} and rollout.workflow={rollout.workflow} would both play "
            f"a sample; set one of them to null"
        )
    if rollout.tools.functions:
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} and rollout.tools.functions="
            f"{list(rollout.tools.functions)} would both play a sample; drop one of them"
        )
    scored_by = rollout.reward or ", ".join(rollout.rewards)
    if scored_by:
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} gives the rewards, so the reward {scored_by} would never "
            f"be asked; remove one of them"
        )
    if config.data.prompt.format != "chat":
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} is played as a chat, but data.prompt.format="
            f"{config.data.prompt.format}; set format=chat"
        )
