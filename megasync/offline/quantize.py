"""Writes a Hugging Face folder in block FP8, for servers that keep it so (`rollout.fp8`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from megasync.layout.block_fp8 import SCALES, Block, block_maxima, quantize, scales_of
from megasync.layout.layout import Box, Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.quantized import QuantizedLayout, linear_matrices
from megasync.layout.shards import HfFolder, box_of, dtypes_of, fill_param, pieces_by_param, write_folder
from megasync.layout.topology import Topology

# Tensors and scales that are cached: those of one fused parameter are read in turn.
_KEPT = 8


def write_fp8_folder(source: Path, out: Path, block: Block, dtype: str, power_of_two: bool = False) -> None:
    """Quantizes the linear layers of a folder; its other tensors get ``dtype``.

    Raises ConfigError for a model whose matrices cannot be cut into such blocks, and CheckpointError for a folder that
    cannot be read, a non-empty output folder, or a failed write.
    """
    plain = Layout(read_hf_config(source), Topology())
    layout = QuantizedLayout(plain, block, linear_matrices(plain, block), power_of_two)
    tensor_shapes = plain.hf_tensors
    with HfFolder(source) as folder:
        read_box = folder.reading(tensor_shapes)

        @lru_cache(_KEPT)
        def read(name: str) -> torch.Tensor:
            rows, *cols = tensor_shapes[name]
            return read_box(name, _box(tensor_shapes[name])).view(rows, *cols)

        @lru_cache(_KEPT)
        def scales(name: str) -> torch.Tensor:
            return scales_of(block_maxima(read(name), _box(tensor_shapes[name]), block), power_of_two)

        def quantized(name: str, box: Box) -> torch.Tensor:
            if name.endswith(SCALES):
                return box_of(scales(name.removesuffix(SCALES)), box)
            if name + SCALES not in layout.hf_tensors:
                return box_of(read(name), box)
            grid = block.covering(box)
            return quantize(box_of(read(name), box), box_of(scales(name), grid), box, block)

        shapes, pieces = layout.params(0), pieces_by_param(layout, 0)
        dtypes = dtypes_of(layout, 0, getattr(torch, dtype))

        @lru_cache(_KEPT)
        def param(_: int, name: str) -> torch.Tensor:
            return fill_param(shapes[name], pieces[name], quantized, dtypes[name])

        write_folder(source, out, layout, dtype, param)


def _box(shape: tuple[int, ...]) -> Box:
    return Box(0, shape[0], 0, shape[1] if len(shape) > 1 else 1)
