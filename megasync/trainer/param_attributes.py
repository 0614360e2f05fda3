"""Parameter attributes that tell Megatron how to reduce a gradient over ranks and count it in the gradient norm.

Megatron and Transformer Engine set them while building layers, by rules that differ and are not always right. With
megatron-core 0.16.1 the down projections of latent attention, which Transformer Engine keeps whole on each tensor rank,
are marked as sharded, so the norm counts them once per rank. Some attributes are set only during weight initialisation,
which this package skips because it loads every weight. The layout table knows how each parameter is sharded, so
`set_param_attributes` overwrites all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megasync.layout.families import Split
from megasync.layout.layout import Layout, split_by_bytes

# Gradients are copied into messages of at most this many bytes.
MESSAGE_BYTES = 2**27


def set_param_attributes(
    weights: Mapping[str, torch.Tensor], layout: Layout, rank: int, sequence_parallel: bool
) -> None:
    """Sets the attributes of each parameter from the layout. Call it before building gradient buffers and optimizer.

    - ``tensor_model_parallel``, ``partition_dim``: tensor ranks hold different shards. The gradient norm counts other
      parameters on the first tensor rank only. Expert-parallel ranks hold different experts, so experts always count.
    - ``partial_expert``: the ranks that share an expert all hold this parameter of it whole; only factors of adapters
    are so. Each rank computes a part of its gradient, and `sum_partial_experts` adds the parts.
    - ``sequence_parallel``: each tensor rank computes the gradient of its own tokens, so tensor ranks sum it.
    - ``allreduce``: false for experts, whose gradients are summed over the ranks with the same experts.
    - ``shared``: true for the last stage's copy of a tied embedding, and for what is whole on several ranks that share
    an expert, except the first of them. The gradient norm skips these.

    ``weights`` are this rank's, under the names of `Layout.params`. ``sequence_parallel`` is whether this run splits
    activations between layers over tensor ranks.
    """
    expert_part = layout.topology.expert_coords(rank).etp
    for item in layout.of_rank(rank):
        whole_expert = item.ep is not None and item.split is Split.REPLICATED
        sharded = item.split is not Split.REPLICATED or item.ep is not None
        attributes = {
            "tensor_model_parallel": sharded,
            "partition_dim": -1 if not sharded else 1 if item.split is Split.ROW else 0,
            "partition_stride": 1,
            "sequence_parallel": sequence_parallel and not sharded and not item.all_tokens,
            "allreduce": item.ep is None,
            "partial_expert": whole_expert and layout.topology.expert_tensor_size > 1,
            "shared": item.copy or (whole_expert and expert_part > 0),
        }
        for name, value in attributes.items():
            setattr(weights[item.param], name, value)


def sum_partial_experts(params: Iterable[torch.nn.Parameter]) -> None:
    """Adds the gradients of ``partial_expert`` parameters over the ranks that share an expert. All of them call it.

    Call it when gradients have been reduced over data-parallel ranks. With a distributed optimizer each rank then has
    the sum of one range of elements only; ranks that share an expert have the same one.
    """
    marked: list[Any] = [param for param in params if getattr(param, "partial_expert", False)]
    group = cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group())
    sized = ((param.main_grad, param.main_grad.nbytes) for param in marked)
    for grads in split_by_bytes(sized, MESSAGE_BYTES):
        message = torch.cat([grad.view(-1) for grad in grads])
        dist.all_reduce(message, group=group)
        for grad, total in zip(grads, message.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
