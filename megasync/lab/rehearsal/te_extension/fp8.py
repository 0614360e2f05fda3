"""Quantised tensors: FP8 with a scaling factor per tensor or per block, emulated with torch's 8-bit floats.

The classes of tensors and quantisers are Transformer Engine's own; here are the functions that fill them. A tensor has
its values by rows, and for products with its transpose also by columns, that is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megasync.lab.rehearsal.cuda import current_device
from megasync.lab.rehearsal.te_extension.cast import torch_dtype

BLOCK = 128


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False
) -> Any:
    """A tensor in the format of ``quantizer`` with uninitialised values; to other tensors it looks like ``dtype``."""
    shape = tuple(shape)
    device = current_device() if torch.device(device).type == "cuda" else torch.device(device)
    common = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if hasattr(quantizer, "block_len"):
        kind = quantizer.storage_metadata(dtype)["cls"]
        inner = quantizer.alloc_tensors(shape, device=device)
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        common |= {name: inner.get(f"_{name}") for name in names}
        common["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    elif type(quantizer).__name__ in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        from transformer_engine.pytorch.tensor.float8_tensor import (  # pyright: ignore[reportMissingImports]
            Float8Tensor,
            Float8TensorStorage,
        )

        kind = Float8TensorStorage if quantizer.internal else Float8Tensor
        across = (shape[-1], *shape[:-1])
        common |= {
            "data": torch.empty(shape, dtype=torch.uint8, device=device),
            "data_transpose": torch.empty(across, dtype=torch.uint8, device=device)
            if quantizer.columnwise_usage
            else None,
            "fp8_scale_inv": torch.empty(1, dtype=torch.float32, device=device),
        }
    else:
        raise NotImplementedError(f"a rehearsal has no stand-in for the format of {type(quantizer).__name__}")
    if quantizer.internal:
        return kind(fake_dtype=dtype, **common)
    return kind(shape=shape, dtype=dtype, device=device, requires_grad=False, **common)


def quantize(tensor: Any, quantizer: Any, out: Any = None, noop: torch.Tensor | None = None) -> Any:
    """``tensor`` in the format of ``quantizer``, in ``out`` if it is given.

    Nothing happens if the flag ``noop`` is set. A quantiser of delayed scaling also records the largest magnitude.
    """
    if out is None:
        out = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, tensor.device)
    if tensor.device.type == "meta" or (noop is not None and noop.item()):
        return out
    values = tensor.detach().float()
    (_fill_blocks if hasattr(quantizer, "block_len") else _fill_tensor)(values, quantizer, out)
    return out


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    """The values of a tensor with one scaling factor."""
    return (tensor._data.view(torch_dtype(tensor._fp8_dtype)).float() * tensor._scale_inv).to(torch_dtype(dtype))


def split_quantize(tensor: torch.Tensor, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """Parts of the rows of ``tensor``, each in the format of its quantiser."""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(sizes), quantizers, strict=True)]


def fused_multi_row_padding(
    rows: torch.Tensor, out: torch.Tensor, sizes: Sequence[int], padded_sizes: Sequence[int]
) -> None:
    """Writes parts of ``rows`` to ``out``, each filled up to its padded size with zeros."""
    for part, target in zip(rows.split(list(sizes)), out.split(list(padded_sizes)), strict=True):
        target[: len(part)].copy_(part)
        target[len(part) :].zero_()


def fused_multi_row_unpadding(
    rows: torch.Tensor, out: torch.Tensor, padded_sizes: Sequence[int], sizes: Sequence[int]
) -> None:
    """The inverse of `fused_multi_row_padding`."""
    for part, target in zip(rows.split(list(padded_sizes)), out.split(list(sizes)), strict=True):
        target.copy_(part[: len(target)])


def bgrad_quantize(grad: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """The gradient of a bias, and ``grad`` in the format of ``quantizer``."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype), quantize(grad, quantizer)


def fp8_transpose(data: torch.Tensor, dtype: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """8-bit values [..., columns] as [columns, ...]."""
    across = data.movedim(-1, 0).contiguous()
    return across if out is None else out.copy_(across)


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``tensor`` [a, b, ...] as [b, a, ...]."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    algorithm: str,
    dtype: Any,
    margin: float,
) -> None:
    """Delayed scaling: moves the histories of magnitudes [steps, tensors] on, and computes the next factors.

    ``reduced`` are the magnitudes of this step for all histories in order.
    """
    limit = torch.finfo(torch_dtype(dtype)).max
    parts = reduced.split([history.shape[1] for history in histories])
    for now, history, scale in zip(parts, histories, scales, strict=True):
        history[0].copy_(now)
        amax = history.amax(0) if algorithm == "max" else history[0].clone()
        history.copy_(history.roll(-1, 0))
        history[0].zero_()
        usable = (amax > 0) & amax.isfinite()
        scale.copy_(torch.where(usable, limit / amax / 2**margin, scale))


def _fill_tensor(values: torch.Tensor, quantizer: Any, out: Any) -> None:
    """One factor for all values: that of an earlier step (delayed scaling), or that of these values."""
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    if hasattr(quantizer, "scale"):
        quantizer.amax.copy_(amax)
        scale = quantizer.scale.float()
    else:
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
        scale = _factor(amax, quantizer)
    data = _cast(values * scale, quantizer)
    out._scale_inv.copy_(1.0 / scale)
    if out._data is not None:
        out._data.copy_(data)
    if out._transpose is not None:
        out._transpose.copy_(data.movedim(-1, 0))
        out._transpose_invalid = False


def _fill_blocks(values: torch.Tensor, quantizer: Any, out: Any) -> None:
    """A factor for 128 values of a row (1D), or for 128 x 128 values (2D)."""
    flat = values.reshape(-1, values.shape[-1])
    square = quantizer.block_scaling_dim == 2
    rows = BLOCK if square else 1
    for kind, matrix in (("rowwise", flat), ("columnwise", flat.t())):
        data = getattr(out, f"_{kind}_data")
        if data is None:
            continue
        cast, inverse = _blocks(matrix, rows, quantizer)
        data.copy_(cast.view(data.shape))
        # Factors of rows are stored transposed; all are padded to multiples of four.
        target = getattr(out, f"_{kind}_scale_inv").zero_()
        stored = inverse if square else inverse.t()
        target[: stored.shape[0], : stored.shape[1]] = stored


def _blocks(matrix: torch.Tensor, rows: int, quantizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of ``matrix``, and the inverse factor of each block of ``rows`` x 128."""
    height, width = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -width % BLOCK, 0, -height % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    scale = _factor(tiles.abs().amax((1, 3)), quantizer)
    data = _cast(tiles * scale[:, None, :, None], quantizer).view(padded.shape)
    return data[:height, :width], 1.0 / scale


def _factor(amax: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """The factor that maps ``amax`` to the largest 8-bit value; 1 if there is none."""
    limit = torch.finfo(torch_dtype(quantizer.dtype)).max
    usable = (amax > 0) & amax.isfinite()
    scale = torch.where(usable, limit / amax.clamp(min=quantizer.amax_epsilon), 1.0)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return scale.log2().floor().exp2() if quantizer.force_pow_2_scales else scale


def _cast(scaled: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Rounded to 8-bit floats, with the largest in place of larger ones; as bytes."""
    dtype = torch_dtype(quantizer.dtype)
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype).view(torch.uint8)
