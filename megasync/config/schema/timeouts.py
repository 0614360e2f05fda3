"""The section of deadlines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TimeoutConfig:
    """Seconds; separate waits have separate knobs. docs/configuration.md#relations-between-deadlines"""

    # Until a server or the router answers.
    server_start: float = 300.0
    # Until every trainer rank has loaded its weights.
    trainer_start: float = 300.0
    # One generation request, or one to a reward model.
    request: float = 600.0
    # Each phase of a weight sync.
    weight_sync: float = 300.0
    # One call of a reward function.
    reward: float = 60.0
    # One call of an environment.
    environment: float = 60.0
    # One sample of `rollout.agent`, from the moment the agent begins to its return; waiting for a thread does not count.
    agent: float = 1500.0
    # One message of a p2p sync that does not move.
    sync_stall: float = 30.0
    # One training step, or one save of a checkpoint.
    train_step: float = 1800.0
    # No group finished and no step trained for this long: the run stops and says what each part waits for. The time of a
    # step, a save, a restart of the ranks and a weight sync does not count: these have deadlines of their own.
    no_progress: float = 1800.0
    # Until processes have ended on their own; then they are killed.
    shutdown: float = 60.0
