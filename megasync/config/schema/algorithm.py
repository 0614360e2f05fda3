"""The section of the loss; docs/algorithms.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AlgorithmConfig:
    """Advantages and loss: docs/algorithms.md."""

    # grpo: reward minus the group's mean, over its standard deviation when `normalize_std`.
    advantage: str = "grpo"
    # Divide advantages by the standard deviation of the group's rewards.
    normalize_std: bool = True
    # PPO clips the ratio below 1 - clip_low.
    clip_low: float = 0.2
    # PPO clips the ratio above 1 + clip_high.
    clip_high: float = 0.28
    # Dual clip: bounds the surrogate of a token with a negative advantage at `dual_clip` times that advantage, where PPO
    # has no bound; null turns it off.
    dual_clip: float | None = 3.0
    # Denominator of the PPO ratio. trainer: the trainer's own log-probs before the step (decoupled PPO). behaviour: the
    # server's.
    ratio: str = "trainer"
    # Off-policy correction by truncated importance sampling against the server's log-probs: none, token or sequence.
    correction: str = "token"
    # Largest importance weight.
    correction_cap: float = 2.0
    # KL penalty to the initial weights, in the loss; 0 turns it off.
    kl_coef: float = 0.0
    # Estimator of that KL: k1, k2 or k3.
    kl_kind: str = "k3"
    # Entropy bonus in the loss.
    entropy_coef: float = 0.0
