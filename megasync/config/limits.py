"""The values that each key allows on its own, as tables of ranges, choices and patterns.

Every key of the schema is in exactly one table or in `FREE`; a test fails for a key that is in none. Combinations of
keys are checked by `megasync.preflight.check`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasync.config import builtin
from megasync.config.schema import Config
from megasync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Range:
    """An interval. `open_low` and `open_high` exclude the respective endpoint."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:.10g}"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:.10g}"


POSITIVE = Range(0, open_low=True)
NOT_NEGATIVE = Range(0)
AT_LEAST_ONE = Range(1)
SHARE = Range(0, 1, open_low=True)
PART = Range(0, 1, open_low=True, open_high=True)
# The upper limit is more than any cluster runs. It bounds the plan, which lists every process.
PROCESSES = Range(1, 65536)
# A larger number is a typing error. This also refuses infinity, so every wait ends.
LARGEST = 1e18
# Maximum number of characters of a refused path in an error message.
SHOWN_PATH = 200

RANGES: dict[str, Range] = {
    # SGLang passes the seed to numpy, which accepts 32 bits. Each server adds its index.
    "seed": Range(0, 2**31),
    "data.train.size": AT_LEAST_ONE,
    "data.train.seed": NOT_NEGATIVE,
    "data.eval.size": AT_LEAST_ONE,
    "data.eval.seed": NOT_NEGATIVE,
    "data.prompt.examples": NOT_NEGATIVE,
    "data.prompt.max_tokens": AT_LEAST_ONE,
    "schedule.total_steps": AT_LEAST_ONE,
    "schedule.groups_per_step": AT_LEAST_ONE,
    "schedule.samples_per_group": AT_LEAST_ONE,
    "schedule.max_staleness": NOT_NEGATIVE,
    "schedule.weight_sync_steps": AT_LEAST_ONE,
    "schedule.max_inflight_groups": AT_LEAST_ONE,
    "schedule.window_fraction": SHARE,
    "schedule.stop_at_score": Range(0, 1, open_high=True),
    "rollout.servers": PROCESSES,
    "rollout.min_servers": AT_LEAST_ONE,
    "rollout.tensor_parallel": PROCESSES,
    "rollout.sampling.temperature": POSITIVE,
    "rollout.sampling.top_p": SHARE,
    "rollout.sampling.max_new_tokens": AT_LEAST_ONE,
    "rollout.reward_processes": NOT_NEGATIVE,
    "rollout.groups.extra_samples": NOT_NEGATIVE,
    "rollout.groups.overlong_tokens": NOT_NEGATIVE,
    "rollout.groups.overlong_penalty": POSITIVE,
    "rollout.environment.max_turns": AT_LEAST_ONE,
    "rollout.environment.pool": AT_LEAST_ONE,
    "rollout.gateway.port": Range(0, 65535),
    "rollout.gateway.body_mb": AT_LEAST_ONE,
    "rollout.gateway.threads": AT_LEAST_ONE,
    "rollout.context_length": AT_LEAST_ONE,
    "rollout.max_total_tokens": AT_LEAST_ONE,
    "rollout.max_running_requests": AT_LEAST_ONE,
    "rollout.mem_fraction": PART,
    "rollout.stream_interval": NOT_NEGATIVE,
    "rollout.save_partials_seconds": NOT_NEGATIVE,
    "rollout.kv_pressure": SHARE,
    "rollout.max_attempts": AT_LEAST_ONE,
    "rollout.max_drop_share": SHARE,
    "rollout.tools.max_turns": AT_LEAST_ONE,
    "rollout.tools.timeout": POSITIVE,
    "rollout.tools.max_output": AT_LEAST_ONE,
    "rollout.health.probe_seconds": POSITIVE,
    "rollout.health.probe_timeout": POSITIVE,
    "rollout.health.probe_failures": AT_LEAST_ONE,
    "rollout.health.request_seconds": POSITIVE,
    "rollout.health.request_timeout": POSITIVE,
    "rollout.health.request_failures": AT_LEAST_ONE,
    "rollout.health.sync_failures": AT_LEAST_ONE,
    "rollout.health.restarts": NOT_NEGATIVE,
    "rollout.health.restart_window": POSITIVE,
    "trainer.tensor_parallel": PROCESSES,
    "trainer.pipeline_parallel": PROCESSES,
    "trainer.data_parallel": PROCESSES,
    "trainer.expert_parallel": PROCESSES,
    "trainer.expert_tensor_parallel": PROCESSES,
    "trainer.virtual_pipeline": AT_LEAST_ONE,
    "trainer.first_stage_layers": AT_LEAST_ONE,
    "trainer.last_stage_layers": AT_LEAST_ONE,
    "trainer.tokens_per_microbatch": AT_LEAST_ONE,
    "trainer.minibatches": AT_LEAST_ONE,
    "trainer.optimizer.lr": POSITIVE,
    "trainer.optimizer.warmup_steps": NOT_NEGATIVE,
    "trainer.optimizer.min_lr": NOT_NEGATIVE,
    "trainer.optimizer.eps": POSITIVE,
    "trainer.optimizer.weight_decay": NOT_NEGATIVE,
    "trainer.optimizer.clip_grad": NOT_NEGATIVE,
    "trainer.moe_aux_loss": NOT_NEGATIVE,
    "trainer.max_skipped_steps": NOT_NEGATIVE,
    "trainer.step_attempts": AT_LEAST_ONE,
    "trainer.max_failed_steps": NOT_NEGATIVE,
    "trainer.max_restarts": NOT_NEGATIVE,
    "algorithm.clip_low": PART,
    "algorithm.clip_high": POSITIVE,
    "algorithm.dual_clip": Range(1, open_low=True),
    "algorithm.correction_cap": Range(1),
    "algorithm.kl_coef": NOT_NEGATIVE,
    "algorithm.entropy_coef": NOT_NEGATIVE,
    "sync.bucket_mb": AT_LEAST_ONE,
    "sync.arena_mb": AT_LEAST_ONE,
    "sync.wave": AT_LEAST_ONE,
    "sync.delta_full_every": NOT_NEGATIVE,
    "sync.disk_keep": AT_LEAST_ONE,
    "sync.parity_every": NOT_NEGATIVE,
    "sync.parity_threshold": POSITIVE,
    "eval.every_steps": NOT_NEGATIVE,
    "eval.samples": AT_LEAST_ONE,
    "eval.max_inflight": AT_LEAST_ONE,
    "eval.repeats": AT_LEAST_ONE,
    "eval.sampling.top_p": SHARE,
    "eval.sampling.max_new_tokens": AT_LEAST_ONE,
    "checkpoint.every_steps": NOT_NEGATIVE,
    "checkpoint.keep": AT_LEAST_ONE,
    "cluster.devices_per_node": Range(1, 1024),
    "timeouts.server_start": POSITIVE,
    "timeouts.trainer_start": POSITIVE,
    "timeouts.request": POSITIVE,
    "timeouts.weight_sync": POSITIVE,
    "timeouts.reward": POSITIVE,
    "timeouts.environment": POSITIVE,
    "timeouts.agent": POSITIVE,
    "timeouts.sync_stall": POSITIVE,
    "timeouts.train_step": POSITIVE,
    "timeouts.no_progress": POSITIVE,
    "timeouts.shutdown": POSITIVE,
    "observe.samples": NOT_NEGATIVE,
}

