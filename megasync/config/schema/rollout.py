"""The SGLang servers, and what runs on them: sampling, chat, tools, agents and environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING

from megasync.config.host import is_loopback
from megasync.config.limits import (
    AGENT,
    AT_LEAST_ONE,
    ENVIRONMENT,
    FRACTION,
    FUNCTION,
    FUNCTIONS,
    HOST,
    NAMES,
    NOT_NEGATIVE,
    POSITIVE,
    PROCESSES,
    PROPER_FRACTION,
    REWARD,
    SERVER_URLS,
    STOPS,
    TOP_K,
    Choice,
    Range,
)
from megasync.config.rules import (
    GPU,
    SET,
    Condition,
    above,
    as_many_as,
    at_least,
    at_most,
    between,
    divides,
    excludes,
    key,
    needs,
    none_of,
    one_of,
    section,
    unused_without,
    when,
)
from megasync.config.schema.evaluation import SEEDED
from megasync.config.schema.rewards import GroupConfig, RewardConfig
from megasync.config.server_args import FLOAT32_HEAD, ROLLOUT_FLAGS, serves_float32_head
from megasync.trajectory import MAX_SUPPORT

# The value of a key that is derived from something else, such as the model.
AUTO = "auto"

_DISTRIBUTION = (
    "finished groups and partial responses were sampled from the distribution that it determines, and are still to be "
    "trained; export the newest checkpoint and start a new run from that"
)
_GENERATES = "both would generate the samples"
_HEADS = "if servers or the trainer alone compute logits in float32, every log-prob has a gap"
_FLOAT32_HEADS = Condition(serves_float32_head, f"with {FLOAT32_HEAD}")
_OTHER_HEADS = Condition(
    lambda value: not serves_float32_head(value), f"without {FLOAT32_HEAD}", opposite={FLOAT32_HEAD: True}
)
_SERVED_BF16 = {"model.dtype": "bfloat16", ".external": one_of([])}
_UNTESTED = "the two have not been tested together"
_FAR = "servers of other machines cannot reach the trainer ranks at a loopback address"
_LONGEST = "data.prompt.max_tokens + rollout.sampling.max_new_tokens"
_SUPPORT = "servers report which tokens could be sampled, at most that many; evaluation may truncate in any way"
# Rules of keys that sample from a part of the vocabulary.
TRUNCATED = (
    excludes("teachers", because="they score all of the vocabulary, so log-probs could not be compared"),
    excludes(
        "rollout.server_args --speculative-",
        because="servers with speculative decoding do not report the support of each token for every sampler",
    ),
)
# The model types whose servers are tested with several attention groups, with pipeline stages, and with both kinds of
# engines. With a tied embedding, the last pipeline stage of those in `UNTIED` would have no head.
GROUPED = ("deepseek_v3", "glm4_moe", "qwen3", "qwen3_moe")
PIPELINED = (
    *("deepseek_v3", "glm4", "glm4_moe", "gpt_oss", "kimi_k2", "llama", "minimax_m2", "mistral"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
UNTIED = ("glm4", "llama", "mistral")
HANDED_OVER = ("deepseek_v3", "glm4_moe", "llama", "qwen2", "qwen3", "qwen3_moe")
# Rules of servers with prefill and decode engines.
OF_TWO_ENGINES = (
    needs("model's type", one_of(*HANDED_OVER), because=_UNTESTED),
    needs(
        "sync.pause_mode",
        "abort",
        because="prompts on the way between two engines would keep the cache of the weights before",
    ),
    excludes("rollout.external", because=_UNTESTED),
    needs("sync.transport", none_of("broadcast", "adapters", instead="auto"), because=_UNTESTED),
    *(
        excludes(f"rollout.{name}", because=_UNTESTED)
        for name in ("routing_replay", "sampling.top_k", "deterministic", "fp8", "expert_parallel")
    ),
    *(excludes(f"rollout.{name}", because=_UNTESTED) for name in ("pipeline_parallel", "attention_data_parallel")),
    *(excludes(name, because=_UNTESTED) for name in ("cluster.share_device", "cluster.colocate")),
    excludes("run's models on rollout servers", because=_UNTESTED),
    *when(SET, at_most("cluster.devices_per_node", left="rollout.tensor_parallel", because="an engine is on one node")),
)


def _hosts(urls: list[str]) -> list[str]:
    return [urlsplit(url).hostname or "" for url in urls]


@dataclass
class SamplingConfig:
    """Sampling parameters of training rollouts."""

    # Temperature. The trainer computes log-probs at the same temperature.
    temperature: float = key(1.0, POSITIVE, fixed=_DISTRIBUTION)
    # Sample from the most likely tokens that together have this probability; 1 for all. Below 1 it needs a top_k.
    top_p: float = key(
        1.0, FRACTION, needs(".top_k", between(2, MAX_SUPPORT), because=_SUPPORT), *TRUNCATED, fixed=_DISTRIBUTION
    )
    # Sample from so many of the most likely tokens, up to 4,096; -1 for all. Servers report which tokens top_k, top_p
    # and min_p left, and the trainer scores the same distribution. docs/sampling.md#truncated-sampling
    top_k: int = key(-1, TOP_K, *TRUNCATED, fixed=_DISTRIBUTION)
    # Sample from tokens with at least this fraction of the most likely one's probability. Above 0 it needs a top_k.
    min_p: float = key(
        0.0,
        Range(0, 1),
        needs(".top_k", between(2, MAX_SUPPORT), because=_SUPPORT),
        SEEDED,
        *TRUNCATED,
        fixed=_DISTRIBUTION,
    )
    # Maximum response length in tokens.
    max_new_tokens: int = key(
        256,
        AT_LEAST_ONE,
        at_most(
            "trainer.tokens_per_microbatch * trainer.context_parallel",
            because="trainer.pad_microbatches=true pads to that",
            left="data.prompt.max_tokens + .max_new_tokens",
            where={"trainer.pad_microbatches": True},
        ),
        at_most("model's max_position_embeddings", left="data.prompt.max_tokens + .max_new_tokens"),
    )
    # Stop strings.
    stop: list[str] = key(list, STOPS)


@dataclass
class ChatConfig:
    """How chat messages become tokens, and responses become messages (docs/workflows.md)."""

    # Variables of the chat template, for example {"enable_thinking": false}: in `client.chat`, and in the prompts of
    # datasets and supervised rows unless data.prompt.template_options says otherwise.
    template_options: dict[str, Any] = key(dict)
    # SGLang's parser for the model's tool calls, such as qwen, hermes, llama3 or deepseekv3; auto derives it from the
    # chat template.
    tool_format: str | None = AUTO
    # SGLang's parser for reasoning, such as qwen3 or deepseek-r1; auto derives it from the chat template, null leaves
    # the reasoning in the text.
    reasoning_format: str | None = AUTO
    # What to do if the chat template rewrites earlier turns, for example by dropping their reasoning: fork (the model
    # sees the rewritten history, and a new trajectory begins) or realign (the model still sees what it wrote, in one
    # trajectory).
    rewritten_turns: str = key("fork", Choice("fork", "realign"))


_OF_TOOL_AGENT = (
    excludes("rollout.workflow", because=_GENERATES),
    needs("data.prompt.format", "chat"),
    needs("rollout.chat.tool_format", none_of(None, instead=AUTO), because="no call could be read"),
)


@dataclass
class McpConfig:
    """A server of the Model Context Protocol, under a name of its own: docs/workflows.md#mcp-servers."""

    # Program and arguments of a server that is started here and speaks over its standard input and output.
    command: list[str] = key(list, excludes(".url", because="a server has one of them"))
    # URL of a server that runs already and speaks streamable HTTP, such as http://host:8000/mcp.
    url: str | None = None
    # Variables of the command's environment, beside the few that it gets of this one (PATH, HOME, USER, ...).
    environment: dict[str, str] = key(dict, unused_without(".command"))
    # Headers of each request to the URL, for example {Authorization: "Bearer ${oc.env:TOKEN}"}.
    headers: dict[str, str] = key(dict, unused_without(".url"))
    # Names of the tools to offer; empty offers all.
    tools: list[str] = key(list)
    # Text before the tools' names, where two servers have one of the same name.
    prefix: str = ""
    # One server, or connection, for all samples of a rollout worker; false gives each sample its own, whose state no
    # other sample sees.
    shared: bool = False
    # Maximum number of servers, or connections, of a rollout worker; further samples wait.
    pool: int = key(64, AT_LEAST_ONE, unused_without(".shared", False))


