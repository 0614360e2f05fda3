"""Element types, and tensors in and out of quantised formats."""

from __future__ import annotations

from typing import Any

import torch

from megasync.lab.rehearsal.te_extension.enums import DType

_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch type of a `DType`, of Transformer Engine's own enumeration or of a torch type."""
    return dtype if isinstance(dtype, torch.dtype) else _DTYPES[DType(int(dtype))]


def as_plain(tensor: Any) -> torch.Tensor:
    """The values of a tensor; those of a quantised one as float32, as a product takes them.

    The dtype that it looks like to other tensors may be coarser, and differs with the way on which it came.
    """
    return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor.dequantize(dtype=torch.float32)
