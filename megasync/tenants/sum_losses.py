"""Losses that are sums over the positions of each sequence, under the names and options of Tinker's protocol.

Nothing is normalised: a client that wants a mean divides its weights or advantages. Thresholds bound the ratio of the
policy to the sampler's itself, not its distance from 1. Ratios are at most e^`MAX_LOG_RATIO`, so that a loss is finite
where its inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megasync.algorithms.losses import MAX_LOG_RATIO

# (log-probs of targets, which carry the gradient; inputs by name; the sequence of each target, int64) -> losses. All
# are [targets].
Compute = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class SumLoss:
    """A loss, and the inputs that it reads at each target."""

    compute: Compute
    required: Sequence[str] = ("logprobs", "advantages")
    # Inputs that may be absent, and their value then.
    defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    # Whether a client may set these values in the configuration of a pass.
    configurable: bool = True
    # Whether a position may have several targets.
    several: bool = False


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], segments: Tensor) -> Tensor:
    """``-weight log pi``; with gradients as weights also the backward pass of a loss that a client computes."""
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], segments: Tensor) -> Tensor:
    """``-A pi / pi_old``."""
    return -_ratio(logprobs - inputs["logprobs"]) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], segments: Tensor) -> Tensor:
    """``-min(ratio A, clip(ratio) A)``: Schulman et al. 2017, arXiv 1707.06347, equation 7."""
    return _clipped(_ratio(logprobs - inputs["logprobs"]), inputs)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], segments: Tensor) -> Tensor:
    """``-sg[clip(ratio)] A log pi``: MiniMax 2025, arXiv 2506.13585."""
    ratio = _ratio(logprobs - inputs["logprobs"]).detach()
    return -ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"]) * inputs["advantages"] * logprobs


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], segments: Tensor) -> Tensor:
    """``-(A log pi - beta / 2 (log pi - log pi_old)^2)``; see `losses.dro`."""
    penalty = 0.5 * inputs["beta"] * (logprobs - inputs["logprobs"]).square()
    return penalty - inputs["advantages"] * logprobs


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], segments: Tensor) -> Tensor:
    """PPO with the ratio of a sequence, the geometric mean over the tokens of its mask: Zheng et al. 2025, 2507.18071.

    Its token form: each position, in the mask or not, has the gradient of its own log-prob.
    """
    mask = (inputs["sequence_ratio_mask"] != 0).to(logprobs.dtype)
    totals = logprobs.new_zeros(2, int(segments.max()) + 1)
    log_ratios = (logprobs.detach() - inputs["logprobs"]) * mask
    sums, counts = totals.index_add(1, segments, torch.stack([log_ratios, mask]))
    of_sequence = (sums / counts.clamp(min=1))[segments]
    return _clipped(_ratio(of_sequence + logprobs - logprobs.detach()), inputs)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _clipped(ratio: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    bounded = ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], bounded * inputs["advantages"])


_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, SumLoss] = {
    "cross_entropy": SumLoss(cross_entropy, (), {"weights": 1.0}, configurable=False, several=True),
    "importance_sampling": SumLoss(importance_sampling),
    "ppo": SumLoss(ppo, defaults=_CLIPS),
    "cispo": SumLoss(cispo, defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": SumLoss(dro, defaults={"beta": 0.05}),
    "gspo": SumLoss(gspo, ("logprobs", "advantages", "sequence_ratio_mask"), _CLIPS),
}
# Losses of the protocol that cannot be computed, and why.
REFUSED: Mapping[str, str] = {
    "stable_reinforce": "its objective is not published; use ppo for samples of older policies, or importance_sampling",
    "custom": "uploaded losses are not run here; give the function itself to forward_backward_custom",
}
