"""The checks before a service starts, the configuration of its ranks and servers, and the keys of its tenants."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from pathlib import Path

from megasync.base.missing import require_extra
from megasync.config.access import KEY_BYTES, SHORTEST_KEY
from megasync.config.commands import is_served, is_supervised
from megasync.config.limits import check_limits
from megasync.config.rules import check_rules
from megasync.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    EvalConfig,
    PromptConfig,
    RolloutConfig,
    SamplingConfig,
    ScheduleConfig,
)
from megasync.errors import ConfigError, raised_as
from megasync.preflight.check import check_config, check_port, check_supervised, model_layout
from megasync.trainer.architecture import model_facts

# How keys of tenants begin: clients send no others.
TENANT_PREFIX = "tml-"
# The tenant of a service that has no file of keys.
LOCAL_TENANT = "local"
_TENANT = re.compile(r"[\w.-]{1,64}")
# Keys of the section `rollout` that say what runs on servers, and not which servers there are.
_TASK = ("sampling", "workflow", "workflow_options", "agent", "gateway", "reward", "rewards", "workers")
_TASK += ("reward_processes", "groups", "environment", "tools", "chat")


def served_config(config: Config, context: int) -> Config:
    """The configuration that ranks and servers of a service start with: no data, no algorithm, adapters alone.

    ``context`` is the longest sequence, in tokens. Any of it may be trained.
    """
    task = {name: getattr(RolloutConfig(), name) for name in _TASK}
    task["sampling"] = SamplingConfig(max_new_tokens=context - 1)
    return replace(
        config,
        data=DataConfig(prompt=PromptConfig(max_tokens=1)),
        schedule=ScheduleConfig(),
        algorithm=AlgorithmConfig(),
        critic=CriticConfig(),
        eval=EvalConfig(),
        teachers={},
        reward_models={},
        auxiliary_models={},
        rollout=replace(config.rollout, context_length=context, **task),
        sync=replace(config.sync, transport="adapters"),
    )


def check_service(config: Config, *, planning: bool = False) -> None:
    """Raises ConfigError for a configuration that `megasync serve` cannot start; names the key and the fix.

    With `planning`, `model.config` alone may describe the model, and the service may start on another machine.
    """
    serve = config.serve
    if serve is None:
        raise ConfigError("serve is not set; write `serve: {}` into the configuration for its defaults (docs/serve.md)")
    check_limits(config)
    check_rules(config, within=("serve",))
    if serve.keys is not None and not planning:
        read_tenants(serve.keys)
    check_rules(config, model_facts(model_layout(config, planning=planning)[0]), within=("serve",))
    config = served_config(config, served_context(config, planning=planning))
    check_config(replace(config, serve=None), planning=planning, own_rows=True)
    if planning:
        return
    # Its types and messages are what the service speaks.
    require_extra("serve", "tinker", "the service")
    check_port("serve", serve.host, serve.port)


def served_context(config: Config, *, planning: bool = False) -> int:
    """The longest sequence of a service, in tokens. Raises ConfigError as `model_layout` does."""
    layout, source = model_layout(config, planning=planning)
    limit = config.rollout.context_length or layout.hf_config.get("max_position_embeddings")
    if limit is None:
        raise ConfigError(f"{source} has no max_position_embeddings; set rollout.context_length")
    return limit


def check_as_run(config: Config, *, planning: bool = False) -> None:
    """Raises ConfigError as the command that the configuration is for: `megasync serve`, `sft` or `train`."""
    check = check_service if is_served(config) else check_supervised if is_supervised(config) else check_config
    check(config, planning=planning)


def read_tenants(path: str | Path) -> dict[str, str]:
    """The keys of a service's tenants by their names, from a file with a line `TENANT KEY` each; # begins a comment.

    Raises ConfigError, which names lines and never a key.
    """
    said = f"serve.keys={path}"
    fix = "name a text file with a line `TENANT KEY` each"
    with raised_as(ConfigError, f"{said} cannot be read", fix, of=(OSError, UnicodeDecodeError)):
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{said}, line {number} has {len(words)} words; write a tenant's name and its key")
        tenant, key = words
        if not _TENANT.fullmatch(tenant):
            raise ConfigError(f"{said}, line {number}: a tenant's name has up to 64 letters, digits, '.', '_' and '-'")
        if not key.startswith(TENANT_PREFIX) or len(key) < len(TENANT_PREFIX) + SHORTEST_KEY or not key.isascii():
            raise ConfigError(
                f"{said}, line {number}: the key of {tenant} must be {TENANT_PREFIX} and at least {SHORTEST_KEY} ASCII "
                f"characters; generate one with `echo {TENANT_PREFIX}$(openssl rand -hex 24)`"
            )
        if tenant in keys or key in keys.values():
            raise ConfigError(f"{said}, line {number}: {tenant} or its key stands on an earlier line; name each once")
        keys[tenant] = key
    if not keys:
        raise ConfigError(f"{said} names no tenant; write a line `TENANT KEY` for each")
    return keys


def draw_tenants() -> str:
    """The text of a file of keys with one tenant and a new key."""
    return f"{LOCAL_TENANT} {TENANT_PREFIX}{secrets.token_hex(KEY_BYTES)}\n"
