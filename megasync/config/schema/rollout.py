"""The SGLang servers, and what runs on them: sampling, chat, tools, agents and environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megasync.config.schema.rewards import GroupConfig, RewardConfig

# The value of a key that is derived from something else, such as the model.
AUTO = "auto"


@dataclass
class SamplingConfig:
    """Sampling parameters of training rollouts."""

    # Temperature. The trainer computes log-probs at the same temperature.
    temperature: float = 1.0
    # Only 1 (all tokens): the trainer scores the full distribution. Evaluation may truncate by `eval.sampling.top_p`.
    top_p: float = 1.0
    # Only -1 (all tokens): the trainer scores the full distribution. Evaluation may truncate by `eval.sampling.top_k`.
    top_k: int = -1
    # Maximum response length in tokens.
    max_new_tokens: int = 256
    # Stop strings.
    stop: list[str] = field(default_factory=list)


@dataclass
class ChatConfig:
    """How chat messages become tokens, and responses become messages (docs/workflows.md)."""

    # Variables of the chat template in `client.chat`, for example {"enable_thinking": false}.
    template_options: dict[str, Any] = field(default_factory=dict)
    # SGLang's parser for the model's tool calls, such as qwen, hermes, llama3 or deepseekv3; auto derives it from the
    # chat template.
    tool_format: str | None = AUTO
    # SGLang's parser for reasoning, such as qwen3 or deepseek-r1; auto derives it from the chat template, null leaves
    # the reasoning in the text.
    reasoning_format: str | None = AUTO
    # What to do if the chat template rewrites earlier turns, for example by dropping their reasoning: fork (the model
    # sees the rewritten history, and a new trajectory begins) or realign (the model still sees what it wrote, in one
    # trajectory).
    rewritten_turns: str = "fork"


@dataclass
class ToolsConfig:
    """Tools of the tool agent: docs/workflows.md."""

    # `package.module:function` of each tool. If there is any, the tool agent is the workflow.
    functions: list[str] = field(default_factory=list)
    # Maximum number of model turns per sample.
    max_turns: int = 8
    # Deadline of one tool call, in seconds.
    timeout: float = 60.0
    # Maximum length of a tool's output that the model sees, in characters.
    max_output: int = 8192


@dataclass
class GatewayConfig:
    """The OpenAI-compatible endpoint that `rollout.agent` sends its requests to: docs/gateway.md."""

    # Address that agents connect to; auto is this node's own.
    host: str = "127.0.0.1"
    # Port; 0 picks a free one.
    port: int = 0
    # Maximum size of a request body, in MiB.
    body_mb: int = 16
    # Maximum number of sync agents that run concurrently, each in its own thread.
    threads: int = 256
    # Whose temperature, top_p and seed apply: configured (`rollout.sampling`) or request. Training refuses requests
    # with another temperature or top_p than configured; evaluation accepts them.
    sampling: str = "configured"


@dataclass
class EnvironmentConfig:
    """An environment that the model plays, instead of a workflow (docs/rewards.md#environments); null by default."""

    # reasoning_gym, gymnasium, or `package.module:Class`, instantiated with `options`.
    kind: str = MISSING
    # Constructor arguments.
    options: dict[str, Any] = field(default_factory=dict)
    # Maximum number of steps per episode.
    max_turns: int = 8
    # Number of environment instances; they are reused.
    pool: int = 16
    # Where sync environments run: thread (light; a hung one is abandoned) or process (a hung one is killed).
    isolation: str = "thread"
    # System message before the first observation.
    system: str = ""


@dataclass
class HealthConfig:
    """When a server counts as dead, and what happens then: docs/fleet.md. A dead process is detected at once."""

    # Seconds between two probes of a server's HTTP process.
    probe_seconds: float = 2.0
    # Deadline of a probe, in seconds.
    probe_timeout: float = 20.0
    # Failed probes in a row after which the server counts as dead.
    probe_failures: int = 3
    # Seconds between two test requests through a server's scheduler.
    request_seconds: float = 10.0
    # Deadline of a test request, in seconds. It is answered between two batches, so allow for the longest prefill.
    request_timeout: float = 60.0
    # Failed test requests in a row after which the server counts as dead.
    request_failures: int = 3
    # Weight syncs in a row that a server may fail before it is restarted instead of synced again.
    sync_failures: int = 2
    # Restarts of a server, and of the router, within any `restart_window`; a server that needs more is given up.
    restarts: int = 5
    # Length of that window in seconds.
    restart_window: float = 600.0


@dataclass
class RolloutConfig:
    """The SGLang servers, and what runs on them."""

    # Number of SGLang servers at the start; `megasync scale` adds and removes servers during the run.
    servers: int = 2
    # The run continues with fewer servers while others restart; it ends if fewer than this remain available.
    min_servers: int = 1
    # Tensor-parallel ranks (GPUs) of each server.
    tensor_parallel: int = 1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # `package.module:function` with the signature `async def rollout(client, sample)`; null is a single turn, or the
    # tool agent if `rollout.tools` has functions.
    workflow: str | None = None
    # An agent that uses the OpenAI API instead, as `package.module:function`:
    # `def agent(base_url, api_key, sample, model)`, sync or async. docs/gateway.md
    agent: str | None = None
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    # `math`, `code`, or `package.module:function`, `f(completions, **columns) -> list[float | None]`; null takes the
    # dataset's verifier. docs/rewards.md
    reward: str | None = None
    # Several reward functions instead, by their names in the metrics.
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    # Worker processes for CPU-bound reward functions; 0 runs them in the controller's process.
    reward_processes: int = 0
    groups: GroupConfig = field(default_factory=GroupConfig)
    environment: EnvironmentConfig | None = None
    # Sample every request with a seed of its own, independent of the rest of the batch: runs are exactly reproducible,
    # but slower.
    deterministic: bool = False
    # Maximum length of prompt plus response that a server accepts, in tokens; null takes the model's own limit.
    context_length: int | None = None
    # KV cache per server in tokens; null leaves it to SGLang (set it on a CPU).
    max_total_tokens: int | None = None
    # Maximum number of running requests per server; null leaves it to SGLang (set it on a CPU).
    max_running_requests: int | None = None
    # Fraction of a device's memory for weights and KV cache.
    mem_fraction: float = 0.8
    # How the router balances requests: cache_aware, round_robin, random, power_of_two or consistent_hashing.
    router_policy: str = "cache_aware"
    # Tokens after which a running request streams its output; at most this many are lost when its server dies. 0 sends
    # all output at the end.
    stream_interval: int = 16
    # Seconds between two saves of unfinished responses, which a resumed run continues; 0 never saves.
    save_partials_seconds: float = 30.0
    # Limit concurrent requests below the buffer's capacity while servers use more than this fraction of their KV cache;
    # null turns the limit off.
    kv_pressure: float | None = 0.9
    # Attempts at a prompt whose workflow or reward raises an error. Server failures do not count.
    max_attempts: int = 2
    # Fraction of recent groups that may be dropped for errors; above it the run stops with a summary of the errors.
    max_drop_share: float = 0.5
    chat: ChatConfig = field(default_factory=ChatConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    # Additional SGLang command line arguments, for example {"--chunked-prefill-size": 4096}.
    server_args: dict[str, Any] = field(default_factory=dict)
