"""Parameter attributes that tell Megatron how to reduce a gradient over ranks and count it in the gradient norm.

Megatron and Transformer Engine set them while building layers, by rules that differ and are not always right. With
megatron-core 0.16.1 the down projections of latent attention, which Transformer Engine keeps whole on each tensor rank,
are marked as sharded, so the norm counts them once per rank. Some attributes are set only during weight initialisation,
which this package skips because it loads every weight. The layout table knows how each parameter is sharded, so
`set_param_attributes` overwrites all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megasync.layout.families import Split
from megasync.layout.layout import Layout


def set_param_attributes(
    weights: Mapping[str, torch.Tensor], layout: Layout, rank: int, sequence_parallel: bool
) -> None:
    """Sets the attributes of each parameter from the layout. Call it before building gradient buffers and optimizer.

    - ``tensor_model_parallel``, ``partition_dim``: tensor ranks hold different shards. The gradient norm counts other
      parameters on the first tensor rank only. Expert-parallel ranks hold different experts, so experts always count.
    - ``sequence_parallel``: each tensor rank computes the gradient of its own tokens, so tensor ranks sum it.
    - ``allreduce``: false for experts, whose gradients are summed over the ranks with the same experts.
    - ``shared``: true for the last stage's copy of a tied embedding, which the gradient norm skips.

    ``weights`` are this rank's, under the names of `Layout.params`. ``sequence_parallel`` is whether this run splits
    activations between layers over tensor ranks.
    """
    for item in layout.of_rank(rank):
        sharded = item.split is not Split.REPLICATED or item.ep is not None
        attributes = {
            "tensor_model_parallel": sharded,
            "partition_dim": -1 if not sharded else 1 if item.split is Split.ROW else 0,
            "partition_stride": 1,
            "sequence_parallel": sequence_parallel and not sharded and not item.all_tokens,
            "allreduce": item.ep is None,
            "shared": item.copy,
        }
        for name, value in attributes.items():
            setattr(weights[item.param], name, value)
