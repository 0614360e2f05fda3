"""Refuses contradictions in chat, tools, agents, rewards, groups and environments; a part of `check`."""

from __future__ import annotations

import math
import re
from dataclasses import fields

from megasync.config.host import is_wildcard
from megasync.config.limits import FUNCTION, REWARD
from megasync.config.schema import Config, GatewayConfig, GroupConfig, TimeoutConfig, ToolsConfig
from megasync.errors import ConfigError
from megasync.rollout.reply_formats import check_formats


def check_chat(config: Config) -> None:
    """Raises ConfigError for the first contradiction."""
    rollout, prompt = config.rollout, config.data.prompt
    check_formats(rollout.chat)
    tools, defaults = rollout.tools, ToolsConfig()
    if not tools.functions:
        for key in ("max_turns", "timeout", "max_output"):
            if (value := getattr(tools, key)) != getattr(defaults, key):
                raise ConfigError(
                    f"rollout.tools.{key}={value} has no effect without rollout.tools.functions; name the tools there, "
                    f"or leave {key} at {getattr(defaults, key)}"
                )
        return
    for reference in tools.functions:
        if FUNCTION.refusal(reference):
            raise ConfigError(f"rollout.tools.functions contains {reference!r}; write it as {FUNCTION}")
    if rollout.workflow is not None:
        raise ConfigError(
            f"rollout.workflow={rollout.workflow!r} and rollout.tools.functions={list(tools.functions)} both "
            f"define how a sample is played; drop one (your own workflow may call the tools itself)"
        )
    if prompt.format != "chat":
        raise ConfigError(
            f"rollout.tools.functions need chat messages, but data.prompt.format={prompt.format}; set it to chat"
        )
    if rollout.chat.tool_format is None:
        raise ConfigError(
            f"rollout.tools.functions={list(tools.functions)} cannot be called with rollout.chat.tool_format=null; "
            f"set it to auto or to the model's format"
        )


def check_agent(config: Config, own_agent: bool = False) -> None:
    """Raises ConfigError for the first contradiction; `own_agent` as in `check_config`."""
    rollout = config.rollout
    if rollout.agent is None and not own_agent:
        _check_unused(config)
        return
    others = {
        "rollout.workflow": rollout.workflow,
        "rollout.environment.kind": rollout.environment and rollout.environment.kind,
        "rollout.tools.functions": list(rollout.tools.functions),
    }
    for key, value in others.items():
        if value and not own_agent:
            raise ConfigError(
                f"rollout.agent={rollout.agent} and {key}={value} would both play a sample; drop one of them"
            )
    host = rollout.gateway.host
    if is_wildcard(host):
        raise ConfigError(
            f"rollout.gateway.host={host} binds to every interface, but agents need an address to connect to; name "
            f"one, or set auto for this node's own"
        )


def _check_unused(config: Config) -> None:
    gateway, defaults = config.rollout.gateway, GatewayConfig()
    given = {
        f"rollout.gateway.{f.name}": (getattr(gateway, f.name), getattr(defaults, f.name)) for f in fields(gateway)
    }
    given["timeouts.agent"] = (config.timeouts.agent, TimeoutConfig().agent)
    for key, (value, default) in given.items():
        if value != default:
            raise ConfigError(
                f"{key}={value} has no effect without an agent; name one in rollout.agent, or leave {key} at {default}"
            )


def check_rewards(config: Config) -> None:
    """Raises ConfigError for rewards that contradict each other or have invalid names."""
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
                        f"{key}.model={reward.model} and {key}.{option}={value} exclude each other; drop one "
                        f"(reward_models.{reward.model} defines the model's input)"
                    )
        elif refusal := REWARD.refusal(function):
            raise ConfigError(f"{key}.function={function!r} {refusal}")
        if not 0 < reward.weight < math.inf:
            raise ConfigError(
                f"{key}.weight={reward.weight:g} must be above 0; a penalty is a function whose scores are negative"
            )


def check_groups(config: Config) -> None:
    """Raises ConfigError for group rules that have no effect or contradict other keys."""
    groups, defaults = config.rollout.groups, GroupConfig()
    if groups.keep != defaults.keep and not groups.extra_samples:
        raise ConfigError(
            f"rollout.groups.keep={groups.keep} selects among extra responses, but "
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
                f"rollout.groups.{key}={value:g} has no effect with rollout.groups.overlong={groups.overlong}; set "
                f"overlong=punish, or leave {key} at {getattr(defaults, key):g}"
            )


def check_environment(config: Config) -> None:
    """Raises ConfigError if something else would play the sample too, or prompts are not chat messages."""
    rollout = config.rollout
    if rollout.environment is None:
        return
    if rollout.workflow is not None:
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} and rollout.workflow={rollout.workflow} would both "
            f"play a sample; set one of them to null"
        )
    if rollout.tools.functions:
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} and rollout.tools.functions="
            f"{list(rollout.tools.functions)} would both play a sample; drop one of them"
        )
    scored_by = rollout.reward or ", ".join(rollout.rewards)
    if scored_by:
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} returns the rewards itself, so the reward "
            f"{scored_by} would never be called; remove one of them"
        )
    if config.data.prompt.format != "chat":
        raise ConfigError(
            f"rollout.environment.kind={rollout.environment.kind} is played as a chat, but data.prompt.format="
            f"{config.data.prompt.format}; set format=chat"
        )
