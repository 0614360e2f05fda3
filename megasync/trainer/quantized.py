"""A rank's weights in block FP8, for servers that keep them so.

A block may lie on the border of tensor-parallel ranks, so these agree on the largest magnitude of each block before
they quantize: one small message for all matrices. The values then are those of the whole matrix quantized at once, and
every rank with a part of a matrix has all of its scales. Takes one byte for each quantized weight, beside the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megasync.layout.block_fp8 import SCALES, block_maxima, quantize, scales_of, strips
from megasync.layout.layout import Box, Piece, Placed
from megasync.layout.quantized import SCALES_DTYPE, VALUES_DTYPE, QuantizedLayout
from megasync.layout.shards import moved, piece_of, pieces_by_param


class QuantizedWeights:
    """The weights of a rank as ``layout`` has them. ``weights`` are its parameters by the names of the plain layout."""

    def __init__(self, layout: QuantizedLayout, rank: int, weights: Mapping[str, torch.Tensor]) -> None:
        self._block = layout.block
        self._power_of_two = layout.power_of_two
        self._weights = weights
        items, pieces = layout.quantized(rank), pieces_by_param(layout, rank)
        self._pieces = [piece for item in items for piece in pieces[item.param]]
        self._values = {
            item.param: torch.zeros_like(weights[item.param], dtype=getattr(torch, VALUES_DTYPE)) for item in items
        }
        # One memory for the scales of all matrices that are cut over the same ranks, so that one message serves them.
        self._scales: dict[str, torch.Tensor] = {}
        self._memories: dict[dist.ProcessGroup, torch.Tensor] = {}
        device = next(iter(weights.values())).device
        for group, of_group in self._by_group(items).items():
            grids = {name + SCALES: layout.hf_tensors[name + SCALES] for item in of_group for name, _ in item.tensors}
            sizes = [rows * cols for rows, cols in grids.values()]
            memory = torch.zeros(sum(sizes), dtype=getattr(torch, SCALES_DTYPE), device=device)
            self._memories[group] = memory
            views = zip(grids.items(), memory.split(sizes), strict=True)
            self._scales |= {name: values.view(grid) for (name, grid), values in views}

    @staticmethod
    def _by_group(items: Iterable[Placed]) -> dict[dist.ProcessGroup, list[Placed]]:
        """The parameters by the ranks over which they are cut."""
        groups: dict[dist.ProcessGroup, list[Placed]] = defaultdict(list)
        for item in items:
            of_experts = item.ep is not None
            group = (
                parallel_state.get_expert_tensor_parallel_group()
                if of_experts
                else parallel_state.get_tensor_model_parallel_group()
            )
            groups[cast(dist.ProcessGroup, group)].append(item)
        return groups

    def params(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under the names of `QuantizedLayout.params`; always the same tensors."""
        return {**self._weights, **self._values, **self._scales}

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantizes the present weights. A collective of the ranks that hold parts of the same matrices."""
        for memory in self._memories.values():
            memory.zero_()
        for piece in self._pieces:
            for box, part in self._strips(piece):
                blocks = self._scales_of(piece, box)
                torch.maximum(blocks, block_maxima(part, box, self._block), out=blocks)
        for group, memory in self._memories.items():
            if group.size() > 1:
                dist.all_reduce(memory, op=dist.ReduceOp.MAX, group=group)
            memory.copy_(scales_of(memory, self._power_of_two))
        for piece in self._pieces:
            values = piece_of(self._values[piece.param], piece)
            for box, part in self._strips(piece):
                inside = moved(box, piece.hf_box, Box(0, 0, 0, 0))
                target = values[inside.row : inside.row + inside.rows]
                target.copy_(quantize(part, self._scales_of(piece, box), box, self._block))

    def _strips(self, piece: Piece) -> Iterable[tuple[Box, torch.Tensor]]:
        """The weights of a piece, some rows at a time: boxes of the matrix, and what is in them."""
        weights = piece_of(self._weights[piece.param].detach(), piece)
        for box in strips(piece.hf_box, self._block):
            first = box.row - piece.hf_box.row
            yield box, weights[first : first + box.rows]

    def _scales_of(self, piece: Piece, box: Box) -> torch.Tensor:
        """The view of the scales of the blocks that a box of a piece's matrix touches."""
        grid = self._block.covering(box)
        scales = self._scales[piece.hf_name + SCALES]
        return scales[grid.row : grid.row + grid.rows, grid.col : grid.col + grid.cols]
