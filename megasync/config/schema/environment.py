"""The section of the environment that the model plays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class EnvironmentConfig:
    """An environment that the model plays, instead of a workflow (docs/rewards.md#environments); null by default."""

    # reasoning_gym, gymnasium, or `package.module:Class`, made with `options`.
    kind: str = MISSING
    # Arguments that it is made with.
    options: dict[str, Any] = field(default_factory=dict)
    # Steps after which an episode ends.
    max_turns: int = 8
    # Environments that exist at once; they are reused.
    pool: int = 16
    # Where sync environments run: thread (light; one that hangs is left behind) or process (one that hangs is killed).
    isolation: str = "thread"
    # What the model is told before the first observation.
    system: str = ""
