"""The layout of weights whose matrices servers keep in block FP8.

A quantized matrix is cut over the ranks like the parameter that it comes from. Its scales are a tensor of their own,
which every rank with a part of the matrix has whole (`trainer.quantized`): they are few, and blocks may lie on the
border of two ranks. So nothing behind the layout (plans, transports, digests) distinguishes quantized weights from
others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from megasync.errors import ConfigError
from megasync.layout.block_fp8 import SCALES, Block
from megasync.layout.families import Split
from megasync.layout.layout import Layout, Placed
from megasync.layout.topology import Topology

# The dtypes of values and scales, by torch's names.
VALUES_DTYPE, SCALES_DTYPE = "float8_e4m3fn", "float32"
# What the names of the matrices of linear layers contain. Routers, embeddings and the head are never quantized.
_LINEAR = "_proj"


class QuantizedLayout(Layout):
    """``layout`` with the tensors called ``names`` in block FP8.

    A parameter of scales has the name of its Hugging Face tensor. With ``power_of_two`` scales are rounded up to powers
    of two (``scale_fmt: ue8m0``). Raises ConfigError for a model with a vision tower; once a stage is placed, also for
    tensors that Megatron fuses and of which only some are quantized, and for experts in a single tensor.
    """

    def __init__(self, layout: Layout, block: Block, names: Collection[str], power_of_two: bool = False) -> None:
        super().__init__(layout.hf_config, layout.topology, layout.spec, layout.value_head)
        if self.frozen_tensors:
            raise ConfigError(
                f"models of type {self.hf_config['model_type']} have a vision tower, beside which servers of block FP8 "
                f"have not been tested; serve the model unquantized"
            )
        self.block = block
        self.power_of_two = power_of_two
        self._plain = layout
        self._names = frozenset(names)

    def on(self, topology: Topology) -> QuantizedLayout:
        return QuantizedLayout(self._plain.on(topology), self.block, self._names, self.power_of_two)

    def _place_stage(self, pp: int) -> Iterator[Placed]:
        for item in super()._place_stage(pp):
            tensors = [name for name, _ in item.tensors]
            quantized = self._names.intersection(tensors)
            if not quantized:
                yield item
                continue
            if item.stacked is not None:
                raise ConfigError(f"{tensors[0]!r} holds all experts in one tensor, which has no block FP8 form")
            if len(quantized) < len(tensors):
                plain = next(name for name in tensors if name not in quantized)
                raise ConfigError(
                    f"{min(quantized)!r} is in block FP8 and {plain!r} is not, but the trainer fuses them"
                )
            yield replace(item, dtype=VALUES_DTYPE)
            for name, shape in item.tensors:
                scales = name + SCALES
                grid = ((scales, self.block.grid(shape)),)
                yield Placed(Split.REPLICATED, scales, grid, SCALES_DTYPE, joined=True, ep=item.ep)

    @property
    def stated(self) -> dict[str, Any]:
        """The ``quantization_config`` of a folder with these tensors."""
        matrices = (name for name, shape in self._plain.hf_tensors.items() if len(shape) == 2)
        plain = [name.removesuffix(".weight") for name in matrices if name not in self._names]
        scales = {"scale_fmt": "ue8m0"} if self.power_of_two else {}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": plain,
            **scales,
        }

    def quantized(self, rank: int) -> list[Placed]:
        """The quantized parameters of a rank, in the same order on all ranks that hold parts of the same tensors."""
        return [item for item in self.of_rank(rank) if item.dtype == VALUES_DTYPE]


def linear_matrices(layout: Layout, block: Block) -> set[str]:
    """The names of the matrices of linear layers that fill at least a block.

    Raises ConfigError for matrices that servers fuse and that do not end with a block.
    """
    names: set[str] = set()
    for item in chain.from_iterable(layout.placed(pp) for pp in range(layout.topology.pipeline)):
        matrices = [(name, shape) for name, shape in item.tensors if len(shape) == 2 and _LINEAR in name]
        large = [shape for _, shape in matrices if shape[0] >= block.rows and shape[1] >= block.cols]
        if item.stacked is not None or len(large) < len(item.tensors):
            continue
        for name, shape in matrices:
            if len(matrices) > 1 and shape[0] % block.rows:
                raise ConfigError(
                    f"{name!r} has {shape[0]} rows, which is not a multiple of {block.rows}: servers keep it in one "
                    f"matrix with others, and no block may belong to two of them; choose a smaller --block"
                )
            names.add(name)
    if not names:
        raise ConfigError(
            f"no matrix of the model fills a block of {block.rows} x {block.cols}; choose a smaller --block"
        )
    return names