# Where no MCP server has tools either.
_NO_MCP = {".mcp": one_of({})}


@dataclass
class ToolsConfig:
    """Tools of the tool agent: docs/workflows.md."""

    # `package.module:function` of each tool. If there is any, or an MCP server, the tool agent is the workflow.
    functions: list[str] = key(list, FUNCTIONS, *_OF_TOOL_AGENT)
    # MCP servers by name, whose tools are offered too.
    mcp: dict[str, McpConfig] = key(dict, NAMES, *_OF_TOOL_AGENT)
    # Maximum number of model turns per sample.
    max_turns: int = key(8, AT_LEAST_ONE, unused_without(".functions", where=_NO_MCP))
    # Deadline of one tool call, in seconds.
    timeout: float = key(60.0, POSITIVE, unused_without(".functions", where=_NO_MCP))
    # Maximum length of a tool's output that the model sees, in characters.
    max_output: int = key(8192, AT_LEAST_ONE, unused_without(".functions", where=_NO_MCP))


@dataclass
class GatewayConfig:
    """The endpoints of OpenAI's and Anthropic's APIs that `rollout.agent` uses: docs/gateway.md."""

    # Address that agents connect to; auto is this node's own.
    host: str = key("127.0.0.1", HOST)
    # Port; 0 picks a free one.
    port: int = key(
        0,
        Range(0, 65535),
        *when(
            SET,
            at_most("65536", left=".port + rollout.workers", because="each rollout worker takes the next port"),
        ),
    )
    # Maximum size of a request body, in MiB.
    body_mb: int = key(16, AT_LEAST_ONE)
    # Maximum number of sync agents that run concurrently, each in its own thread.
    threads: int = key(256, AT_LEAST_ONE)
    # Whose temperature, top_p and seed apply: configured (`rollout.sampling`) or request. Training refuses requests
    # with another temperature or top_p than configured; evaluation accepts them.
    sampling: str = key("configured", Choice("configured", "request"))


