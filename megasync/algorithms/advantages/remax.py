"""ReMax: the baseline of a prompt is the reward of its greedy response (Li et al. 2023, arXiv 2310.10505)."""

from __future__ import annotations

from megasync.algorithms.advantages.rewards import Floats, StepRewards


def remax(step: StepRewards) -> Floats:
    """``r - b``, where the reward ``b`` is that of the response that the same weights decode greedily."""
    assert step.baselines is not None
    return step.rewards - step.baselines
