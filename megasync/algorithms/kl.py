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
