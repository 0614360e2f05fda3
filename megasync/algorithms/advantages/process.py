"""GRPO with rewards of single steps: process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3).

A step ends where a token has a reward: at the end of a turn, a line of a proof, a tool call. Without such rewards a
response has one, at its last token, and this is `grpo`.
"""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.grpo import STD_EPS
from megasync.algorithms.advantages.rewards import Floats, TokenRewards


def grpo_process(step: TokenRewards, *, normalize_std: bool) -> Floats:
    """What a token and those after it in its response get, where each reward is compared with all of its group.

    ``(r - mean) / std`` over all rewards of the responses to a prompt, with the sample standard deviation, summed from
    the end of the response to the token. Without ``normalize_std`` it is not divided.
    """
    response = np.repeat(np.arange(len(step.groups)), np.diff(step.starts))
    group, given = step.groups[response[step.rewarded]], step.rewards[step.rewarded]
    count, total = step.summed(np.stack([step.by_group(np.ones_like(given), group), step.by_group(given, group)]))
    centred = given - (total / np.maximum(count, 1))[group]
    if normalize_std:
        squares = step.summed(step.by_group(centred**2, group))
        centred /= np.sqrt(squares / np.maximum(count - 1, 1))[group] + STD_EPS
    own = np.zeros(len(step.rewards))
    own[step.rewarded] = centred
    so_far = np.cumsum(own)
    return so_far[step.starts[1:] - 1][response] - so_far + own
