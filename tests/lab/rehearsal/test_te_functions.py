"""What whole models do not show of the stand-in extension; for the rest `test_te_families.py` compares with torch."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from megasync.lab.rehearsal import te_extension as tex

FLOATS = st.sampled_from([torch.float32, torch.bfloat16])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(tensor):
    return tensor.float().clone().requires_grad_()


def close(found, expected, dtype=torch.float32):
    """Equal up to the rounding of one value of ``dtype``."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_rope_leaves_tokens_after_the_last_sequence_unwritten():
    starts = torch.tensor([0, 2], dtype=torch.int32)
    angles = torch.ones(4, 1, 1, 2)
    out = tex.fused_rope_forward(random(3, 1, 2), angles, None, tex.NVTE_QKV_Format.NVTE_THD, False, starts, 1, 0)
    assert out[:2].isfinite().all()
    assert out[2].isnan().all()


def attention(q, k, v, starts_q, starts_kv, mask, window=(-1, -1), bottom_right=False, grad=None, offset=None):
    """Output; with ``grad`` also gradients of q, k, v and, if there is one, the softmax ``offset``."""
    sizes = (int(starts_q.diff().max()), int(starts_kv.diff().max()))
    kind, form = tex.NVTE_QKV_Layout.NVTE_THD_THD_THD, tex.NVTE_QKV_Format.NVTE_THD
    common = (tex.NVTE_Bias_Type.NVTE_NO_BIAS, tex.NVTE_Mask_Type[f"NVTE_{mask}"])
    softmax = tex.NVTE_Softmax_Type[f"NVTE_{'VANILLA' if offset is None else 'LEARNABLE'}_SOFTMAX"]
    common += (softmax, window, bottom_right)
    scale, padding = 0.3, (None, None)
    out, *saved = tex.fused_attn_fwd(
        *sizes, True, scale, 0.0, True, kind, form, form, *common, starts_q, starts_kv, q, k, v, q.dtype, *padding,
        None, None, None, None, None, offset, None, 16, False, False,
    )  # fmt: skip
    if grad is None:
        return out
    *grads, _, d_offset = tex.fused_attn_bwd(
        *sizes, scale, 0.0, True, kind, form, form, kind, form, form, *common, False, starts_q, starts_kv, q, k, v,
        out, grad, q.dtype, saved, *padding, None, None, None, False,
    )  # fmt: skip
    return (out, *grads, d_offset)


def by_torch(q, k, v, mask):
    """Attention of one sequence, [tokens, heads, dim]; ``mask`` is true where a query may attend."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), per_group=st.integers(1, 3), dtype=FLOATS)
def test_a_softmax_offset_is_a_score_without_a_value(lengths, per_group, dtype):
    tokens, heads = sum(lengths), 2 * per_group
    q, k, v = (random(tokens, n, 8, dtype=dtype, seed=seed) for seed, n in enumerate((heads, 2, 2)))
    grad, offset = random(tokens, heads, 8, dtype=dtype, seed=5), random(1, heads, 1, 1, seed=6)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found = attention(q, k, v, starts, starts, "PADDING_CAUSAL_MASK", grad=grad, offset=offset)
    wide = [leaf(tensor) for tensor in (q, k, v, offset)]
    parts = []
    for one, key, value in zip(*(tensor.split(lengths) for tensor in wide[:3]), strict=True):
        scores = torch.einsum("qhd,khd->hqk", one, key.repeat_interleave(per_group, 1)) * 0.3
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        weights = torch.cat((scores, wide[3][0].expand(-1, len(one), -1)), dim=-1).softmax(-1)[..., :-1]
        parts.append(torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(per_group, 1)))
    torch.cat(parts).backward(grad.float())
    for tensor, expected in zip(found, (torch.cat(parts).detach(), *(each.grad for each in wide)), strict=True):
        close(tensor, expected, dtype)


@pytest.mark.parametrize(("window", "bottom_right"), [((1, 0), False), ((2, 1), True), ((-1, 0), True)])
def test_windows_of_attention_hide_distant_keys(window, bottom_right):
    q, k, v = random(3, 1, 8), random(5, 1, 8, seed=1), random(5, 1, 8, seed=2)
    starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    found = attention(q, k, v, *starts, "PADDING_MASK", window, bottom_right)
    allowed = torch.zeros(3, 5, dtype=torch.bool)
    for i in range(3):
        centre = i + (2 if bottom_right else 0)
        for j in range(5):
            allowed[i, j] = j <= centre + window[1] and (window[0] < 0 or j >= centre - window[0])
    close(found, by_torch(q, k, v, allowed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_dtype": tex.DType.kFloat32}, "neither float16 nor bfloat16"),
        ({"head_dim_qk": 12}, "not multiples of 8"),
        ({"attn_mask_type": tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK}, "need a padding mask"),
        ({"num_attn_heads": 5}, "no multiple of 2 groups"),
    ],
)
def test_fused_attention_refuses_what_cudnn_refuses(change, message):
    params = SimpleNamespace(
        qkv_dtype=tex.DType.kBFloat16,
        qkv_layout=tex.NVTE_QKV_Layout.NVTE_THD_THD_THD,
        attn_mask_type=tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
        head_dim_qk=16,
        head_dim_v=8,
        num_attn_heads=4,
        num_gqa_groups=2,
    )
    accepted = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    assert tex.get_fused_attn_backend(params) == (accepted, "")
    backend, reason = tex.get_fused_attn_backend(SimpleNamespace(**{**vars(params), **change}))
    assert backend == tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    assert message in reason


def test_adam_does_nothing_after_a_value_that_is_not_finite():
    flag = torch.zeros(1, dtype=torch.int32)
    copy = torch.empty(2)
    tex.multi_tensor_scale(65536, flag, [[torch.tensor([1.0, torch.nan])], [copy]], 2.0)
    assert flag.item() == 1
    assert copy[0] == 2.0
    weight = torch.ones(2)
    tex.multi_tensor_adam(
        65536, flag, [[torch.ones(2)], [weight], [torch.zeros(2)], [torch.zeros(2)]], 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0
    )
    assert (weight == 1).all()


def test_a_function_without_a_stand_in_says_so():
    with pytest.raises(NotImplementedError, match="transformer_engine_torch.newton_schulz was called"):
        tex.newton_schulz()
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.CommOverlapBase was called"):
        tex.CommOverlapBase(1)
    with pytest.raises(NotImplementedError, match="has no dropout"):
        tex.fused_attn_fwd(*[0] * 4, 0.1, *[0] * 27)


def test_a_buffer_takes_tensors_that_fill_it_only():
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    buffer = tex.CommOverlap([4, 3], torch.float32, tex.CommOverlapHelper(group, group), 2)
    whole, own = random(4, 3), random(1, 2, 3, seed=1)
    buffer.copy_into_buffer(whole)
    buffer.copy_into_buffer(own, local_chunk=True)
    assert torch.equal(buffer.get_buffer(shape=[4, 1, 3])[:, 0], torch.cat([whole[:2], own[0]]))
    assert torch.equal(buffer.get_buffer(local_chunk=True), own[0])
    for tensor, own_only in ((whole[:3], False), (own[:, :1], True), (whole.double(), False)):
        with pytest.raises(RuntimeError, match="does not fill"):
            buffer.copy_into_buffer(tensor, local_chunk=own_only)
    with pytest.raises(RuntimeError, match="was asked for as"):
        buffer.get_buffer(shape=[3, 3])
