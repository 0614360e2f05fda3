"""Block FP8: weights stored as float8_e4m3fn, with one scale for each block of rows and columns.

The scales of a tensor ``X.weight`` are the tensor ``X.weight_scale_inv``, one row for each row of blocks. An element is
its stored value times the scale of its block, computed in float32. The last block of a row or column may be smaller.

Quantization is that of DeepGEMM's ``per_block_cast_to_fp8``, which SGLang uses too: the largest element of a block
becomes 448, and with ``scale_fmt: ue8m0`` scales are rounded up to powers of two.
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
# The largest value, and the least maximum of a block that scales are made from: all of a block may be zero.
LARGEST, LEAST = 448.0, 1e-4
# Elements that are quantized at a time, which bounds the memory for copies of them.
STRIP = 1 << 24
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


def strips(box: Box, block: Block) -> Iterator[Box]:
    """A box in boxes of whole rows, cut between blocks, of about `STRIP` elements."""
    height = max(1, STRIP // (box.cols * block.rows)) * block.rows
    row, end = box.row, box.row + box.rows
    while row < end:
        below = min(end, (row // block.rows) * block.rows + height)
        yield box._replace(row=row, rows=below - row)
        row = below


def block_maxima(part: torch.Tensor, box: Box, block: Block) -> torch.Tensor:
    """The largest magnitude in each block that a box touches (`Block.covering`), float32, of the box's elements alone.

    ``part`` is the box, [rows, cols].
    """
    return _blocks(part, box, block).abs().amax((1, 3)).float()


def scales_of(maxima: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """The scales of blocks with these largest magnitudes, float32."""
    import torch

    scales = maxima.clamp(min=LEAST) / LARGEST
    if not power_of_two:
        return scales
    fractions, exponents = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponents - (fractions == 0.5).int())


def quantize(part: torch.Tensor, scales: torch.Tensor, box: Box, block: Block) -> torch.Tensor:
    """The values of a box, [rows, cols] float8_e4m3fn, given the scales of the blocks that it touches."""
    import torch

    top, left = box.row % block.rows, box.col % block.cols
    values = (_blocks(part, box, block) * (1.0 / scales)[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[top : top + box.rows, left : left + box.cols]


def _blocks(part: torch.Tensor, box: Box, block: Block) -> torch.Tensor:
    """A box as [rows of blocks, rows, columns of blocks, columns], with zeros where its blocks go beyond it."""
    top, left, grid = box.row % block.rows, box.col % block.cols, block.covering(box)
    shape = (grid.rows * block.rows, grid.cols * block.cols)
    if part.shape != shape:
        padded = part.new_zeros(shape)
        padded[top : top + box.rows, left : left + box.cols] = part
        part = padded
    return part.reshape(grid.rows, block.rows, grid.cols, block.cols)


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
        tensor_box = Box(0, values.shape[0], 0, values.shape[1])
        yield name.removesuffix(SCALES), dequantize(values, scales, tensor_box, block)
    if waiting:
        raise ConfigError(f"{next(iter(waiting))!r} has values or scales in block FP8 only, not both")
