"""The typed configuration: one dataclass per section, read by OmegaConf, checked before anything starts.

A YAML file may name a ``base`` (a path relative to itself); its keys are laid over the base's, then ``key=value``
overrides over both. Unknown keys, wrong types and contradictions raise ``ConfigError`` with the key and the fix.
This module imports neither torch nor Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megasync.config.reward_model import RewardModelConfig

# The value of a key that is chosen from something else, such as the model.
AUTO = "auto"


@dataclass
class ModelConfig:
    # Folder with a Hugging Face config.json, safetensors and tokenizer (`megasync fetch` makes two small ones).
    path: str = MISSING
    # config.json that `megasync plan` reads while the folder above is not on this machine yet.
    config: str | None = None
    # Compute, storage and serving dtype: float32 or bfloat16. On GPUs bfloat16 keeps float32 master weights.
    dtype: str = "bfloat16"


@dataclass
class DatasetConfig:
    # digits (procedural), reasoning_gym, jsonl, parquet, or hf (a `datasets` folder or hub name).
    kind: str = MISSING
    # File or folder of jsonl, parquet and hf datasets; the task's name for digits and reasoning_gym.
    source: str = MISSING
    split: str = "train"
    # Rows to generate (procedural kinds) or to keep (the others); null keeps all.
    size: int | None = None
    seed: int = 0
    # digits: length; reasoning_gym: the task's own options; hf: arguments of `datasets.load_dataset` (name, revision).
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class PromptConfig:
    # raw: the template below, tokenised as plain text. chat: the tokenizer's chat template.
    format: str = "raw"
    # Python format string over the row's columns; the default is the row's prompt column itself.
    template: str = "{prompt}"
    # Text before the prompt: a system message (chat), or a preamble (raw).
    system: str = ""
    # Solved examples put before each raw prompt, drawn from the training set's first rows.
    examples: int = 0
    example_template: str = "{prompt} {answer}\n\n"
    # Prompts longer than this are refused at start (counted and named), not cut.
    max_tokens: int = 1024


@dataclass
class DataConfig:
    # Training set; may be left out only by a Python caller who passes rows of its own.
    train: DatasetConfig | None = None
    # Held-out set; null means no evaluation.
    eval: DatasetConfig | None = None
    prompt: PromptConfig = field(default_factory=PromptConfig)
    shuffle: bool = True


@dataclass
class ScheduleConfig:
    # Optimizer batches to train before the run ends.
    total_steps: int = 100
    # Prompts (groups) per training step.
    groups_per_step: int = 16
    # Responses sampled per prompt.
    samples_per_group: int = 8
    # Versions the policy may have moved on since a trained token was sampled; a straggler that others overtook in the
    # look-ahead window may be one older (`megasync plan` shows the bound). 0 is synchronous training.
    max_staleness: int = 1
    # Training steps between two weight syncs (one published version each).
    weight_sync_steps: int = 1
    # Prompts being generated at once; null lets the buffer's capacity alone decide.
    max_inflight_groups: int | None = None
    # true: requests survive a weight sync and go on under the new version. false: a sync waits until they are done.
    partial_rollout: bool = True
    # Look-ahead window of the batcher as a share of the buffer's capacity; null is strict FIFO.
    window_fraction: float | None = 0.3
    # What happens to a finished group that is too old when it would be trained: mask, regenerate or drop.
    over_age: str = "regenerate"
    # End the run early once the held-out score (greedy accuracy) is above this; null never does.
    stop_at_score: float | None = None


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop: list[str] = field(default_factory=list)


@dataclass
class ChatConfig:
    """How chat messages become tokens, and answers become messages."""

    # Variables of the chat template, for example {"enable_thinking": false}.
    template_options: dict[str, Any] = field(default_factory=dict)
    # SGLang's parser for the model's tool calls, such as qwen, hermes, llama3 or deepseekv3; auto asks the chat template.
    tool_format: str | None = AUTO
    # SGLang's parser for reasoning, such as qwen3 or deepseek-r1; auto asks the chat template, null leaves it in the text.
    reasoning_format: str | None = AUTO
    # When the chat template rewrites earlier turns, as by dropping their reasoning: fork (the model sees what a user's
    # would, and a trajectory of its own begins), or realign (it goes on seeing what it wrote, in one trajectory).
    rewritten_turns: str = "fork"


@dataclass
class ToolsConfig:
    # `package.module:function` of each tool. Any here makes the tool agent the workflow.
    functions: list[str] = field(default_factory=list)
    # Answers of the model in one sample.
    max_turns: int = 8
    # Seconds for one call.
    timeout: float = 60.0
    # Characters of a tool's output that the model is shown.
    max_output: int = 8192


@dataclass
class HealthConfig:
    """When a server of the fleet counts as dead, and how often it is started again. A dead process is seen at once."""

    # Seconds between two probes of a server's HTTP process, for the answer, and unanswered ones in a row that are too many.
    probe_seconds: float = 2.0
    probe_timeout: float = 20.0
    probe_failures: int = 3
    # The same for requests through the scheduler, which answers between two batches: allow for the longest prefill.
    request_seconds: float = 10.0
    request_timeout: float = 60.0
    request_failures: int = 3
    # Weight syncs in a row that a server may fail before it is started again instead of being synced once more.
    sync_failures: int = 2
    # Restarts of a server, and of the router, in any `restart_window` seconds; one that needs more is given up.
    restarts: int = 5
    restart_window: float = 600.0


@dataclass
class RewardConfig:
    """One of several reward functions."""

    # math, code, or `package.module:function`; null takes the function's own name here. A class is made with `options`.
    function: str | None = None
    # Above 0. A None takes no part: the weights of the functions that answered are scaled up to the sum of all.
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    # Instead of a function, one of `reward_models`.
    model: str | None = None


@dataclass
class GroupConfig:
    """Which responses of a prompt, and which prompts, are trained."""

    # Drop groups whose rewards are all equal (nothing to learn) and draw another prompt instead.
    drop_uniform: bool = False
    # Responses sampled per prompt beyond schedule.samples_per_group, and which are kept: first (those that end first; the
    # others are aborted) or spread (of all, those whose rewards have the largest variance).
    extra_samples: int = 0
    keep: str = "first"
    # Responses cut by the length limit: keep them, mask them (out of loss and baseline), or punish length softly.
    overlong: str = "keep"
    # punish: over the last so many tokens before rollout.sampling.max_new_tokens the reward falls by up to `penalty`.
    overlong_tokens: int = 0
    overlong_penalty: float = 1.0


@dataclass
class EnvironmentConfig:
    # reasoning_gym, gymnasium, or `package.module:Class`; it is made with `options`.
    kind: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    # Steps after which an episode ends.
    max_turns: int = 8
    # Environments that exist at once; they are reused.
    pool: int = 16
    # Where sync environments run: thread (light; one that hangs is left behind) or process (one that hangs is killed).
    isolation: str = "thread"
    # What the model is told before the first observation.
    system: str = ""


@dataclass
class GatewayConfig:
    """Where the requests of `rollout.agent` arrive."""

    # Address that agents reach (auto: this node's own) and port (0: a free one).
    host: str = "127.0.0.1"
    port: int = 0
    # Largest body of a request, in MiB.
    body_mb: int = 16
    # Sync agents that run at once, each on a thread of its own.
    threads: int = 256
    # Whose temperature, top_p and seed hold: configured (rollout.sampling, as training assumes) or request.
    sampling: str = "configured"


@dataclass
class RolloutConfig:
    # SGLang servers at the start (`megasync scale` changes it), and the tensor-parallel ranks (GPUs) of each.
    servers: int = 2
    # The run goes on with fewer servers while others are started again; it ends when fewer than this can be had.
    min_servers: int = 1
    tensor_parallel: int = 1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # `package.module:function`, or null for a single turn, or the tool agent where `tools` has functions. The signature is `async def rollout(client, sample)`.
    workflow: str | None = None
    # An agent that talks OpenAI instead, `def agent(base_url, api_key, sample, model)`, sync or async, as
    # `package.module:function`; null for none.
    agent: str | None = None
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    # math, code, or `package.module:function`, `f(completions, **columns) -> list[float | None]`; null takes the dataset's
    # verifier.
    reward: str | None = None
    # Several reward functions, by the names that they have in the metrics.
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    # Worker processes for reward functions that burn CPU; 0 runs them in the controller's process.
    reward_processes: int = 0
    groups: GroupConfig = field(default_factory=GroupConfig)
    # An environment that the model plays, instead of a workflow; null for none.
    environment: EnvironmentConfig | None = None
    # Every request samples from a seed of its own, whatever else is in the batch: runs repeat exactly, at some speed.
    deterministic: bool = False
    # Longest prompt plus response that a server accepts, in tokens; null takes the model's own limit.
    context_length: int | None = None
    # Tokens of KV cache and running requests per server; null lets SGLang decide (set them on a CPU).
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    mem_fraction: float = 0.8
    router_policy: str = "cache_aware"
    # Tokens after which a running request sends what it has: so much is lost when its server dies. 0 sends all at the end.
    stream_interval: int = 16
    # Seconds between two saves of what running requests hold, to be continued after a restart of the run; 0 never saves.
    save_partials_seconds: float = 30.0
    # Fewer requests at once than the buffer allows while servers run out of KV cache (above this share of it); null
    # leaves it to schedule.max_inflight_groups and the buffer.
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


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    # constant, linear or cosine, after `warmup_steps`; the last two fall to `min_lr` at `schedule.total_steps`.
    decay: str = "constant"
    warmup_steps: int = 0
    min_lr: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0


@dataclass
class TrainerConfig:
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    # Ranks among which the experts of a layer are dealt out; they are taken from the tensor and data ranks of a stage.
    expert_parallel: int = 1
    # Ranks that share one expert; null takes tensor_parallel, as Megatron does.
    expert_tensor_parallel: int | None = None
    # Chunks of layers per pipeline stage (interleaved schedule); 1 is the plain schedule.
    virtual_pipeline: int = 1
    # Layers on the first and last pipeline stage when the split is uneven; null splits evenly.
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    # Packed tokens per microbatch and rank. A longer sequence gets a microbatch of its own.
    tokens_per_microbatch: int = 8192
    # Optimizer steps per batch. With more than one, proximal log-probs are computed first.
    minibatches: int = 1
    # null or "full" (recompute each layer's activations in the backward pass).
    recompute: str | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # Weight of the loss that balances load over experts, in the loss of each step; 0 trains the policy's loss alone.
    moe_aux_loss: float = 0.0
    # Non-finite steps that may be skipped in a row before the run stops.
    max_skipped_steps: int = 3
    # Times in a row that lost ranks (dead, or hung past a deadline) are started again from the newest checkpoint without
    # a new step being trained in between; then the run stops. 0 stops at the first loss.
    max_restarts: int = 3


@dataclass
class AlgorithmConfig:
    # grpo: reward minus the group's mean, over its standard deviation when `normalize_std`.
    advantage: str = "grpo"
    normalize_std: bool = True
    # PPO clip range; clip_high may exceed clip_low (asymmetric clipping).
    clip_low: float = 0.2
    clip_high: float = 0.28
    # Denominator of the PPO ratio. trainer: the trainer's own log-probs before the step (decoupled PPO).
    # behaviour: the server's.
    ratio: str = "trainer"
    # Off-policy correction by truncated importance sampling against the server's log-probs: none, token or sequence.
    correction: str = "token"
    correction_cap: float = 2.0
    # KL penalty to the initial weights, in the loss: 0 turns it off. kind: k1, k2 or k3.
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    entropy_coef: float = 0.0


@dataclass
class SyncConfig:
    # What servers do with running requests during a sync: in_place, retract or abort.
    pause_mode: str = "retract"
    # p2p (shard to shard, into servers with megasync's plugin), broadcast (whole tensors, into any server), disk
    # (through a folder that any server sees, also one outside the cluster), or auto, which takes p2p where it can, else
    # broadcast, and says why.
    transport: str = "auto"
    # Largest message on the wire, or file; a sender holds two.
    bucket_mb: int = 256
    # p2p: where servers keep a version until they commit it: host (pinned memory beside a GPU), or device, which makes
    # the pause shorter and takes the memory of a second set of weights there.
    arena: str = "host"
    # p2p: room for that on each server rank; null takes what a version needs. A rank with less room is paused during
    # the whole transfer.
    arena_mb: int | None = None
    # p2p: servers that are updated at the same time; null updates all of them together.
    wave: int | None = None
    # p2p: send only the elements that changed, when that is less. Ranks keep a host copy of what they sent last.
    delta: bool = False
    # p2p: every n-th sync is a full one all the same; 0 never.
    delta_full_every: int = 100
    # disk: where versions go, a folder that all nodes and servers share and only this run writes; null takes the run
    # directory's `sync`.
    disk_dir: str | None = None
    # disk: versions that stay there; each is a whole Hugging Face folder.
    disk_keep: int = 2
    # After every n-th sync compare trainer and server log-probs on fixed prompts; 0 never does.
    parity_every: int = 1
    # Largest mean absolute difference per token; null takes 1e-3 for float32 and 0.2 for bfloat16.
    parity_threshold: float | None = None


@dataclass
class EvalSamplingConfig:
    """Where evaluation samples otherwise than training; null takes rollout.sampling's."""

    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None