@dataclass
class EnvironmentConfig:
    """An environment that the model plays, instead of a workflow (docs/environments.md); null by default."""

    # reasoning_gym, gymnasium, harbor, openenv, verifiers, or `package.module:Class`, instantiated with `options`.
    kind: str = key(
        MISSING,
        ENVIRONMENT,
        excludes("rollout.workflow", because=_GENERATES),
        excludes("rollout.tools.functions", because=_GENERATES),
        excludes("rollout.tools.mcp", because=_GENERATES),
        excludes("rollout.reward", because="an environment returns the rewards itself"),
        excludes("rollout.rewards", because="an environment returns the rewards itself"),
        needs("data.prompt.format", "chat"),
        when(
            "verifiers",
            needs("rollout.at_deadline", "leave_out", because="its server plays and scores whole episodes"),
        ),
    )
    # Constructor arguments.
    options: dict[str, Any] = key(dict)
    # Maximum number of steps per episode.
    max_turns: int = key(8, AT_LEAST_ONE)
    # Number of environment instances; they are reused.
    pool: int = key(16, AT_LEAST_ONE)
    # Where sync environments run: thread (light; a hung one is abandoned) or process (a hung one is killed).
    isolation: str = key("thread", Choice("thread", "process"))
    # System message before the first observation.
    system: str = ""


