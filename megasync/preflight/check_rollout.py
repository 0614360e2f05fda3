"""Refuses contradictions in chat, tools, agents, rewards, groups and environments; a part of `check`."""

from __future__ import annotations

import math
import re
from dataclasses import fields

from megasync.config.host import is_wildcard
from megasync.config.limits import FUNCTION, REWARD, refuse_unused
from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.rollout.reply_formats import check_formats

LAST_PORT = 65535


def check_chat(config: Config) -> None:
    """Raises ConfigError for the first contradiction."""
    rollout, prompt = config.rollout, config.data.prompt
    check_formats(rollout.chat)
    if rollout.workflow is None:
        refuse_unused(rollout, "rollout", ("workflow_options",), "without rollout.workflow; name the class there")
    tools = rollout.tools
    if not tools.functions:
        reason = "without rollout.tools.functions; name the tools there"
        refuse_unused(tools, "rollout.tools", ("max_turns", "timeout", "max_output"), reason)
        return
    for reference in tools.functions:
        if FUNCTION.refusal(reference):
            raise ConfigError(f"rollout.tools.functions contains {reference!r}; write it as {FUNCTION}")
    if rollout.workflow is not None:
        raise ConfigError(
            f"rollout.workflow={rollout.workflow!r} and rollout.tools.functions={list(tools.functions)} both "
            f"generate the samples; remove one (your own workflow may call the tools itself)"
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
        reason = "without an agent; name one in rollout.agent"
        refuse_unused(rollout.gateway, "rollout.gateway", [item.name for item in fields(rollout.gateway)], reason)
        refuse_unused(config.timeouts, "timeouts", ["agent"], reason)
        return
    others = {
        "rollout.workflow": rollout.workflow,
        "rollout.environment.kind": rollout.environment and rollout.environment.kind,
        "rollout.tools.functions": list(rollout.tools.functions),
    }
    for key, value in others.items():
        if value and not own_agent:
            raise ConfigError(
                f"rollout.agent={rollout.agent} and {key}={value} would both generate the samples; remove one of them"
            )
    host = rollout.gateway.host
    if is_wildcard(host):
        raise ConfigError(
            f"rollout.gateway.host={host} binds to every interface, but agents need an address to connect to; name "
            f"one, or set auto for this node's own"
        )
    port, workers = rollout.gateway.port, rollout.workers
    if port and port + workers - 1 > LAST_PORT:
        raise ConfigError(
            f"rollout.gateway.port={port} gives each of rollout.workers={workers} a port of its own, the last of them "
            f"{port + workers - 1}; set it to at most {LAST_PORT - workers + 1}, or to 0 for free ones"
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
    groups = config.rollout.groups
    if not groups.extra_samples:
        refuse_unused(groups, "rollout.groups", ["keep"], "with rollout.groups.extra_samples=0; raise that")
    if groups.extra_samples and groups.keep == "first" and config.rollout.deterministic:
        raise ConfigError(
            f"rollout.deterministic=true makes runs reproducible, but which responses finish first "
            f"(rollout.groups.extra_samples={groups.extra_samples}, keep=first) depends on timing; set keep=spread"
        )
    if groups.drop_uniform and config.schedule.samples_per_group == 1:
        raise ConfigError(
            "rollout.groups.drop_uniform=true compares the rewards of a prompt's samples, but "
            "schedule.samples_per_group=1; set drop_uniform=false"
        )
    longest = config.rollout.sampling.max_new_tokens
    if groups.overlong == "punish":
        if not 1 <= groups.overlong_tokens <= longest:
            raise ConfigError(
                f"rollout.groups.overlong=punish needs rollout.groups.overlong_tokens from 1 to "
                f"rollout.sampling.max_new_tokens={longest}, got {groups.overlong_tokens}"
            )
        return
    reason = f"with rollout.groups.overlong={groups.overlong}; set overlong=punish"
    refuse_unused(groups, "rollout.groups", ("overlong_tokens", "overlong_penalty"), reason)


def check_environment(config: Config) -> None:
    """Raises ConfigError if something else would generate the samples too, or prompts are not chat messages."""
    rollout = config.rollout
    if rollout.environment is None:
        return
    kind = rollout.environment.kind
    for key, value in (("workflow", rollout.workflow), ("tools.functions", list(rollout.tools.functions))):
        if value:
            raise ConfigError(
                f"rollout.environment.kind={kind} and rollout.{key}={value} would both generate the samples; remove "
                f"one of them"
            )
    scored_by = rollout.reward or ", ".join(rollout.rewards)
    if scored_by:
        raise ConfigError(
            f"rollout.environment.kind={kind} returns the rewards itself, so the reward {scored_by} would never be "
            f"called; remove one of them"
        )
    if config.data.prompt.format != "chat":
        raise ConfigError(
            f"rollout.environment.kind={kind} needs chat messages, but data.prompt.format={config.data.prompt.format}; "
            f"set format=chat"
        )
