"""Online preference optimisation (Guo et al. 2024, arXiv 2402.04792), as advantages of the two samples of a pair.

The loss of a pair (Rafailov et al. 2023, arXiv 2305.18290, equation 7) is -log sigmoid(beta (x_w - x_l)), with x the
log-ratio of policy and reference, summed over the tokens of the better and of the worse sample. Its gradient is
-beta sigmoid(beta (x_l - x_w)) (grad log pi_w - grad log pi_l): that of a policy gradient with these advantages.
"""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, StepRewards


def dpo(step: StepRewards, *, beta: float = 0.1) -> Floats:
    """The samples with the highest and the lowest reward of each group are a pair; 0 for all others.

    Groups of equal rewards have no pair. Before `StepRewards.log_ratios` are known, they count as 0.
    """
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        better, worse = group.start + int(rewards.argmax()), group.start + int(rewards.argmin())
        if rewards.max() == rewards.min():
            continue
        margin = 0.0 if step.log_ratios is None else beta * (step.log_ratios[better] - step.log_ratios[worse])
        # The logistic function of -margin, without an overflow.
        advantages[better] = beta * np.exp(-np.logaddexp(0.0, margin))
        advantages[worse] = -advantages[better]
    return advantages
