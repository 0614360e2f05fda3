"""The SGLang servers, and what runs on them: sampling, chat, tools, agents and environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megasync.config.limits import (
    AT_LEAST_ONE,
    ENVIRONMENT,
    FRACTION,
    FUNCTION,
    HOST,
    NOT_NEGATIVE,
    POSITIVE,
    PROCESSES,
    PROPER_FRACTION,
    REWARD,
    Choice,
    Range,
    limited,
)
from megasync.config.schema.rewards import GroupConfig, RewardConfig

# The value of a key that is derived from something else, such as the model.
AUTO = "auto"


@dataclass
class SamplingConfig:
    """Sampling parameters of training rollouts."""

    # Temperature. The trainer computes log-probs at the same temperature.
    temperature: float = limited(1.0, POSITIVE)
    # Sample from the most likely tokens that together have this probability; 1 for all. Below 1 it needs a top_k.
    top_p: float = limited(1.0, FRACTION)
    # Sample from so many of the most likely tokens, up to 4,096; -1 for all. Servers report which tokens top_k, top_p
    # and min_p left, and the trainer scores the same distribution. docs/algorithms.md#truncated-sampling
    top_k: int = -1
    # Sample from tokens with at least this fraction of the most likely one's probability. Above 0 it needs a top_k.
    min_p: float = limited(0.0, Range(0, 1))
    # Maximum response length in tokens.
    max_new_tokens: int = limited(256, AT_LEAST_ONE)
    # Stop strings.
    stop: list[str] = field(default_factory=list)


@dataclass
class ChatConfig:
    """How chat messages become tokens, and responses become messages (docs/workflows.md)."""

    # Variables of the chat template, for example {"enable_thinking": false}: in `client.chat`, and in the prompts of
    # datasets and supervised rows unless data.prompt.template_options says otherwise.
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
    rewritten_turns: str = limited("fork", Choice("fork", "realign"))


@dataclass
class ToolsConfig:
    """Tools of the tool agent: docs/workflows.md."""

    # `package.module:function` of each tool. If there is any, the tool agent is the workflow.
    functions: list[str] = field(default_factory=list)
    # Maximum number of model turns per sample.
    max_turns: int = limited(8, AT_LEAST_ONE)
    # Deadline of one tool call, in seconds.
    timeout: float = limited(60.0, POSITIVE)
    # Maximum length of a tool's output that the model sees, in characters.
    max_output: int = limited(8192, AT_LEAST_ONE)


@dataclass
class GatewayConfig:
    """The OpenAI-compatible endpoint that `rollout.agent` sends its requests to: docs/gateway.md."""

    # Address that agents connect to; auto is this node's own.
    host: str = limited("127.0.0.1", HOST)
    # Port; 0 picks a free one.
    port: int = limited(0, Range(0, 65535))
    # Maximum size of a request body, in MiB.
    body_mb: int = limited(16, AT_LEAST_ONE)
    # Maximum number of sync agents that run concurrently, each in its own thread.
    threads: int = limited(256, AT_LEAST_ONE)
    # Whose temperature, top_p and seed apply: configured (`rollout.sampling`) or request. Training refuses requests
    # with another temperature or top_p than configured; evaluation accepts them.
    sampling: str = limited("configured", Choice("configured", "request"))


@dataclass
class EnvironmentConfig:
    """An environment that the model plays, instead of a workflow (docs/rewards.md#environments); null by default."""

    # reasoning_gym, gymnasium, or `package.module:Class`, instantiated with `options`.
    kind: str = limited(MISSING, ENVIRONMENT)
    # Constructor arguments.
    options: dict[str, Any] = field(default_factory=dict)
    # Maximum number of steps per episode.
    max_turns: int = limited(8, AT_LEAST_ONE)
    # Number of environment instances; they are reused.
    pool: int = limited(16, AT_LEAST_ONE)
    # Where sync environments run: thread (light; a hung one is abandoned) or process (a hung one is killed).
    isolation: str = limited("thread", Choice("thread", "process"))
    # System message before the first observation.
    system: str = ""


@dataclass
class HealthConfig:
    """When a server counts as dead, and what happens then: docs/fleet.md. A dead process is detected at once."""

    # Seconds between two probes of a server's HTTP process.
    probe_seconds: float = limited(2.0, POSITIVE)
    # Deadline of a probe, in seconds.
    probe_timeout: float = limited(20.0, POSITIVE)
    # Failed probes in a row after which the server counts as dead.
    probe_failures: int = limited(3, AT_LEAST_ONE)
    # Seconds between two test requests through a server's scheduler.
    request_seconds: float = limited(10.0, POSITIVE)
    # Deadline of a test request, in seconds. It is answered between two batches, so allow for the longest prefill.
    request_timeout: float = limited(60.0, POSITIVE)
    # Failed test requests in a row after which the server counts as dead.
    request_failures: int = limited(3, AT_LEAST_ONE)
    # Weight syncs in a row that a server may fail before it is restarted instead of synced again.
    sync_failures: int = limited(2, AT_LEAST_ONE)
    # Maximum number of restarts of a server, of the router, or of a rollout worker, within `restart_window`; after that
    # a server or worker is not restarted again.
    restarts: int = limited(5, NOT_NEGATIVE)
    # Length of the window in which `restarts` are counted, in seconds.
    restart_window: float = limited(600.0, POSITIVE)


@dataclass
class RolloutConfig:
    """The SGLang servers, and what runs on them."""

    # Number of SGLang servers at the start; `megasync scale` adds and removes servers during the run.
    servers: int = limited(2, PROCESSES)
    # URLs of servers that somebody else has started for this run alone, instead of servers of its own; `servers` is
    # their number. docs/fleet.md#external-servers
    external: list[str] = field(default_factory=list)
    # Minimum number of available servers. The run continues while other servers restart, and ends below this number.
    min_servers: int = limited(1, AT_LEAST_ONE)
    # Tensor-parallel ranks (GPUs) of each server. With `pipeline_parallel`, those of each stage. More than a node has
    # take whole nodes, and must fill them.
    tensor_parallel: int = limited(1, PROCESSES)
    # Pipeline stages of each server, of `tensor_parallel` ranks each; a stage holds a part of the layers.
    # docs/fleet.md#servers-with-pipeline-stages
    pipeline_parallel: int = limited(1, PROCESSES)
    # Expert-parallel ranks of each server: into how many of its tensor-parallel ranks the experts are distributed; the
    # others share each expert. SGLang computes this on GPUs only.
    expert_parallel: int = limited(1, PROCESSES)
    # Attention groups of each server (SGLang's data-parallel attention): each has a part of its tensor-parallel ranks,
    # whole attention weights, and requests and a KV cache of its own. docs/fleet.md#servers-with-attention-groups
    attention_data_parallel: int = limited(1, PROCESSES)
    # Engines of each server that compute prompts, of `tensor_parallel` ranks each, and hand them over to those that
    # compute responses (prefill/decode disaggregation); 0 of both kinds is one engine that does both.
    # docs/fleet.md#servers-with-prefill-and-decode-engines
    prefill_engines: int = limited(0, NOT_NEGATIVE)
    # Engines of each server that compute responses, if others compute prompts.
    decode_engines: int = limited(0, NOT_NEGATIVE)
    # Serve a model folder in block FP8 as it is stored, and quantize the weights of each sync in the same way; false
    # serves it in model.dtype. docs/weight_sync.md#servers-in-block-fp8
    fp8: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # `package.module:function` with the signature `async def rollout(client, sample)`; null is a single turn, or the
    # tool agent if `rollout.tools` has functions.
    workflow: str | None = limited(None, FUNCTION)
    # Constructor arguments, if `workflow` names a class; its instance is the rollout function.
    workflow_options: dict[str, Any] = field(default_factory=dict)
    # An agent that uses the OpenAI API instead, as `package.module:function`:
    # `def agent(base_url, api_key, sample, model)`, sync or async. docs/gateway.md
    agent: str | None = limited(None, FUNCTION)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    # `math`, `code`, or `package.module:function`, `f(completions, **columns) -> list[float | None]`; null takes the
    # dataset's verifier. docs/rewards.md
    reward: str | None = limited(None, REWARD)
    # Several reward functions instead, by their names in the metrics.
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    # Processes that run workflows, tools, environments and rewards, and each generate a part of the groups; 0 does all
    # of it in the controller's process. docs/workers.md
    workers: int = limited(0, NOT_NEGATIVE)
    # Processes for CPU-bound reward functions, of each rollout worker; 0 runs them in threads beside the workflow.
    reward_processes: int = limited(0, NOT_NEGATIVE)
    groups: GroupConfig = field(default_factory=GroupConfig)
    environment: EnvironmentConfig | None = None
    # Sample every request with a seed of its own, independent of the rest of the batch, which is slower. With
    # schedule.max_staleness=0 runs are repeatable: docs/concepts.md#repeatable-runs
    deterministic: bool = False
    # Servers report the experts of each token, and the trainer sends the token to the same ones (routing replay, R3).
    # docs/algorithms.md#routing-replay
    routing_replay: bool = False
    # Maximum length of prompt plus response that a server accepts, in tokens; null takes the model's own limit.
    context_length: int | None = limited(None, AT_LEAST_ONE)
    # KV cache per server, attention group or engine, in tokens. null leaves it to SGLang; on a CPU it is one GiB, or
    # what one sequence of `context_length` (else of the longest prompt and response) takes.
    max_total_tokens: int | None = limited(None, AT_LEAST_ONE)
    # Maximum number of running requests per server or engine; null leaves it to SGLang (set it on a CPU).
    max_running_requests: int | None = limited(None, AT_LEAST_ONE)
    # Fraction of a device's memory for weights and KV cache.
    mem_fraction: float = limited(0.8, PROPER_FRACTION)
    # How the router balances requests. consistent_hashing and sticky send all requests of a prompt to one server: by a
    # hash, or to the server that has the fewest requests when the first one comes.
    router_policy: str = limited(
        "cache_aware", Choice("cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing", "sticky")
    )
    # Tokens after which a running request streams its output; at most this many are lost when its server dies. 0 sends
    # all output at the end.
    stream_interval: int = limited(16, NOT_NEGATIVE)
    # Seconds between two saves of unfinished responses, which a resumed run continues; 0 never saves.
    save_partials_seconds: float = limited(30.0, NOT_NEGATIVE)
    # Limit concurrent requests below the buffer's capacity while servers use more than this fraction of their KV cache;
    # null turns the limit off.
    kv_pressure: float | None = limited(0.9, FRACTION)
    # Attempts at a prompt whose workflow or reward raises an error. Server failures do not count.
    max_attempts: int = limited(2, AT_LEAST_ONE)
    # Fraction of recent groups that may be dropped for errors; above it the run stops with a summary of the errors.
    max_drop_share: float = limited(0.5, FRACTION)
    chat: ChatConfig = field(default_factory=ChatConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    # Additional SGLang command line arguments, for example {"--chunked-prefill-size": 4096}.
    server_args: dict[str, Any] = field(default_factory=dict)
