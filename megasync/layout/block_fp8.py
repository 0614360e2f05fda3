"""Block FP8: weights stored as float8_e4m3fn, with one scale for each block of rows and columns.

The scales of a tensor ``X.weight`` are the tensor ``X.weight_scale_inv``, one row for each row of blocks. An element is
its stored value times the scale of its block, computed in float32. The last block of a row or column may be smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from megasync.errors import ConfigError
from megasync.layout.layout import Box

if TYPE_CHECKING:
    import torch

SCALES = "_scale_inv"
# The dtype of the values, by its name in safetensors.
VALUES = "F8_E4M3"
# The dtypes of scales: each converts exactly to float32. Qwen3-FP8 has bfloat16.
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


class Block(NamedTuple):
    """Rows and columns that share a scale."""

    rows: int
    cols: int

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.cols)

    def covering(self, box: Box) -> Box:
        """The scales of the blocks that a box touches."""
        row, col = box.row // self.rows, box.col // self.cols
        last_row, last_col = (box.row + box.rows - 1) // self.rows, (box.col + box.cols - 1) // self.cols
        return Box(row, last_row - row + 1, col, last_col - col + 1)


def stored_block(config: Mapping[str, Any]) -> Block | None:
    """The block of the weights that belong to a config.json; None if they are not quantized.

    Raises ConfigError for every quantization except block FP8.
    """
    stated: Any = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return None
    values = cast(Mapping[str, Any], stated if isinstance(stated, Mapping) else {})
    fix = (
        "use the model in block FP8 (quant_method 'fp8' with a weight_block_size), gpt-oss in MXFP4 ('mxfp4'), or "
        "unquantized"
    )
    if (method := values.get("quant_method")) != "fp8":
        raise ConfigError(f"quantization_config.quant_method={method!r} in config.json cannot be loaded; {fix}")
    if (form := values.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"quantization_config.fmt={form!r} in config.json cannot be loaded, only 'e4m3'; {fix}")
    block: Any = values.get("weight_block_size")
    sizes = cast(list[Any], block if isinstance(block, list) else [])
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(
            f"quantization_config.weight_block_size={block!r} in config.json must be two positive whole numbers, such "
            f"as [128, 128]; FP8 with a scale for each tensor or channel cannot be loaded; {fix}"
        )
    return Block(sizes[0], sizes[1])


def dequantize(values: torch.Tensor, scales: torch.Tensor, box: Box, block: Block) -> torch.Tensor:
    """A rectangle of a matrix in float32.

    Args:
        values: the stored elements of ``box``, [rows, cols].
        scales: of the blocks that the box touches (`Block.covering`), [rows, cols] of blocks.
    """
    result, scales = values.float(), scales.float()
    skipped = box.col % block.cols
    for index, of_row in enumerate(scales):
        first = (box.row // block.rows + index) * block.rows - box.row
        of_elements = of_row.repeat_interleave(block.cols)[skipped : skipped + box.cols]
        result[max(0, first) : first + block.rows] *= of_elements
    return result


def dequantized(weights: Iterable[tuple[str, torch.Tensor]], block: Block) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a whole folder, with those in block FP8 as float32 and without scales.

    Values and scales may arrive in any order. Raises ConfigError for values without scales.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        scaled = name.endswith(SCALES)
        if not scaled and str(tensor.dtype) != "torch.float8_e4m3fn":
            yield name, tensor
            continue
        other = name.removesuffix(SCALES) if scaled else name + SCALES
        if other not in waiting:
            waiting[name] = tensor
            continue
        values, scales = (waiting.pop(other), tensor) if scaled else (tensor, waiting.pop(other))
        if scales.shape != block.grid(tuple(values.shape)):
            raise ConfigError(f"the scales of {name!r} have shape {list(scales.shape)}, not that of blocks of {block}")
        whole = Box(0, values.shape[0], 0, values.shape[1])
        yield name.removesuffix(SCALES), dequantize(values, scales, whole, block)
    if waiting:
        raise ConfigError(f"{next(iter(waiting))!r} has values or scales in block FP8 only, not both")
