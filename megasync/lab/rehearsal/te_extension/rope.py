"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch

from megasync.lab.rehearsal.graphs import kernel
from megasync.lab.rehearsal.te_extension.context_parallel import thd_get_partitioned_indices
from megasync.lab.rehearsal.te_extension.enums import NVTE_QKV_Format


@kernel
def fused_rope_forward(
    t: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    layout: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """``t`` with its first channels rotated, computed in float32.

    ``t`` is [sequence, batch, heads, dim], [batch, sequence, heads, dim] or packed [tokens, heads, dim], by ``layout``.
    ``freqs`` [positions, 1, 1, rotated channels] are angles. In a packed ``t`` positions count from the start of each
    sequence, of which this rank has the chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank``; tokens after the last one
    are not written on a GPU, and are NaN here.
    """
    return _rotate(t, freqs, start_positions, layout, interleaved, cu_seqlens, (cp_size, cp_rank), 1.0)


@kernel
def fused_rope_backward(
    grad: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    layout: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """The gradient of `fused_rope_forward`'s ``t``: ``grad`` rotated back."""
    return _rotate(grad, freqs, start_positions, layout, interleaved, cu_seqlens, (cp_size, cp_rank), -1.0)


def _rotate(
    t: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    layout: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    context: tuple[int, int],
    direction: float,
) -> torch.Tensor:
    ranks, rank = context
    if start_positions is not None or (ranks > 1 and layout != NVTE_QKV_Format.NVTE_THD):
        raise NotImplementedError(
            "the stand-in for fused rope has no start positions, and context parallelism for packed sequences only"
        )
    if t.device.type == "meta":
        return torch.empty(t.shape, dtype=t.dtype, device=t.device)
    angles = freqs.view(freqs.shape[0], freqs.shape[-1])
    written = None
    if layout == NVTE_QKV_Format.NVTE_THD:
        assert cu_seqlens is not None
        starts = cu_seqlens[:-1].long()
        positions = torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(cu_seqlens.diff())
        if ranks > 1:
            positions = positions[thd_get_partitioned_indices(cu_seqlens, len(positions), ranks, rank)]
        written = len(positions)
        angles = angles[positions][:, None, :]
    elif layout == NVTE_QKV_Format.NVTE_SBHD:
        angles = angles[: t.shape[0], None, None, :]
    else:
        angles = angles[None, : t.shape[1], None, :]
    rotated = angles.shape[-1]
    source = (t if written is None else t[:written]).float()
    part = source[..., :rotated]
    if interleaved:
        other = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    else:
        low, high = part.chunk(2, dim=-1)
        other = torch.cat((-high, low), dim=-1)
    turned = part * angles.cos() + other * (direction * angles.sin())
    output = torch.cat((turned, source[..., rotated:]), dim=-1).to(t.dtype)
    if written is not None and written < t.shape[0]:
        output = torch.cat((output, output.new_full((t.shape[0] - written, *t.shape[1:]), torch.nan)))
    return output
