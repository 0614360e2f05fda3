"""The section of the OpenAI-compatible gateway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GatewayConfig:
    """Where the requests of `rollout.agent` arrive: docs/gateway.md."""

    # Address that agents reach; auto is this node's own.
    host: str = "127.0.0.1"
    # Port; 0 takes a free one.
    port: int = 0
    # Largest body of a request, in MiB.
    body_mb: int = 16
    # Sync agents that run at once, each on a thread of its own.
    threads: int = 256
    # Whose temperature, top_p and seed hold: configured (`rollout.sampling`) or request. Training refuses requests that
    # ask for another temperature or top_p than the configured; evaluation takes them.
    sampling: str = "configured"
