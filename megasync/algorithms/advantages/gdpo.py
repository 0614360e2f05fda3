"""GDPO: each of several rewards is normalised by itself before they are added."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.grpo import of_group
from megasync.algorithms.advantages.rewards import Floats, StepRewards


def gdpo(step: StepRewards, *, normalize_std: bool) -> Floats:
    """The weighted sum of the GRPO advantages of each reward function, shifted and scaled over the step's tokens.

    arXiv 2601.05242; over tokens as verl does, where the paper takes the samples of the step. A reward of a larger
    scale then does not hide the others. A sample that a function gave no score gets nothing from it, and a group where
    fewer than two have one neither. With one reward function it is GRPO, shifted and scaled.
    """
    parts = step.parts or {"": step.rewards}
    total = np.zeros(len(step.rewards))
    for name, rewards in parts.items():
        weight = step.weights.get(name, 1.0)
        for group in step.each_group():
            scored = np.flatnonzero(np.isfinite(rewards[group])) + group.start
            if len(scored) > 1:
                total[scored] += weight * np.array(of_group(rewards[scored].tolist(), normalize_std))
    return step.whitened(total)
