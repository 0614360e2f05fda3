"""Fused attention, as cuDNN computes it: forward and backward, without dropout, bias or quantised inputs.

With a softmax offset, each head has one more score, which takes part in the softmax and has no value. Scores and
probabilities are float32; no matrix of scores is kept for the backward pass, only its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megasync.lab.rehearsal.graphs import kernel
from megasync.lab.rehearsal.te_extension.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

_CAUSAL = {
    NVTE_Mask_Type.NVTE_CAUSAL_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
    NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
}
_PADDED = {
    NVTE_Mask_Type.NVTE_PADDING_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
}


def get_fused_attn_backend(params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """The backend for ``params``, and why there is none, by cuDNN's conditions on Hopper.

    Only those that a configuration of megasync can meet or miss.
    """
    none, layout = NVTE_Fused_Attn_Backend.NVTE_No_Backend, NVTE_QKV_Layout(int(params.qkv_layout)).name
    if DType(int(params.qkv_dtype)) not in (DType.kFloat16, DType.kBFloat16):
        return none, f"element type {DType(int(params.qkv_dtype)).name} is neither float16 nor bfloat16"
    if params.head_dim_qk % 8 or params.head_dim_v % 8 or max(params.head_dim_qk, params.head_dim_v) > 256:
        return none, f"head sizes {params.head_dim_qk} and {params.head_dim_v} are not multiples of 8 up to 256"
    if params.num_attn_heads % params.num_gqa_groups:
        return none, f"{params.num_attn_heads} heads are no multiple of {params.num_gqa_groups} groups"
    if "THD" in layout and params.attn_mask_type not in _PADDED:
        return none, f"packed sequences need a padding mask, not {NVTE_Mask_Type(int(params.attn_mask_type)).name}"
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


class _Problem(NamedTuple):
    """What forward and backward have in common."""

    layout: NVTE_QKV_Layout
    mask: NVTE_Mask_Type
    window: tuple[int, int]
    bottom_right: bool
    scale: float
    lengths_q: torch.Tensor
    lengths_kv: torch.Tensor
    starts_q: torch.Tensor
    starts_kv: torch.Tensor

    @property
    def formats(self) -> tuple[str, str]:
        """The formats of queries and keys: "thd", "sbhd" or "bshd"."""
        parts = [part.translate({ord("2"): None, ord("3"): None}).lower() for part in self.layout.name.split("_")[1:]]
        return parts[0], parts[-1]

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """Index, and ranges of queries and keys, of each sequence: in a packed tensor, or along its own dimension."""
        packed_q, packed_kv = (part == "thd" for part in self.formats)
        rows = zip(*(each.tolist() for each in self[5:]), strict=True)
        for index, (queries, keys, start_q, start_kv) in enumerate(rows):
            first_q, first_kv = start_q if packed_q else 0, start_kv if packed_kv else 0
            yield index, slice(first_q, first_q + queries), slice(first_kv, first_kv + keys)

    def hidden(self, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """[queries, keys], true where a query may not attend; None if it always may."""
        left, right = self.window
        if self.mask in _CAUSAL:
            right = 0
        if left < 0 and right < 0:
            return None
        offset = keys - queries if self.bottom_right else 0
        distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - offset
        hidden = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        if right >= 0:
            hidden |= distance > right
        if left >= 0:
            hidden |= distance < -left
        return hidden


def _problem(
    layout: Any,
    mask: Any,
    window: Any,
    bottom_right: bool,
    scale: float,
    cu_q: torch.Tensor,
    cu_kv: torch.Tensor,
    cu_q_padded: torch.Tensor | None,
    cu_kv_padded: torch.Tensor | None,
) -> _Problem:
    starts_q, starts_kv = (
        (cu if padded is None else padded)[:-1] for cu, padded in ((cu_q, cu_q_padded), (cu_kv, cu_kv_padded))
    )
    left, right = window
    return _Problem(
        NVTE_QKV_Layout(int(layout)),
        NVTE_Mask_Type(int(mask)),
        (left, right),
        bottom_right,
        scale,
        cu_q.diff(),
        cu_kv.diff(),
        starts_q,
        starts_kv,
    )


@kernel
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    page_table_k: Any,
    page_table_v: Any,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: Any,
    softmax_offset: Any,
    rng_gen: Any,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[torch.Tensor]:
    """Attention of each sequence, its log-sum-exp of scaled scores, a random state [2], and the softmax offset if any.

    ``q`` is [tokens, heads, dim], [length, batch, heads, dim] or [batch, length, heads, dim], ``k`` and ``v`` likewise
    with fewer heads; the head sizes of ``k`` and ``v`` may differ. The output has the format of ``q`` and is zero where
    there is no query. The log-sum-exp is float32, [tokens, heads, 1] if packed and else [batch, heads, length, 1], and
    includes the softmax offset, float32 [1, heads, 1, 1].
    """
    offset = None if int(softmax_type) == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else softmax_offset
    _refuse(
        dropout=dropout != 0.0,
        bias=int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS,
        off_by_one_softmax=int(softmax_type) == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX,
        paged_keys=page_table_k is not None,
        quantised_output=o_quantizer is not None,
        max_logit=return_max_logit,
    )
    problem = _problem(
        qkv_layout,
        mask_type,
        window_size,
        bottom_right_diagonal,
        attn_scale,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
    )
    format_q, format_kv = problem.formats
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    if format_q == "thd":
        stats = torch.zeros(*q.shape[:2], 1, dtype=torch.float32, device=q.device)
    else:
        batch = q.shape[format_q.index("b")]
        stats = torch.zeros(batch, q.shape[-2], max_seqlen_q, 1, dtype=torch.float32, device=q.device)
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    results = [out, stats, state] if offset is None else [out, stats, state, offset]
    if q.device.type == "meta":
        return results
    for index, queries, keys in problem.sequences():
        mine = _of(q, format_q, index, queries)
        scores, value = _scores(problem, mine, _of(k, format_kv, index, keys)), _of(v, format_kv, index, keys)
        total = scores.logsumexp(-1)
        if offset is not None:
            total = torch.logaddexp(total, offset.view(-1, 1))
        # A query that sees no key has a log-sum-exp of minus infinity, and an output of zero.
        probs = (scores - total[..., None]).exp().nan_to_num(0.0)
        _of(out, format_q, index, queries).copy_((probs @ _heads(value, mine.shape[1])).transpose(0, 1))
        if format_q == "thd":
            stats[queries, :, 0] = total.t()
        else:
            stats[index, :, queries, 0] = total
    return results


@kernel
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: Any,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[torch.Tensor | None]:
    """Gradients of ``q``, ``k`` and ``v``, None for bias, and the gradient of the softmax offset or None."""
    offset = None if int(softmax_type) == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else aux_ctx_tensors[-1]
    d_offset = None if offset is None else torch.zeros_like(offset)
    _refuse(dropout=dropout != 0.0, quantised_gradients=dqkv_quantizer is not None)
    problem = _problem(
        qkv_layout,
        mask_type,
        window_size,
        bottom_right_diagonal,
        attn_scale,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
    )
    format_q, format_kv = problem.formats
    grads = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if q.device.type == "meta":
        return [*grads, None, d_offset]
    stats, groups = aux_ctx_tensors[0], k.shape[-2]
    for index, queries, keys in problem.sequences():
        mine, key = _of(q, format_q, index, queries), _of(k, format_kv, index, keys)
        heads = mine.shape[1]
        total = stats[queries, :, 0].t() if format_q == "thd" else stats[index, :, queries, 0]
        probs = (_scores(problem, mine, key) - total[..., None]).exp().nan_to_num(0.0)
        value = _heads(_of(v, format_kv, index, keys), heads)
        grad_out, out = (_of(each, format_q, index, queries).transpose(0, 1).float() for each in (d_o, o))
        d_probs = grad_out @ value.transpose(1, 2)
        expected = (grad_out * out).sum(-1, keepdim=True)
        d_scores = probs * (d_probs - expected) * problem.scale
        if offset is not None and d_offset is not None:
            weight = (offset.view(-1, 1) - total).exp()
            d_offset -= (weight * expected[..., 0]).sum(-1).view_as(d_offset)
        d_query = d_scores @ _heads(key, heads)
        d_key = d_scores.transpose(1, 2) @ mine.transpose(0, 1).float()
        d_value = probs.transpose(1, 2) @ grad_out
        _of(grads[0], format_q, index, queries).copy_(d_query.transpose(0, 1))
        for target, gradient in ((grads[1], d_key), (grads[2], d_value)):
            shared = gradient.view(groups, heads // groups, *gradient.shape[1:]).sum(1)
            _of(target, format_kv, index, keys).copy_(shared.transpose(0, 1))
    return [*grads, None, d_offset]


@kernel
def convert_thd_to_bshd(packed: torch.Tensor, cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """[tokens, heads, dim] as [batch, length, heads, dim], zero after the end of each sequence."""
    padded = packed.new_zeros(batch, length, *packed.shape[1:])
    if packed.device.type != "meta":
        for row, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
            padded[row, : stop - start] = packed[start:stop]
    return padded


@kernel
def convert_bshd_to_thd(padded: torch.Tensor, cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """[batch, length, heads, dim] as [tokens, heads, dim], without the ends of the sequences."""
    packed = padded.new_zeros(tokens, *padded.shape[2:])
    if padded.device.type != "meta":
        for row, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
            packed[start:stop] = padded[row, : stop - start]
    return packed


def _of(tensor: torch.Tensor, form: str, index: int, tokens: slice) -> torch.Tensor:
    """A view of one sequence, [tokens, heads, dim]."""
    if form == "thd":
        return tensor[tokens]
    return tensor[tokens, index] if form == "sbhd" else tensor[index, tokens]


def _heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[tokens, groups, dim] as float32 [heads, tokens, dim]."""
    return tensor.transpose(0, 1).float().repeat_interleave(heads // tensor.shape[1], dim=0)


def _scores(problem: _Problem, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scaled scores, float32 [heads, queries, keys], minus infinity where a query may not attend."""
    scores = query.transpose(0, 1).float() @ _heads(key, query.shape[1]).transpose(1, 2) * problem.scale
    hidden = problem.hidden(query.shape[0], key.shape[0], query.device)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _refuse(**used: bool) -> None:
    for option, active in used.items():
        if active:
            raise NotImplementedError(f"the stand-in for fused attention has no {option.replace('_', ' ')}")
