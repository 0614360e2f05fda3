"""The section of the schedule: how much is trained, how far apart generation and training may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ScheduleConfig:
    """How much is trained, and how far generation may run ahead of it: docs/buffer.md."""

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
    # What to do with a finished group over the staleness bound: mask its stale tokens, regenerate it or drop it.
    stale: str = "regenerate"
    # End the run early once the held-out score (greedy accuracy) is above this; null never does.
    stop_at_score: float | None = None
