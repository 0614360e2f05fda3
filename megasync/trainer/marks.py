"""Attributes by which Megatron decides how ranks combine a parameter's gradient and count it in the gradient norm.

Megatron and Transformer Engine set them while they build layers, each by rules of its own, and not always rightly: with
megatron-core 0.16.1, the down projections of latent attention, which Transformer Engine keeps whole on each tensor rank,
are marked as cut, so that the norm counts them once per rank. Some are set only while initial weights are drawn, which
this package skips because it loads every weight. The layout table knows how each parameter lies on the ranks, so
`mark_parameters` overwrites all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megasync.layout.families import Split
from megasync.layout.layout import Layout


def mark_parameters(weights: Mapping[str, torch.Tensor], layout: Layout, rank: int, sequence_parallel: bool) -> None:
    """Sets each parameter's marks as the layout has it; call it before gradient buffers and the optimizer are built.

    - ``tensor_model_parallel``, ``partition_dim``: tensor ranks hold different parts. The gradient norm counts other
      parameters on the first tensor rank only. Expert-parallel ranks hold different experts, so those always count.
    - ``sequence_parallel``: each tensor rank computes the gradient from its own tokens, so ranks sum it.
    - ``allreduce``: false for experts, whose gradients are summed over the ranks with the same experts.
    - ``shared``: the last stage's copy of a tied embedding, which the gradient norm leaves out.

    Args:
        weights: this rank's, under the names of `Layout.params`.
        sequence_parallel: whether this run splits activations between layers over tensor ranks.
    """
    for item in layout.of_rank(rank):
        param, cut = weights[item.param], item.split is not Split.REPLICATED or item.ep is not None
        param.tensor_model_parallel = cut
        param.partition_dim = -1 if not cut else 1 if item.split is Split.ROW else 0
        param.partition_stride = 1
        param.sequence_parallel = sequence_parallel and not cut and not item.all_tokens
        param.allreduce = item.ep is None
        param.shared = item.copy