DATASET_KINDS = ("digits", "reasoning_gym", "jsonl", "parquet", "hf")

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "data.train.kind": DATASET_KINDS,
    "data.eval.kind": DATASET_KINDS,
    "data.prompt.format": ("raw", "chat"),
    "schedule.stale": ("mask", "regenerate", "drop"),
    "rollout.groups.keep": ("first", "spread"),
    "rollout.groups.overlong": ("keep", "mask", "punish"),
    "rollout.environment.isolation": ("thread", "process"),
    "rollout.gateway.sampling": ("configured", "request"),
    "rollout.router_policy": ("cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"),
    "rollout.chat.rewritten_turns": ("fork", "realign"),
    "trainer.recompute": ("full",),
    "trainer.optimizer.decay": ("constant", "linear", "cosine"),
    "algorithm.advantage": ("grpo",),
    "algorithm.ratio": ("trainer", "behaviour"),
    "algorithm.correction": ("none", "token", "sequence"),
    "algorithm.kl_kind": ("k1", "k2", "k3"),
    "sync.pause_mode": ("in_place", "retract", "abort"),
    "sync.transport": ("auto", "p2p", "broadcast", "disk"),
    "sync.arena": ("device", "host"),
    "cluster.device": ("auto", "cpu", "cuda"),
    "cluster.generation_key": ("auto", "always", "never"),
}

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
REWARD = re.compile("|".join([*builtin.REWARDS, FUNCTION.pattern]))
ENVIRONMENT = re.compile("|".join([*builtin.ENVIRONMENTS, FUNCTION.pattern]))
REWARD_FORMS = f"{', '.join(builtin.REWARDS)} or package.module:function"
# Text keys with a required form: the pattern, and its description for users.
PATTERNS: dict[str, tuple[re.Pattern[str], str]] = {
    "name": (re.compile(r"[\w.-]+"), "letters, digits, '.', '_' and '-' only (it names the run's folder)"),
    "rollout.workflow": (FUNCTION, "package.module:function"),
    "rollout.agent": (FUNCTION, "package.module:function"),
    "rollout.gateway.host": (re.compile(r"[\w.:\-]+"), "auto, an address or a host name, such as 127.0.0.1"),
    "rollout.reward": (REWARD, REWARD_FORMS),
    "rollout.environment.kind": (ENVIRONMENT, f"{', '.join(builtin.ENVIRONMENTS)} or package.module:Class"),
    "cluster.address": (re.compile(r"auto|[\w.\-]+:\d+|ray://[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+"), "auto or host:port"),
    "cluster.host": (re.compile(r"[\w.:\-]+"), "auto, an address or a host name, such as 127.0.0.1"),
}

