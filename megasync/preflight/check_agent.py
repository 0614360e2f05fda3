"""Refuses contradictions around agents and the gateway; a part of `check`, with the same rules for messages."""

from __future__ import annotations

from dataclasses import fields

from megasync.config.host import is_wildcard
from megasync.config.schema import Config, GatewayConfig, TimeoutConfig
from megasync.errors import ConfigError


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
            f"rollout.gateway.host={host} binds to every interface and is no address that agents can reach; name one, or "
            f"set auto for this node's own"
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
                f"{key}={value} does nothing without an agent; name one in rollout.agent, or leave {key} at {default}"
            )
