"""The section of the servers and of what is run on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megasync.config.schema.chat import ChatConfig
from megasync.config.schema.environment import EnvironmentConfig
from megasync.config.schema.gateway import GatewayConfig
from megasync.config.schema.health import HealthConfig
from megasync.config.schema.rewards import GroupConfig, RewardConfig
from megasync.config.schema.sampling import SamplingConfig
from megasync.config.schema.tools import ToolsConfig


@dataclass
class RolloutConfig:
    """The SGLang servers, and what is run on them."""

    # SGLang servers at the start; `megasync scale` adds and removes some while the run goes on.
    servers: int = 2
    # The run goes on with fewer servers while others are started again; it ends when fewer than this can be had.
    min_servers: int = 1
    # Tensor-parallel ranks (GPUs) of each server.
    tensor_parallel: int = 1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # `package.module:function`, or null for a single turn, or for the tool agent where `rollout.tools` has functions.
    # The signature is `async def rollout(client, sample)`.
    workflow: str | None = None
    # An agent that talks OpenAI instead, as `package.module:function`: `def agent(base_url, api_key, sample, model)`,
    # sync or async. docs/gateway.md
    agent: str | None = None
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    # `math`, `code`, or `package.module:function`, `f(completions, **columns) -> list[float | None]`; null takes the
    # dataset's verifier. docs/rewards.md
    reward: str | None = None
    # Several reward functions instead, by the names that they have in the metrics.
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    # Worker processes for reward functions that burn CPU; 0 runs them in the controller's process.
    reward_processes: int = 0
    groups: GroupConfig = field(default_factory=GroupConfig)
    environment: EnvironmentConfig | None = None
    # Every request samples from a seed of its own, whatever else is in the batch: runs repeat exactly, at some speed.
    deterministic: bool = False
    # Longest prompt plus response that a server accepts, in tokens; null takes the model's own limit.
    context_length: int | None = None
    # Tokens of KV cache per server; null lets SGLang decide (set it on a CPU).
    max_total_tokens: int | None = None
    # Requests that a server runs at once; null lets SGLang decide (set it on a CPU).
    max_running_requests: int | None = None
    # Share of a device's memory for weights and KV cache.
    mem_fraction: float = 0.8
    # How the router spreads requests: cache_aware, round_robin, random, power_of_two or consistent_hashing.
    router_policy: str = "cache_aware"
    # Tokens after which a running request sends what it has: so much is lost when its server dies. 0 sends all at the
    # end.
    stream_interval: int = 16
    # Seconds between two saves of what running requests hold, to be continued after a restart of the run; 0 never
    # saves.
    save_partials_seconds: float = 30.0
    # Fewer requests at once than the buffer allows while servers run out of KV cache (above this share of it); null
    # leaves it to the buffer.
    kv_pressure: float | None = 0.9
    # Times that a workflow or reward that raises is tried on the same prompt. Failures of servers do not count.
    max_attempts: int = 2
    # Share of the last groups that may be dropped for errors; above it the run ends and sums up why.
    max_drop_share: float = 0.5
    chat: ChatConfig = field(default_factory=ChatConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    # Extra SGLang command line arguments, for example {"--chunked-prefill-size": 4096}.
    server_args: dict[str, Any] = field(default_factory=dict)
