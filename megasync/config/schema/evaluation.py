"""Held-out evaluation, and what a run displays."""

from __future__ import annotations

from dataclasses import dataclass, field

from megasync.config.limits import (
    AT_LEAST_ONE,
    EVAL_NAMES,
    EVAL_TOP_K,
    FRACTION,
    HOST,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    REWARD,
    TEMPERATURES,
    Choice,
    Range,
)
from megasync.config.rules import SET, above, at_most, below, excludes, key, needs, none_of, unused_without, when
from megasync.config.schema.data import DatasetConfig

# SGLang stops at a request for min_p if its sampling has seeds.
SEEDED = excludes("rollout.deterministic", because="SGLang does not sample min_p with seeds; top_p it does")


@dataclass
class EvalSamplingConfig:
    """Sampling parameters of evaluation that differ from training; null takes the value of `rollout.sampling`."""

    # Nucleus sampling: fraction of probability to sample from.
    top_p: float | None = key(None, FRACTION)
    # Number of most likely tokens to sample from; -1 for all.
    top_k: int | None = key(None, EVAL_TOP_K)
    # Smallest probability to sample from, as a fraction of the most likely token's.
    min_p: float | None = key(None, Range(0, 1), when(above(0), SEEDED))
    # Maximum response length in tokens.
    max_new_tokens: int | None = key(None, AT_LEAST_ONE)


@dataclass
class EvalSetConfig:
    """A held-out set under a name of your choice (docs/evaluation.md). A null key takes its value from `eval`."""

    data: DatasetConfig = field(default_factory=DatasetConfig)
    # Prompts per evaluation.
    samples: int | None = key(None, AT_LEAST_ONE)
    # One score per temperature; 0 is greedy.
    temperatures: list[float] | None = key(None, TEMPERATURES)
    # Responses per prompt at temperatures above 0.
    repeats: int | None = key(None, AT_LEAST_ONE)
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    # PEFT folder of adapters that answer in place of the policy's, of their rank or a lower one and of the same
    # projections: those of an earlier run, to compare with. With `sync.transport=adapters`; not in `megasync eval`.
    adapter: str | None = key(None, PATH, needs("sync.transport", "adapters"))
    # `math`, `code` or `package.module:function`; null takes the run's reward, or the set's verifier if the run names
    # none.
    reward: str | None = key(None, REWARD)


@dataclass
class EvalConfig:
    """Evaluation on held-out sets: docs/evaluation.md. `eval: null` trains without held-out sets."""

    # Training steps between evaluations; another one precedes the first step, and one follows the last. 0 evaluates
    # never while training, only in `megasync eval`.
    every_steps: int = key(10, NOT_NEGATIVE)
    # Held-out prompts per evaluation.
    samples: int = key(128, AT_LEAST_ONE, at_most("data.eval.size"))
    # One score per temperature; 0 is greedy.
    temperatures: list[float] = key(lambda: [0.0], TEMPERATURES)
    # Responses per prompt at temperatures above 0, for pass@k.
    repeats: int = key(1, AT_LEAST_ONE)
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    # Maximum number of responses in generation, over all sets.
    max_inflight: int = key(32, AT_LEAST_ONE)
    # Every response of an evaluation comes from one version of the weights. Without it, an evaluation beside the
    # training may span several versions (`eval/exact_share`). What it costs is in docs/evaluation.md.
    exact: bool = False
    # With `exact`: servers that only evaluate meanwhile, out of `rollout.servers`. Unused with `cluster.colocate`, with
    # `sync.transport=adapters` and with one server.
    servers: int = key(
        1,
        AT_LEAST_ONE,
        unused_without(".exact", True, training=True),
        unused_without("cluster.colocate", False, because="training waits for evaluations there", training=True),
        unused_without(
            "sync.transport",
            none_of("adapters", instead="auto"),
            because="all servers keep the evaluated version there",
            training=True,
        ),
        *when(SET, below("rollout.servers", because="some must be left to generate", training=True)),
    )
    # Additional held-out sets, by their names in the metrics.
    sets: dict[str, EvalSetConfig] = key(dict, EVAL_NAMES)


@dataclass
class WandbConfig:
    """Weights & Biases: docs/trackers.md. Its key comes from WANDB_API_KEY or `wandb login`."""

    # online sends metrics as they come; offline writes them below RUN/wandb, for `wandb sync`; disabled is off.
    mode: str = key("online", Choice("online", "offline", "disabled"))
    # Project of the run.
    project: str = "megasync"
    # User or team that owns the project; null is the default of the key.
    entity: str | None = None
    # Group under which runs are shown together.
    group: str | None = None
    # Labels of the run.
    tags: list[str] = key(list)


@dataclass
class MlflowConfig:
    """MLflow: docs/trackers.md."""

    # Address of the tracking server, or of a database or folder; null takes MLFLOW_TRACKING_URI.
    tracking_uri: str | None = None
    # Experiment of the run; it is created if it does not exist.
    experiment: str = "megasync"
    # Name of the run; null takes the name of the run directory.
    run_name: str | None = None


@dataclass
class PrometheusConfig:
    """An endpoint that Prometheus scrapes: docs/trackers.md. It needs no key, and has no secrets."""

    # Address to listen on; auto is this node's own.
    host: str = key("127.0.0.1", HOST)
    # Port; 0 picks a free one.
    port: int = key(9464, Range(0, 65535))


@dataclass
class ObserveConfig:
    """The display and the logs of a run."""

    # Live terminal display; plain lines if there is no terminal.
    live: bool = True
    # Write TensorBoard files beside the metrics.
    tensorboard: bool = True
    # Number of sample responses written before and after training.
    samples: int = key(8, NOT_NEGATIVE)
    # Also log to Weights & Biases; null does not.
    wandb: WandbConfig | None = None
    # Also log to MLflow; null does not.
    mlflow: MlflowConfig | None = None
    # Let Prometheus scrape this run and its servers; null does not.
    prometheus: PrometheusConfig | None = None
    # Record when each process does what, in trace/ of the run directory: `megasync trace RUN` merges it to one file.
    trace: bool = True
    # Largest size of all traces in MiB; the oldest half is removed.
    trace_mb: int = key(4096, AT_LEAST_ONE)
    # Responses of a step that are recorded for `megasync watch`: whole groups, at least one; 0 for none. As large a
    # share of the dropped groups is recorded too.
    rollouts: int = key(64, NOT_NEGATIVE)
    # Largest size of all recorded responses in MiB; the oldest are removed.
    rollouts_mb: int = key(2048, AT_LEAST_ONE)
    # Peak of a trainer device in TFLOP/s, by which `train/mfu` is computed; null takes the GPU's in dense bfloat16.
    peak_tflops: float | None = key(None, POSITIVE)
    # Training steps that torch.profiler records, in profile/ of the run directory, such as [10, 12].
    profile_steps: list[int] = key(list)
    # Trainer ranks that do so.
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    # Steps between measurements of gradient and weight norms by groups of layers; 0 for never. One reads all of both.
    norms_every: int = key(0, NOT_NEGATIVE)
