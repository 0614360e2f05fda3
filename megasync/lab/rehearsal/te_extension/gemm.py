"""Matrix products of Transformer Engine's linear and grouped linear layers.

They follow cuBLAS, which is column-major: ``A`` is the second factor. With ``transa`` and ``transb`` as in the layouts
"TN" (forward), "NN" (gradient of the input) and "NT" (gradient of the weight), the product is op(B) @ op(A).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megasync.lab.rehearsal.te_extension.cast import as_plain, torch_dtype
from megasync.lab.rehearsal.te_extension.enums import CommOverlapType
from megasync.lab.rehearsal.te_extension.fp8 import quantize


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, None, torch.Tensor | None]:
    """The product, written or added to ``out``; the gradient of ``bias`` if ``grad``; no GELU; ``extra_output``.

    With ``comm_overlap``, ranks exchange the tokens of that buffer meanwhile: they gather those of ``B``, or add up
    those of the product, of which ``extra_output`` gets this rank's; with ``bulk_overlap`` those of another one.

    ``A`` and ``B`` are [..., columns]; leading dimensions of ``B`` are kept unless ``transb``. ``bias`` [rows of the
    weight] is added, or with ``grad`` receives the sum of ``B`` over its rows.
    """
    _refuse(gelu=gelu, alpha=alpha != 1.0)
    if comm_overlap is not None and comm_type == CommOverlapType.AG:
        # `B` lies in the buffer, or with ``bulk_overlap`` what a later product takes.
        comm_overlap.gather()
    elif comm_overlap is not None and bulk_overlap:
        # What an earlier product wrote there.
        comm_overlap.scatter()
    dtype = torch_dtype(out_dtype) if out_dtype is not None else out.dtype if out is not None else None
    first, second = as_plain(A), as_plain(B)
    product = _product(first, transa, second, transb, dtype or first.dtype)
    bias_grad = None
    if bias is not None:
        if grad:
            bias_grad = second.reshape(-1, second.shape[-1]).sum(0, dtype=torch.float32).to(torch_dtype(bias_dtype))
        else:
            product += bias
    if out is not None:
        (out.add_ if accumulate else out.copy_)(product.view(out.shape))
        product = out
    if comm_overlap is not None and comm_type == CommOverlapType.RS and not bulk_overlap:
        assert extra_output is not None
        comm_overlap.copy_into_buffer(product)
        extra_output.copy_(comm_overlap.scatter().view(extra_output.shape))
        return product, bias_grad, None, extra_output
    return (quantize(product, quantizer) if quantizer is not None else product), bias_grad, None, None


def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    out: Sequence[torch.Tensor],
    out_dtype: Any,
    m_splits: Sequence[int] | None,
    bias: Sequence[torch.Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[torch.Tensor]:
    """One product per pair of ``A`` and ``B``, into ``out``; with ``single_output`` into parts of ``out[0]`` by rows.

    A ``bias`` that is not empty is added, or with ``grad`` receives the sum of ``B`` over its rows. Returns ``bias``.
    """
    _refuse(gelu=any(tensor.numel() for tensor in gelu_in))
    targets: Sequence[torch.Tensor] = out
    if single_output:
        assert m_splits is not None
        targets = out[0].split([int(size) for size in m_splits])
    for index, (a, b, target) in enumerate(zip(A, B, targets, strict=True)):
        first, second = as_plain(a), as_plain(b)
        product = _product(first, transa, second, transb, target.dtype)
        if bias[index].numel():
            if grad:
                bias[index].copy_(second.sum(0, dtype=torch.float32))
            else:
                product += bias[index]
        (target.add_ if accumulate else target.copy_)(product.view(target.shape))
    return bias


def _product(a: torch.Tensor, transa: bool, b: torch.Tensor, transb: bool, dtype: torch.dtype) -> torch.Tensor:
    """op(b) @ op(a) as ``dtype``. Products of 16-bit floats are summed in float32, as on a GPU."""
    lead = () if transb else b.shape[:-1]
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    left, right = (b.t() if transb else b), (a.t() if transa else a)
    if dtype == torch.float32 or left.dtype != right.dtype:
        left, right = left.float(), right.float()
    product = (left @ right).to(dtype)
    return product if transb else product.view(*lead, product.shape[-1])


def _refuse(**used: bool) -> None:
    for option, active in used.items():
        if active:
            raise NotImplementedError(f"the stand-in for Transformer Engine's matrix products has no {option}")