@dataclass
class HealthConfig:
    """When a server counts as dead, and what happens then: docs/fleet.md. A dead process is detected at once."""

    # Seconds between two probes of a server's HTTP process.
    probe_seconds: float = key(2.0, POSITIVE)
    # Deadline of a probe, in seconds.
    probe_timeout: float = key(20.0, POSITIVE)
    # Failed probes in a row after which the server counts as dead.
    probe_failures: int = key(3, AT_LEAST_ONE)
    # Seconds between two test requests through a server's scheduler.
    request_seconds: float = key(10.0, POSITIVE)
    # Deadline of a test request, in seconds. It is answered between two batches, so allow for the longest prefill.
    request_timeout: float = key(60.0, POSITIVE)
    # Failed test requests in a row after which the server counts as dead.
    request_failures: int = key(3, AT_LEAST_ONE)
    # Weight syncs in a row that a server may fail before it is restarted instead of synced again.
    sync_failures: int = key(2, AT_LEAST_ONE)
    # Maximum number of restarts of a server, of the router, or of a rollout worker, within `restart_window`; after that
    # a server or worker is not restarted again.
    restarts: int = key(5, NOT_NEGATIVE)
    # Length of the window in which `restarts` are counted, in seconds.
    restart_window: float = key(600.0, POSITIVE)


