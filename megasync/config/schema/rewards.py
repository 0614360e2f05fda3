"""The sections of reward functions and of the groups that their rewards choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RewardConfig:
    """One of several reward functions, under the name that it has in the metrics: docs/rewards.md."""

    # math, code, or `package.module:function`; null takes its name here. A class is made with `options`.
    function: str | None = None
    # Share in the sum, above 0. A None takes no part: the weights of the functions that answered are scaled up to the sum of all.
    weight: float = 1.0
    # Arguments that the class is made with, where `function` names a class.
    options: dict[str, Any] = field(default_factory=dict)
    # Instead of a function, one of `reward_models`.
    model: str | None = None


@dataclass
class GroupConfig:
    """Which responses of a prompt, and which prompts, are trained: docs/rewards.md#from-responses-to-a-group."""

    # Drop groups whose rewards are all equal (nothing to learn) and draw another prompt instead.
    drop_uniform: bool = False
    # Responses sampled per prompt beyond `schedule.samples_per_group`.
    extra_samples: int = 0
    # Which of them are kept: first (those that end first; the others are aborted) or spread (of all, those whose
    # rewards have the largest variance).
    keep: str = "first"
    # Responses cut by the length limit: keep them, mask them (out of loss and baseline), or punish length softly.
    overlong: str = "keep"
    # punish: over the last so many tokens before `rollout.sampling.max_new_tokens` the reward falls.
    overlong_tokens: int = 0
    # punish: by so much, at the limit.
    overlong_penalty: float = 1.0
