"""MXFP4: elements of 4 bits, with one power of two for each 32 of them, as gpt-oss stores its experts.

For a tensor ``X`` of shape [experts, inputs, outputs] a folder has ``X_blocks``, [experts, outputs, inputs / 32, 16]
bytes of two elements each, the lower half first, and ``X_scales``, [experts, outputs, inputs / 32] exponents with a
bias of 127 (OCP Microscaling Formats 1.0, section 5). All values are exact in bfloat16 and float32, except with the
smallest and largest exponents, which no trained model has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from megasync.errors import ConfigError
from megasync.layout.layout import Box

if TYPE_CHECKING:
    import torch

# The ``quant_method`` of such a folder.
MXFP4: Literal["mxfp4"] = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
# Elements that share a scale.
GROUP = 32
# The name of the bytes' dtype in safetensors.
BYTES = "U8"
# The elements 0 to 7; 8 to 15 are their negatives.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def stored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of blocks and scales of a tensor [experts, inputs, outputs]."""
    experts, inputs, outputs = shape
    scales = (experts, outputs, -(-inputs // GROUP))
    return (*scales, GROUP // 2), scales


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Elements in float32.

    Args:
        blocks: uint8 [..., groups, 16].
        scales: uint8 [..., groups].

    Returns:
        [..., groups * 32].
    """
    import torch

    values = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[pairs.int()], scales.int()[..., None] - _BIAS).flatten(-2)


def read_box(blocks: Any, scales: Any, inputs: int, box: Box) -> torch.Tensor:
    """A box of a tensor [experts, ``inputs``, outputs], given slices of its stored tensors, in float32."""
    import torch

    outputs = slice(box.col, box.col + box.cols)
    parts: list[torch.Tensor] = []
    row = box.row
    while row < box.row + box.rows:
        expert, first = divmod(row, inputs)
        last = min(inputs, first + box.row + box.rows - row)
        groups = slice(first // GROUP, -(-last // GROUP))
        chosen = (slice(expert, expert + 1), outputs, groups)
        values = dequantize(blocks[chosen], scales[chosen])[0]
        parts.append(values[:, first - groups.start * GROUP :][:, : last - first].t())
        row += last - first
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def dequantized(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a whole folder, with those in MXFP4 as bfloat16, which is exact.

    Blocks and scales may arrive in any order. Raises ConfigError for one without the other.
    """
    import torch

    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        ending = next((ending for ending in (BLOCKS, SCALES) if name.endswith(ending)), None)
        if ending is None:
            yield name, tensor
            continue
        stem = name.removesuffix(ending)
        other = stem + (SCALES if ending == BLOCKS else BLOCKS)
        if other not in waiting:
            waiting[name] = tensor
            continue
        held = {name: tensor, other: waiting.pop(other)}
        # One expert at a time: in float32 a tensor is eight times its stored size.
        pairs = zip(held[stem + BLOCKS], held[stem + SCALES], strict=True)
        yield stem, torch.stack([dequantize(*pair).bfloat16().t() for pair in pairs])
    if waiting:
        raise ConfigError(f"{next(iter(waiting))!r} is one of blocks and scales in MXFP4; the other is missing")
