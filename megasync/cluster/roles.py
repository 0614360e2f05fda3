"""Which role lives in which pool, and which methods it needs. The one place that maps roles to pools.

The classes themselves do not depend on Ray: a role's actor is its plain class, made remote by `actors`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from megasync.errors import ConfigError
from megasync.rollout.worker_link import RolloutWorker
from megasync.serving.process_watch import ProcessWatch
from megasync.serving.router import Router
from megasync.serving.server import FrozenModelServer, SGLangServer
from megasync.trainer.rank import TrainerRank


@dataclass(frozen=True, slots=True)
class Role:
    """`pool` is None for a role without a device, which may live anywhere, or whose owner names the pool each time."""

    name: str
    pool: str | None
    actor: type
    methods: tuple[str, ...]


ROLES = {
    role.name: role
    for role in (
        # Called by reference, so that a type checker sees the methods.
        Role("trainer", "trainer", TrainerRank, ()),
        Role(
            "server",
            "rollout",
            SGLangServer,
            (
                *("meet", "start", "stop", "process_id", "tail", "visible_devices"),
                *("handover_port", "know_prefill"),
            ),
        ),
        # In the pool of its model, or on the devices of a server of the rollout pool.
        Role("frozen_model", None, FrozenModelServer, ("start", "stop", "process_id", "tail")),
        Role("router", "rollout", Router, ("start", "stop", "process_id", "tail", "metrics_url")),
        Role("rollout_worker", "rollout", RolloutWorker, ("prepare", "clock", "open", "poll", "send")),
        # One on each node that has servers.
        Role("node_agent", None, ProcessWatch, ("ended", "stacks")),
    )
}


def check_capabilities(roles: dict[str, Role] = ROLES) -> None:
    """Raises ConfigError naming role, class and missing methods. Called before anything is launched."""
    for role in roles.values():
        missing = [m for m in role.methods if not inspect.isfunction(getattr(role.actor, m, None))]
        if missing:
            raise ConfigError(
                f"the actor of role {role.name!r}, {role.actor.__qualname__}, has no method {', '.join(missing)}; "
                f"add them, or name another class in megasync/cluster/roles.py"
            )
