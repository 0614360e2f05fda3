"""Which keys may change when a run is resumed, and why the others may not.

`FIXED` and `FREE` decide: the longest entry that equals a key, or is a prefix of it, applies. Sections with keys of
both kinds are listed key by key, so that a new key there needs an explicit decision. A test checks every key of the
schema. docs/buffer.md describes how a changed key affects groups in flight.
"""

from __future__ import annotations

from typing import Any

from megasync.config.limits import as_typed, value_of
from megasync.config.load import schema_keys, section_of
from megasync.config.schema import Config
from megasync.errors import ConfigError

_PLACE = "it determines the run directory; move that folder instead, while the run is stopped"
_ORDER = "the uid of every prompt is a row number in the order that it determines; start a new run"
_DTYPE = "the checkpoint's weights have it; export the newest checkpoint and start a new run from that"
_CRITIC = "the run's checkpoints have one, or have none; start a new run from an export of the newest checkpoint"
_DISTRIBUTION = (
    "finished groups and partial responses were sampled from the distribution that it determines, and are still to be "
    "trained; export the newest checkpoint and start a new run from that"
)

FIXED = {
    "name": _PLACE,
    "run_root": _PLACE,
    "seed": _ORDER,
    "model.path": (
        "the run's tokens and reference weights come from that folder; if it was moved, create a symbolic link at its "
        "old path"
    ),
    "model.dtype": _DTYPE,
    "critic.enabled": _CRITIC,
    "critic.path": "the critic's weights come from the checkpoint, not from that folder; leave it as it was",
    "trainer.lora": (
        "the run's checkpoints hold adapters of that rank and projections, or all weights; start a new run from an "
        "export of the newest checkpoint"
    ),
    "data.train": _ORDER,
    "data.sets": _ORDER,
    "data.shuffle": _ORDER,
    # Few-shot examples are removed from the training rows.
    "data.prompt.examples": _ORDER,
    "rollout.sampling.temperature": _DISTRIBUTION,
    "rollout.sampling.top_p": _DISTRIBUTION,
    "rollout.sampling.top_k": _DISTRIBUTION,
    "rollout.sampling.min_p": _DISTRIBUTION,
}

FREE = frozenset(
    {
        # Read by `megasync plan` only.
        "model.config",
        *("data.eval", "data.columns"),
        *("data.curriculum", "data.curriculum_options"),
        # Of a supervised run, which compares the rows themselves.
        "sft",
        *(f"data.prompt.{key}" for key in ("format", "template", "template_options", "system")),
        *(f"data.prompt.{key}" for key in ("example_template", "max_tokens")),
        # The buffer counts the remaining work in groups of the new size, and applies `stale` to what is now too old.
        *(f"schedule.{key}" for key in ("total_steps", "groups_per_step", "samples_per_group", "max_staleness")),
        *(f"schedule.{key}" for key in ("weight_sync_steps", "max_inflight_groups", "partial_rollout")),
        *(f"schedule.{key}" for key in ("window_fraction", "stale", "stop_at_score")),
        # Servers, and everything that runs on them, are restarted. Finished groups keep their rewards.
        "rollout",
        *(f"rollout.sampling.{key}" for key in ("max_new_tokens", "stop")),
        # Checkpoints fit any topology.
        *(f"trainer.{key}_parallel" for key in ("tensor", "pipeline", "data", "context")),
        *(f"trainer.{key}_parallel" for key in ("expert", "expert_tensor", "sequence")),
        *(f"trainer.{key}" for key in ("min_data_parallel", "context_parallel_comm")),
        *(f"trainer.{key}" for key in ("virtual_pipeline", "first_stage_layers", "last_stage_layers")),
        "trainer.pipeline_layout",
        "trainer.distributed_optimizer",
        # Optimizer state contains moments, not hyperparameters.
        *(f"trainer.{key}" for key in ("tokens_per_microbatch", "minibatches", "recompute")),
        *(f"trainer.{key}" for key in ("pad_microbatches", "tp_comm_overlap", "cuda_graphs")),
        *(f"trainer.{key}" for key in ("recompute_layers", "recompute_modules", "overlap_grad_reduce", "float32_head")),
        *(f"trainer.{key}" for key in ("fp8", "gradient_accumulation_fusion", "overlap_param_gather")),
        *(f"trainer.{key}" for key in ("moe_permute_fusion", "moe_deepep", "moe_shared_expert_overlap", "megatron")),
        *(f"trainer.{key}" for key in ("optimizer", "moe_aux_loss", "max_skipped_steps", "max_restarts")),
        *(f"trainer.{key}" for key in ("step_attempts", "max_failed_steps")),
        "algorithm",
        *(f"critic.{key}" for key in ("warmup_steps", "clip", "offload", "optimizer")),
        "sync",
        "eval",
        "reward_models",
        "auxiliary_models",
        # Groups that are finished keep the log-probs that they have.
        "teachers",
        "checkpoint",
        # A run may resume on another cluster, also one of another kind of device.
        "cluster",
        "timeouts",
        "observe",
    }
)
# Sections of which every key is listed above.
KEY_BY_KEY = ("", "model", "data", "data.prompt", "schedule", "rollout.sampling", "trainer", "critic")


def why_fixed(key: str) -> str | None:
    """Why a key must not change when a run is resumed, and what to do instead; None if it may change.

    Raises KeyError for a key that is in neither table.
    """
    entry = key
    while entry not in FIXED and entry not in FREE:
        entry, dot, _ = entry.rpartition(".")
        if not dot or entry in KEY_BY_KEY:
            raise KeyError(f"{key} is neither in FIXED nor in FREE of {__name__}")
    return FIXED.get(entry)


def fixed() -> list[str]:
    """All keys that must not change when a run is resumed."""
    return [key for key in _leaves() if why_fixed(key) is not None]


def check_changes(before: Config, after: Config, step: int) -> None:
    """Raises ConfigError, with every reason, if a run with ``step`` trained steps cannot resume with the changes."""
    wrong = [
        f"{key}={as_typed(new)} cannot replace {as_typed(old)} when a run is resumed: {why_fixed(key)}"
        for key, old, new in changes(before, after)
        if why_fixed(key) is not None
    ]
    if after.schedule.total_steps < step:
        wrong.append(
            f"schedule.total_steps={after.schedule.total_steps} is less than the {step} trained steps; set it to "
            f"at least {step}"
        )
    if wrong:
        raise ConfigError("; ".join(wrong))


def changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """(key, value before, value after) for each key that differs."""
    pairs = ((key, value_of(before, key), value_of(after, key)) for key in _leaves())
    return [(key, old, new) for key, old, new in pairs if old != new]


def _leaves() -> list[str]:
    return [key for key, hint in schema_keys() if section_of(hint) is None]