# Keys that contain the path of a file or folder on this machine.
PATHS = (
    *("run_root", "model.path", "model.config", "sync.disk_dir"),
    *("cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca"),
)

# Text, lists and booleans that accept every value of their type, or that `check` validates with other keys.
FREE = {
    "run_root",
    "model.path",
    "model.config",
    "data.train.source",
    "data.train.split",
    "data.train.options",
    "data.eval.source",
    "data.eval.split",
    "data.eval.options",
    "data.prompt.template",
    "data.prompt.system",
    "data.prompt.example_template",
    "data.shuffle",
    "schedule.partial_rollout",
    "rollout.sampling.top_k",
    "rollout.sampling.stop",
    "rollout.rewards",
    "rollout.groups.drop_uniform",
    "rollout.environment.options",
    "rollout.environment.system",
    "rollout.deterministic",
    "rollout.server_args",
    "rollout.chat.template_options",
    "rollout.chat.tool_format",
    "rollout.chat.reasoning_format",
    "rollout.tools.functions",
    "trainer.sequence_parallel",
    "trainer.distributed_optimizer",
    "trainer.optimizer.betas",
    "algorithm.normalize_std",
    "eval.temperatures",
    "eval.sampling.top_k",
    "eval.sets",
    "reward_models",
    "checkpoint.export",
    "sync.delta",
    "sync.disk_dir",
    "cluster.tls_cert",
    "cluster.tls_key",
    "cluster.tls_ca",
    "observe.live",
    "observe.tensorboard",
}


# For one held-out set, relative to eval.sets.<name>.
EVAL_SET_RANGES = {
    "data.size": AT_LEAST_ONE,
    "data.seed": NOT_NEGATIVE,
    "samples": AT_LEAST_ONE,
    "repeats": AT_LEAST_ONE,
    "sampling.top_p": SHARE,
    "sampling.max_new_tokens": AT_LEAST_ONE,
}
EVAL_SET_CHOICES = {"data.kind": DATASET_KINDS}


# For one reward model, relative to reward_models.<name>.
REWARD_MODEL_RANGES = {
    "servers": AT_LEAST_ONE,
    "tensor_parallel": AT_LEAST_ONE,
    "mem_fraction": PART,
    "context_length": AT_LEAST_ONE,
    "max_total_tokens": AT_LEAST_ONE,
    "max_running_requests": AT_LEAST_ONE,
    "max_inflight": AT_LEAST_ONE,
    "max_new_tokens": AT_LEAST_ONE,
    "label": NOT_NEGATIVE,
    "temperature": NOT_NEGATIVE,
}
REWARD_MODEL_CHOICES = {
    "kind": ("classifier", "generative"),
    "pool": ("own", "rollout"),
    "dtype": ("float32", "bfloat16"),
    "format": ("chat", "raw"),
    "read": ("number", "yes_no"),
}


def check_limits(config: Config) -> None:
    """Raises ConfigError for the first value outside its limits, with the key, the value and what is allowed."""
    check_tables(config, "", RANGES, CHOICES)
    for key, (pattern, form) in PATTERNS.items():
        value = value_of(config, key)
        if value is not None and not pattern.fullmatch(value):
            raise ConfigError(f"{key}={value!r} must be {form}")
    for key in PATHS:
        if (value := value_of(config, key)) is not None:
            check_path(key, value)


def check_path(key: str, path: str) -> None:
    """Raises ConfigError if the file system rejects the text as a path."""
    if (trouble := path_problem(path)) is not None:
        raise ConfigError(f"{key}={path[:SHOWN_PATH]!r} cannot be looked at: {trouble}; choose another path")


def path_problem(path: str) -> str | None:
    """Why the file system rejects a text as a path; None if it is acceptable, even if nothing exists there.

    Reasons are for example: empty, too long, the home of an unknown user, or a folder without permission to enter.
    """
    if not path:
        return "it is empty"
    try:
        Path(path).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RuntimeError) as error:
        return str(getattr(error, "strerror", None) or error).rstrip(".")
    return None


def check_tables(
    section: Any, prefix: str, ranges: Mapping[str, Range], choices: Mapping[str, tuple[str, ...]]
) -> None:
    """Raises ConfigError for the first value of a section that its own tables do not allow.

    `prefix`, such as "eval.sets.gsm8k.", precedes the section's keys in messages.
    """
    for key, allowed in ranges.items():
        value = value_of(section, key)
        if value is None:
            continue
        if not abs(value) <= LARGEST:  # this form also refuses NaN
            raise ConfigError(f"{prefix}{key}={value} is no number that a run could use; it must be {allowed}")
        if not allowed.holds(value):
            raise ConfigError(f"{prefix}{key}={value} must be {allowed}")
    for key, options in choices.items():
        value = value_of(section, key)
        if value is not None and value not in options:
            raise ConfigError(f"{prefix}{key}={value!r} must be one of {', '.join(options)}")


def value_of(section: Any, key: str) -> Any:
    """The value of a dotted key; None if a section on the way to it is null."""
    node: Any = section
    for part in key.split("."):
        if node is None:
            return None
        node = getattr(node, part)
    return node