@dataclass
class RolloutConfig:
    """The SGLang servers, and what runs on them."""

    # Number of SGLang servers at the start; `megasync scale` adds and removes servers during the run.
    servers: int = key(2, PROCESSES)
    # URLs of servers that somebody else has started for this run alone, instead of servers of its own; `servers` is
    # their number. docs/servers.md#external-servers
    external: list[str] = key(
        list,
        SERVER_URLS,
        as_many_as(".servers"),
        when(
            Condition(lambda urls: not all(map(is_loopback, _hosts(urls))), " of other machines", opposite=[]),
            needs("cluster.host", Condition(lambda host: not is_loopback(host), " of a network", "auto"), because=_FAR),
        ),
        excludes("model's attention in chunks", because="others do not serve it by megasync's class"),
    )
    # Minimum number of available servers. The run continues while other servers restart, and ends below this number.
    min_servers: int = key(1, AT_LEAST_ONE, at_most(".servers", because="the run could never start"))
    # Tensor-parallel ranks (GPUs) of each server. With `pipeline_parallel`, those of each stage. More than a node has
    # take whole nodes, and must fill them.
    tensor_parallel: int = key(1, PROCESSES)
    # Pipeline stages of each server, of `tensor_parallel` ranks each; a stage holds a part of the layers.
    # docs/servers.md#servers-with-pipeline-stages
    pipeline_parallel: int = key(
        1,
        PROCESSES,
        excludes(".external", because="those servers run already"),
        at_most("model's layers"),
        needs(
            "model's pipeline in SGLang", because="SGLang's, as far as tested; raise rollout.tensor_parallel instead"
        ),
        needs(
            "sync.transport",
            none_of("broadcast", "adapters", instead="auto"),
            because="SGLang takes those on one pipeline stage only",
        ),
        excludes(".routing_replay", because="SGLang reports the routes of the first pipeline stage only"),
        excludes(
            "cluster.colocate",
            because="a server reports that its memory is free when that of its first pipeline stage is",
        ),
    )
    # Expert-parallel ranks of each server: into how many of its tensor-parallel ranks the experts are distributed; the
    # others share each expert. SGLang computes this on GPUs only.
    expert_parallel: int = key(
        1,
        PROCESSES,
        *when(
            above(1),
            needs("model's experts"),
            divides(".tensor_parallel"),
            divides("model's experts"),
            needs("cluster.device", GPU, because="SGLang computes distributed experts on no CPU"),
        ),
    )
    # Attention groups of each server (SGLang's data-parallel attention): each has a part of its tensor-parallel ranks,
    # whole attention weights, and requests and a KV cache of its own. docs/servers.md#servers-with-attention-groups
    attention_data_parallel: int = key(
        1,
        PROCESSES,
        *when(
            above(1),
            divides(".tensor_parallel", because="its ranks form the groups"),
            needs("model's type", one_of(*GROUPED), because=_UNTESTED),
            excludes(".external", because=_UNTESTED),
            excludes("sync.transport", "adapters", because=_UNTESTED),
            excludes(".routing_replay", because=_UNTESTED),
            excludes(".deterministic", because=_UNTESTED),
            excludes(".fp8", because=_UNTESTED),
            excludes(".expert_parallel", above(1), because=_UNTESTED),
            excludes(".pipeline_parallel", above(1), because=_UNTESTED),
            excludes("cluster.colocate", because=_UNTESTED),
            excludes("server's number of nodes", above(1), because="rollout.tensor_parallel must fit on a node for it"),
        ),
    )
    # Engines of each server that compute prompts, of `tensor_parallel` ranks each, and hand them over to those that
    # compute responses (prefill/decode disaggregation); 0 of both kinds is one engine that does both.
    # docs/servers.md#servers-with-prefill-and-decode-engines
    prefill_engines: int = key(0, NOT_NEGATIVE, needs(".decode_engines", above(0)), *OF_TWO_ENGINES)
    # Engines of each server that compute responses, if others compute prompts.
    decode_engines: int = key(0, NOT_NEGATIVE, needs(".prefill_engines", above(0)))
    # Serve a model folder in block FP8 as it is stored, and quantize the weights of each sync in the same way; false
    # serves it in model.dtype. docs/servers.md#servers-in-block-fp8
    fp8: bool = key(
        False,
        needs("model.dtype", "bfloat16", because="such servers compute in bfloat16"),
        excludes(
            "sync.transport",
            "adapters",
            because="servers would add adapters to quantized weights, which the trainer has not; auto merges them",
        ),
    )
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # `package.module:function` with the signature `async def rollout(client, sample)`; null is a single turn, or the
    # tool agent if `rollout.tools` has functions or MCP servers.
    workflow: str | None = key(None, FUNCTION)
    # Constructor arguments, if `workflow` names a class; its instance is the rollout function.
    workflow_options: dict[str, Any] = key(dict, unused_without(".workflow"))
    # An agent that uses OpenAI's or Anthropic's API instead, as `package.module:function`:
    # `def agent(base_url, api_key, sample, model)`, sync or async (docs/gateway.md). With `external`, programs outside
    # the run open a session for each sample (docs/agents.md).
    agent: str | None = key(
        None,
        AGENT,
        excludes(".workflow", because=_GENERATES),
        excludes(".environment", because=_GENERATES),
        excludes(".tools.functions", because=_GENERATES),
        excludes(".tools.mcp", because=_GENERATES),
    )
    gateway: GatewayConfig = section(GatewayConfig, unused_without("run's rollout.agent or verifiers environment"))
    # What becomes of a sample whose agent reaches `timeouts.agent`, or whose environment does not answer a step within
    # `timeouts.environment`: leave_out, or score what it has, by the reward function or the environment's rewards.
    at_deadline: str = key(
        "leave_out",
        Choice("leave_out", "score"),
        unused_without(".agent", where={".environment": one_of(None)}),
    )
    # `math`, `code`, or `package.module:function`, `f(completions, **columns) -> list[float | None]`; null takes the
    # dataset's verifier. docs/rewards.md
    reward: str | None = key(None, REWARD, excludes(".rewards", because="the second has all reward functions"))
    # Several reward functions instead, by their names in the metrics.
    rewards: dict[str, RewardConfig] = key(dict, NAMES)
    # Processes that run workflows, tools, environments and rewards, and each generate a part of the groups; 0 does all
    # of it in the controller's process. docs/workers.md
    workers: int = key(0, NOT_NEGATIVE)
    # Processes for CPU-bound reward functions, of each rollout worker; 0 runs them in threads beside the workflow.
    reward_processes: int = key(0, NOT_NEGATIVE)
    groups: GroupConfig = field(default_factory=GroupConfig)
    environment: EnvironmentConfig | None = None
    # Sample every request with a seed of its own, independent of the rest of the batch, which is slower. With
    # schedule.max_staleness=0 runs are repeatable: docs/concepts.md#repeatable-runs
    deterministic: bool = False
    # Servers report the experts of each token, and the trainer sends the token to the same ones (routing replay, R3).
    # docs/sampling.md#routing-replay
    routing_replay: bool = key(
        False,
        needs("model's experts"),
        excludes("trainer.megatron.model.moe_router_fusion", because="it chooses experts within one kernel"),
        excludes("rollout.server_args --speculative-", because="SGLang does not report those routes reliably"),
        megatron="moe_enable_routing_replay",
    )
    # Maximum length of prompt plus response that a server accepts, in tokens; null takes the model's own limit.
    context_length: int | None = key(None, AT_LEAST_ONE, at_least(_LONGEST), at_most("model's max_position_embeddings"))
    # KV cache per server, attention group or engine, in tokens. null leaves it to SGLang; on a CPU it is one GiB, or
    # what one sequence of `context_length` (else of the longest prompt and response) takes.
    max_total_tokens: int | None = key(None, AT_LEAST_ONE, at_least(_LONGEST))
    # Maximum number of running requests per server or engine; null leaves it to SGLang (set it on a CPU).
    max_running_requests: int | None = key(None, AT_LEAST_ONE)
    # Fraction of a device's memory for weights and KV cache.
    mem_fraction: float = key(0.8, PROPER_FRACTION)
    # How the router balances requests. consistent_hashing and sticky send all requests of a prompt to one server: by a
    # hash, or to the server that has the fewest requests when the first one comes.
    router_policy: str = key(
        "cache_aware", Choice("cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing", "sticky")
    )
    # Tokens after which a running request streams its output; at most this many are lost when its server dies. 0 sends
    # all output at the end.
    stream_interval: int = key(16, NOT_NEGATIVE)
    # Seconds between two saves of unfinished responses, which a resumed run continues; 0 never saves.
    save_partials_seconds: float = key(
        30.0,
        NOT_NEGATIVE,
        when(
            above(0),
            needs(".stream_interval", above(0), because="requests stream nothing to save before they end"),
        ),
    )
    # Limit concurrent requests below the buffer's capacity while servers use more than this fraction of their KV cache;
    # null turns the limit off.
    kv_pressure: float | None = key(0.9, FRACTION)
    # Attempts at a prompt whose workflow or reward raises an error. Server failures do not count.
    max_attempts: int = key(2, AT_LEAST_ONE)
    # Fraction of recent groups that may be dropped for errors; above it the run stops with a summary of the errors.
    max_drop_share: float = key(0.5, FRACTION)
    chat: ChatConfig = field(default_factory=ChatConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    # Additional SGLang command line arguments, for example {"--chunked-prefill-size": 4096}.
    server_args: dict[str, Any] = key(
        dict,
        ROLLOUT_FLAGS,
        excludes(".external", because="they are for servers that the run starts"),
        when(_FLOAT32_HEADS, needs("trainer.float32_head", True, because=_HEADS, where=_SERVED_BF16)),
        when(_OTHER_HEADS, needs("trainer.float32_head", False, because=_HEADS, where=_SERVED_BF16)),
    )
