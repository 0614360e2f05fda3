"""Norms of queries and keys that Megatron lacks or computes otherwise.

Those over all heads together (MiniMax-M2) are shared by tensor ranks: each has the channels of its own heads and the
weights for them, and the mean of squares is that of all ranks. Those without weights (Llama 4) are per head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import rms_norm


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm over heads and their channels, with the constructor of Megatron's norms of one head.

    ``hidden_size`` is the width of a head.
    """

    # On all tensor ranks.
    heads: int

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
        ranks = config.tensor_model_parallel_size
        channels = self.heads // ranks * hidden_size
        self.weight = torch.nn.Parameter(torch.empty(channels, dtype=config.params_dtype, device=device))
        self._eps, self._ranks, self._width = eps, ranks, self.heads * hidden_size

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """``heads`` [..., heads of this rank, channels], normalised in float32."""
        channels = heads.flatten(-2).float()
        squares = channels.square().sum(-1, keepdim=True)
        if self._ranks > 1:
            # The sum of all ranks, whose gradient is the sum of all ranks' gradients.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = channels * torch.rsqrt(squares / self._width + self._eps)
        return (normed.to(heads.dtype) * self.weight).view_as(heads)


class UnweightedNorm(torch.nn.Module):
    """RMSNorm of each head without weights, with Megatron's constructor. Megatron's own is compiled."""

    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self._eps = eps

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """``heads`` [..., channels], normalised in float32."""
        return rms_norm(heads, heads.shape[-1:], eps=self._eps)
