"""Per-token estimators of KL(policy || reference) from a sampled token (Schulman 2020, "Approximating KL Divergence").

Invariant: the exponent in k3 is at most ``MAX_LOG_RATIO``, so the estimate is finite for finite log-probs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# e^20 is half a billion: far above any ratio of a healthy run, and far below the float32 limit, even after a sum.
MAX_LOG_RATIO = 20.0


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``log pi - log ref``: unbiased, of either sign. As a loss its expected gradient on on-policy samples is zero."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``(log pi - log ref)^2 / 2``: biased, never negative. As a loss it has the gradient of the reverse KL."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``ref/pi - 1 - log(ref/pi)``: unbiased, never negative, low variance."""
    log_ratio = reference_logprobs - logprobs
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio


KL_KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

# Ages in versions that `kl_by_age` tells apart; the last one includes all older tokens.
AGES = 8


@torch.no_grad()
def kl_by_age(logprobs: Tensor, behaviour_logprobs: Tensor, keep: Tensor, ages: Tensor) -> dict[str, Tensor]:
    """KL(server || trainer), estimated by k3 and summed over kept tokens of each age, with their numbers.

    All are [tokens]; ``ages`` (int64) counts the versions since a token was sampled. Returns scalars ``server_kl@AGE``
    and ``tokens@AGE`` for every age below `AGES`.
    """
    each = k3(behaviour_logprobs, logprobs)
    bounded = ages.clamp(0, AGES - 1)
    sums: dict[str, Tensor] = {}
    for age in range(AGES):
        of_age = keep & (bounded == age)
        sums |= {f"server_kl@{age}": torch.where(of_age, each, 0.0).sum(), f"tokens@{age}": of_age.sum()}
    return sums
