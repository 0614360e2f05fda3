"""Norms of Transformer Engine's layers, forward and backward, computed in float32.

``sm_margin`` arguments concern only a GPU. With ``zero_centered`` the weight is 1 + gamma.
"""

from __future__ import annotations

from typing import Any

import torch

from megasync.lab.rehearsal.te_extension.cast import torch_dtype
from megasync.lab.rehearsal.te_extension.fp8 import quantize


def rmsnorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, None, torch.Tensor]:
    """The norm of the rows of ``x`` [rows, hidden]; None; the reciprocal root mean squares [rows], float32."""
    wide = x.float()
    rsigma = torch.rsqrt(wide.square().mean(-1) + eps)
    return _result(wide * rsigma[:, None] * _weight(gamma, zero_centered), out, quantizer, out_dtype), None, rsigma


def rmsnorm_bwd(
    grad: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``x`` and of ``gamma``."""
    normed = x.float() * rsigma[:, None]
    weighted = grad.float() * _weight(gamma, zero_centered)
    x_grad = rsigma[:, None] * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return x_grad.to(x.dtype), (grad.float() * normed).sum(0).to(gamma.dtype)


def layernorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The norm of the rows of ``x`` [rows, hidden]; their means and reciprocal deviations [rows], float32."""
    wide = x.float()
    mean = wide.mean(-1)
    rsigma = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + eps)
    normed = (wide - mean[:, None]) * rsigma[:, None]
    output = normed * _weight(gamma, zero_centered) + beta.float()
    return _result(output, out, quantizer, out_dtype), mean, rsigma


def layernorm_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``x``, of ``gamma`` and of ``beta``."""
    normed = (x.float() - mean[:, None]) * rsigma[:, None]
    weighted = grad.float() * _weight(gamma, zero_centered)
    centred = weighted - weighted.mean(-1, keepdim=True) - normed * (weighted * normed).mean(-1, keepdim=True)
    wide = grad.float()
    return (
        (rsigma[:, None] * centred).to(x.dtype),
        (wide * normed).sum(0).to(gamma.dtype),
        wide.sum(0).to(gamma.dtype),
    )


def _weight(gamma: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return gamma.float() + 1.0 if zero_centered else gamma.float()


def _result(value: torch.Tensor, out: torch.Tensor | None, quantizer: Any, dtype: Any) -> Any:
    value = value.to(torch_dtype(dtype))
    if out is not None and isinstance(out, torch.Tensor) and quantizer is None:
        return out.copy_(value)
    return quantize(value, quantizer, out) if quantizer is not None else value
