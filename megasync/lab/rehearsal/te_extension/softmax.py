"""Softmax of attention scores in one kernel, for the backend that is not fused."""

from __future__ import annotations

import torch


def scaled_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """The softmax of the last dimension of ``scale * scores``, as the dtype of ``scores``."""
    return (scores.float() * scale).softmax(-1).to(scores.dtype)


def scaled_softmax_backward(grad: torch.Tensor, probs: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of the scores."""
    product = grad.float() * probs.float()
    return (scale * (product - probs.float() * product.sum(-1, keepdim=True))).to(grad.dtype)


def scaled_masked_softmax_forward(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The softmax of the scores where ``mask`` is false; a row without any is zero."""
    kept = (scores.float() * scale).masked_fill(mask.bool(), -torch.inf)
    return kept.softmax(-1).nan_to_num(0.0).to(scores.dtype)


def scaled_upper_triang_masked_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """The softmax of square ``scores`` [batch * heads, length, length] with the causal mask."""
    return scaled_aligned_causal_masked_softmax_forward(scores, scale)


def scaled_aligned_causal_masked_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """The softmax with a causal mask that is aligned at the last query and the last key."""
    queries, keys = scores.shape[-2:]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return scaled_masked_softmax_forward(scores, mask, scale)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