@dataclass
class EvalSetConfig:
    """A held-out set. What is null is as in the eval section."""

    data: DatasetConfig = field(default_factory=DatasetConfig)
    samples: int | None = None
    temperatures: list[float] | None = None
    repeats: int | None = None
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    # math, code, or `package.module:function`; null takes the run's reward, or where it names none the set's verifier.
    reward: str | None = None


@dataclass
class EvalConfig:
    # Training steps between evaluations; 0 evaluates only at the start and the end.
    every_steps: int = 10
    # Held-out prompts per evaluation.
    samples: int = 128
    # One score per temperature; 0 is greedy.
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    # Answers to each prompt at temperatures above 0, for pass@k.
    repeats: int = 1
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    # Answers under way at once, over all sets.
    max_inflight: int = 32
    # More held-out sets, by the names that they have in the metrics.
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)


@dataclass
class CheckpointConfig:
    # Training steps between checkpoints; 0 saves only at the end and on Ctrl-C.
    every_steps: int = 50
    keep: int = 2
    # Write a Hugging Face checkpoint when the run ends.
    export: bool = True


@dataclass
class ClusterConfig:
    # auto takes cuda when there is one.
    device: str = "auto"
    # Ray cluster: null starts one here for the run; "auto" or host:port joins one.
    address: str | None = None
    # GPUs (cuda) or ranks (cpu) of one node; pools are made of whole nodes when they span several.
    devices_per_node: int = 8
    # Address that servers and collectives bind to; auto is each node's own, needed when the pools span nodes.
    host: str = "127.0.0.1"


@dataclass
class TimeoutConfig:
    """Seconds. Separate waits, separate knobs."""

    server_start: float = 300.0
    trainer_start: float = 300.0
    request: float = 600.0
    weight_sync: float = 300.0
    # One call of a reward function, and one of an environment.
    reward: float = 60.0
    environment: float = 60.0
    # One sample of `rollout.agent`, from its call to its return.
    agent: float = 3600.0
    # One message of a p2p sync that does not move.
    sync_stall: float = 30.0
    train_step: float = 1800.0
    # No group finished and no step trained for this long: the run stops and says what each part waits for.
    no_progress: float = 1800.0
    shutdown: float = 60.0


@dataclass
class ObserveConfig:
    # Live terminal display; plain lines where there is no terminal.
    live: bool = True
    tensorboard: bool = True
    # Sample answers written before and after training.
    samples: int = 8


@dataclass
class Config:
    name: str = "run"
    seed: int = 0
    # Run directories are made here as <name>-<time>.
    run_root: str = "runs"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    reward_models: dict[str, RewardModelConfig] = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
