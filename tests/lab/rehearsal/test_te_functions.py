"""Each function of the stand-in extension against plain torch and its autograd, over layouts, dtypes and shapes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from megasync.lab.rehearsal import te_extension as tex

FLOATS = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.integers(1, 9)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(tensor):
    return tensor.float().clone().requires_grad_()


def close(found, expected, dtype=torch.float32):
    """Equal up to the rounding of one value of ``dtype``."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def gemm(a, b, layout, out=None, out_dtype=None, bias=None, grad=False, accumulate=False):
    options = (bias, tex.DType.kBFloat16 if bias is None else _te(bias.dtype), False, None, grad)
    return tex.generic_gemm(
        a, layout[0] == "T", b, layout[1] == "T", out, None, out_dtype, *options, torch.empty(0), 0, accumulate, False
    )


def _te(dtype):
    return {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16}[dtype]


@given(tokens=SIZES, inputs=SIZES, outputs=SIZES, dtype=FLOATS, biased=st.booleans())
def test_the_three_products_of_a_linear_layer_are_torchs(tokens, inputs, outputs, dtype, biased):
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1)
    x, grad = random(tokens, 1, inputs, dtype=dtype, seed=2), random(tokens, 1, outputs, dtype=dtype, seed=3)
    wide = [leaf(tensor) for tensor in (x, weight, bias)]
    expected = torch.nn.functional.linear(wide[0], wide[1], wide[2] if biased else None)
    expected.backward(grad.float())

    forward, *_ = gemm(weight, x, "TN", bias=bias if biased else None, out_dtype=_te(dtype))
    assert (forward.shape, forward.dtype) == ((tokens, 1, outputs), dtype)
    close(forward, expected.detach(), dtype)
    x_grad, *_ = gemm(weight, grad, "NN", grad=True)
    assert x_grad.shape == x.shape
    close(x_grad, wide[0].grad, dtype)
    weight_grad, bias_grad, *_ = gemm(x, grad, "NT", bias=bias if biased else None, grad=True)
    close(weight_grad, wide[1].grad, dtype)
    if biased:
        close(bias_grad, wide[2].grad, dtype)


@given(tokens=SIZES, inputs=SIZES, outputs=SIZES, dtype=FLOATS)
def test_a_weight_gradient_is_added_to_a_float32_buffer_in_full_precision(tokens, inputs, outputs, dtype):
    x, grad = random(tokens, inputs, dtype=dtype), random(tokens, outputs, dtype=dtype, seed=1)
    main_grad = random(outputs, inputs, seed=2)
    expected = main_grad + grad.float().t() @ x.float()
    found, *_ = gemm(x, grad, "NT", out=main_grad, out_dtype=tex.DType.kFloat32, grad=True, accumulate=True)
    assert found is main_grad
    close(main_grad, expected)


@given(splits=st.lists(st.integers(0, 5), min_size=1, max_size=4), single=st.booleans())
def test_grouped_products_are_single_ones_also_for_experts_without_tokens(splits, single):
    weights = [random(4, 3, seed=index) for index in range(len(splits))]
    parts = random(sum(splits), 3, seed=9).split(splits)
    out = torch.empty(sum(splits), 4)
    targets = [out] if single else list(out.split(splits))
    nothing = [torch.empty(0)] * len(splits)

    def grouped(a, transa, b, transb, targets, accumulate=False, single=False):
        rest = (nothing, tex.DType.kBFloat16, single, nothing, False, [torch.empty(0)], 0, accumulate, False, 1)
        return tex.te_general_grouped_gemm(a, transa, b, transb, targets, tex.DType.kFloat32, splits, *rest)

    grouped(weights, True, parts, False, targets, single=single)
    close(out, torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)]))
    grads = [torch.ones(4, 3) for _ in splits]
    grouped(parts, False, list(out.split(splits)), True, grads, accumulate=True)
    for grad, part, rows in zip(grads, parts, out.split(splits), strict=True):
        close(grad, 1.0 + rows.t() @ part)


@given(rows=SIZES, hidden=st.integers(8, 16), dtype=FLOATS, zero_centered=st.booleans())
def test_norms_and_their_gradients_are_torchs(rows, hidden, dtype, zero_centered):
    x, gamma, beta = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, hidden), *[(hidden,)] * 2]))
    grad = random(rows, hidden, dtype=dtype, seed=4)
    for name in ("rmsnorm", "layernorm"):
        wide = [leaf(tensor) for tensor in (x, gamma, beta)]
        weight = wide[1] + 1.0 if zero_centered else wide[1]
        if name == "rmsnorm":
            expected = rms_norm(wide[0], (hidden,), weight, eps=1e-5)
            arguments, wide = (x, gamma), wide[:2]
        else:
            expected = layer_norm(wide[0], (hidden,), weight, wide[2], eps=1e-5)
            arguments = (x, gamma, beta)
        expected.backward(grad.float())
        out, mean, rsigma = getattr(tex, f"{name}_fwd")(*arguments, 1e-5, None, None, _te(dtype), 0, zero_centered)
        close(out, expected.detach(), dtype)
        saved = (rsigma,) if mean is None else (mean, rsigma)
        found = getattr(tex, f"{name}_bwd")(grad, x, *saved, gamma, 0, zero_centered)
        for gradient, tensor in zip(found, wide, strict=True):
            assert gradient.dtype == dtype
            close(gradient, tensor.grad, dtype)


def rotated(t, positions, angles, interleaved):
    """By complex numbers."""
    size = angles.shape[-1]
    part = t[..., :size].double()
    low, high = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    own = angles[positions][..., ::2] if interleaved else angles[positions][..., : size // 2]
    turned = torch.complex(low, high) * torch.polar(torch.ones(()).double(), own.double())[:, None]
    pair = (turned.real, turned.imag)
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((both, t[..., size:].double()), dim=-1).float()


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    pairs=st.integers(1, 3),
    kept=st.sampled_from([0, 2]),
    interleaved=st.booleans(),
)
def test_rope_of_packed_and_padded_sequences_rotates_pairs_and_its_gradient_rotates_back(
    lengths, heads, pairs, kept, interleaved
):
    both = 2 * pairs
    plain = torch.outer(torch.arange(8.0), 0.5 ** torch.arange(pairs))
    angles = plain.repeat_interleave(2, -1) if interleaved else torch.cat((plain, plain), -1)
    freqs = angles[:, None, None, :]
    t = random(sum(lengths), heads, both + kept)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])

    def packed(function, tensor):
        return function(tensor, freqs, None, tex.NVTE_QKV_Format.NVTE_THD, interleaved, starts, 1, 0)

    turned = packed(tex.fused_rope_forward, t)
    close(turned, rotated(t, positions, angles, interleaved))
    close(packed(tex.fused_rope_backward, turned), t)
    padded = random(lengths[0], 1, heads, both + kept, seed=1)
    arguments = (freqs, None, tex.NVTE_QKV_Format.NVTE_SBHD, interleaved, None, 1, 0)
    expected = rotated(padded[:, 0], torch.arange(lengths[0]), angles, interleaved)
    close(tex.fused_rope_forward(padded, *arguments)[:, 0], expected)


def test_rope_leaves_tokens_after_the_last_sequence_unwritten():
    starts = torch.tensor([0, 2], dtype=torch.int32)
    angles = torch.ones(4, 1, 1, 2)
    out = tex.fused_rope_forward(random(3, 1, 2), angles, None, tex.NVTE_QKV_Format.NVTE_THD, False, starts, 1, 0)
    assert out[:2].isfinite().all()
    assert out[2].isnan().all()


def attention(
    q, k, v, starts_q, starts_kv, layout, mask, window=(-1, -1), bottom_right=False, grad=None, padded=None, offset=None
):  # fmt: skip
    """Output, and gradients of q, k and v if ``grad`` is given; ``padded`` are offsets other than the starts.

    With a softmax ``offset``, its gradient is the last.
    """
    sizes = (int(starts_q.diff().max()), int(starts_kv.diff().max()))
    kind, form = tex.NVTE_QKV_Layout[f"NVTE_{layout}"], tex.NVTE_QKV_Format.NVTE_THD
    common = (tex.NVTE_Bias_Type.NVTE_NO_BIAS, tex.NVTE_Mask_Type[f"NVTE_{mask}"])
    softmax = tex.NVTE_Softmax_Type[f"NVTE_{'VANILLA' if offset is None else 'LEARNABLE'}_SOFTMAX"]
    common += (softmax, window, bottom_right)
    scale, padding = 0.3, padded or (None, None)
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
    return (out, *grads) if offset is None else (out, *grads, d_offset)


def by_torch(q, k, v, mask):
    """Attention of one sequence, [tokens, heads, dim]; ``mask`` is true where a query may attend."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    groups=st.integers(1, 2),
    per_group=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (12, 8)]),
    dtype=FLOATS,
    causal=st.booleans(),
)
def test_attention_of_packed_sequences_and_its_gradients_are_torchs(lengths, groups, per_group, dims, dtype, causal):
    """Also with groups of query heads, and with keys longer than values."""
    tokens = sum(lengths)
    shapes = [(tokens, groups * per_group, dims[0]), (tokens, groups, dims[0]), (tokens, groups, dims[1])]
    q, k, v = (random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    grad = random(tokens, groups * per_group, dims[1], dtype=dtype, seed=5)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    mask = "PADDING_CAUSAL_MASK" if causal else "PADDING_MASK"
    found = attention(q, k, v, starts, starts, "THD_THD_THD", mask, grad=grad)
    wide = [leaf(tensor) for tensor in (q, k, v)]
    parts = zip(*(tensor.split(lengths) for tensor in wide), strict=True)
    allowed = [torch.ones(length, length, dtype=torch.bool) for length in lengths]
    whole = torch.cat([by_torch(*p, m.tril() if causal else m) for p, m in zip(parts, allowed, strict=True)])
    whole.backward(grad.float())
    for tensor, expected in zip(found, (whole.detach(), *(each.grad for each in wide)), strict=True):
        assert tensor.dtype == dtype
        close(tensor, expected, dtype)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), per_group=st.integers(1, 3), dtype=FLOATS)
def test_a_softmax_offset_is_a_score_without_a_value(lengths, per_group, dtype):
    tokens, heads = sum(lengths), 2 * per_group
    q, k, v = (random(tokens, n, 8, dtype=dtype, seed=seed) for seed, n in enumerate((heads, 2, 2)))
    grad, offset = random(tokens, heads, 8, dtype=dtype, seed=5), random(1, heads, 1, 1, seed=6)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found = attention(q, k, v, starts, starts, "THD_THD_THD", "PADDING_CAUSAL_MASK", grad=grad, offset=offset)
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


@pytest.mark.parametrize("layout", ["SBHD_SBHD_SBHD", "BSHD_BSHD_BSHD"])
def test_attention_of_padded_sequences_is_that_of_packed_ones(layout):
    lengths, longest = [3, 5], 5
    packed = [random(8, heads, 8, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))]
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)

    def pad(tensor):
        rows = tex.convert_thd_to_bshd(tensor, starts, 2, longest)
        return rows.transpose(0, 1).contiguous() if layout[0] == "S" else rows

    def unpad(tensor):
        rows = tensor.transpose(0, 1) if layout[0] == "S" else tensor
        assert (rows[0, lengths[0] :] == 0).all()
        return tex.convert_bshd_to_thd(rows, starts, 8)

    *qkv, grad = packed
    expected = attention(*qkv, starts, starts, "THD_THD_THD", "PADDING_CAUSAL_MASK", grad=grad)
    found = attention(*map(pad, qkv), starts, starts, layout, "PADDING_CAUSAL_MASK", grad=pad(grad))
    for tensor, same in zip(found, expected, strict=True):
        close(unpad(tensor), same)


@pytest.mark.parametrize(("window", "bottom_right"), [((1, 0), False), ((2, 1), True), ((-1, 0), True)])
def test_windows_of_attention_hide_distant_keys(window, bottom_right):
    q, k, v = random(3, 1, 8), random(5, 1, 8, seed=1), random(5, 1, 8, seed=2)
    starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    found = attention(q, k, v, *starts, "THD_THD_THD", "PADDING_MASK", window, bottom_right)
    allowed = torch.zeros(3, 5, dtype=torch.bool)
    for i in range(3):
        centre = i + (2 if bottom_right else 0)
        for j in range(5):
            allowed[i, j] = j <= centre + window[1] and (window[0] < 0 or j >= centre - window[0])
    close(found, by_torch(q, k, v, allowed))


def test_attention_skips_the_gaps_between_padded_offsets():
    q, k, v = (random(7, 1, 8, seed=seed) for seed in range(3))
    lengths, offsets = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    found = attention(q, k, v, lengths, lengths, "THD_THD_THD", "PADDING_CAUSAL_MASK", padded=(offsets, offsets))
    kept = torch.tensor([0, 1, 3, 4, 5])
    parts = [tensor[kept] for tensor in (q, k, v)]
    close(found[kept], attention(*parts, lengths, lengths, "THD_THD_THD", "PADDING_CAUSAL_MASK"))
    assert (found[[2, 6]] == 0).all()


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


@pytest.mark.parametrize(
    "name", ["scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"]
)
def test_softmaxes_and_their_gradients_are_torchs(name):
    scores = random(2, 3, 4, 4)
    hidden = torch.zeros(2, 1, 4, 4, dtype=torch.bool) if name == "scaled" else torch.ones(4, 4).triu(1).bool()
    wide = scores.clone().requires_grad_()
    expected = (wide * 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    expected.backward(grad := random(2, 3, 4, 4, seed=1))
    mask = (hidden.expand(2, 1, 4, 4),) if name == "scaled_masked" else ()
    probs = getattr(tex, f"{name}_softmax_forward")(scores, *mask, 0.5)
    close(probs, expected.detach())
    close(getattr(tex, f"{name}_softmax_backward")(grad, probs, 0.5), wide.grad)


@given(steps=st.integers(1, 3), decay=st.sampled_from([0.0, 0.1]), decoupled=st.booleans(), main=st.booleans())
def test_adam_is_torchs(steps, decay, decoupled, main):
    """With main weights, the parameters are those rounded."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected = random(5).requires_grad_()
    optimizer = kind([expected], lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=decay)
    weight, average, square = random(5), torch.zeros(5), torch.zeros(5)
    param = weight.bfloat16() if main else weight
    for step in range(1, steps + 1):
        expected.grad = random(5, seed=step)
        optimizer.step()
        lists = [[expected.grad], [param], [average], [square], *([[weight]] if main else [])]
        options = (0.01, 0.9, 0.95, 1e-6, step, int(decoupled), 1, decay)
        tex.multi_tensor_adam(65536, torch.zeros(1, dtype=torch.int32), lists, *options)
    close(weight, expected.detach())
    if main:
        assert torch.equal(param, weight.bfloat16())


@given(steps=st.integers(1, 3), moments=st.sampled_from([torch.float32, torch.bfloat16]))
def test_adam_with_remainders_has_the_same_main_weights(steps, moments):
    """Parameters are main weights rounded; halves are rounded up."""
    main, param = random(99), random(99).bfloat16()
    bits = main.view(torch.int32)
    # A parameter is rounded to even here; no value of this seed is halfway.
    rest = (bits & 0xFFFF).to(torch.int16)
    plain = [[param.clone()], [torch.zeros(99, dtype=moments)], [torch.zeros(99, dtype=moments)], [main]]
    split = [[param.clone()], [torch.zeros(99, dtype=moments)], [torch.zeros(99, dtype=moments)], [rest]]
    for step in range(1, steps + 1):
        options = (0.01, 0.9, 0.95, 1e-6, step, 1, 1, 0.1)
        flag, grad = torch.zeros(1, dtype=torch.int32), [random(99, seed=step)]
        tex.multi_tensor_adam(65536, flag, [grad, *plain], *options)
        tex.multi_tensor_adam_param_remainder(65536, flag, [grad, *split], *options)
        assert all(torch.equal(one[0], other[0]) for one, other in zip(plain[:3], split[:3], strict=True))
        assert torch.equal(main.view(torch.int32) & 0xFFFF, rest.int() & 0xFFFF)


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


def test_norms_of_lists_are_torchs():
    tensors = [random(3), random(2, 2, seed=1)]
    flag = torch.zeros(1, dtype=torch.int32)
    whole, each = tex.multi_tensor_l2norm(65536, flag, [tensors], True)
    close(whole, torch.cat([tensor.flatten() for tensor in tensors]).norm().view(1))
    close(each, torch.stack([tensor.norm() for tensor in tensors]))
    halved, _ = tex.multi_tensor_unscale_l2norm(65536, flag, [tensors], torch.tensor([0.5]))
    close(halved, whole / 2)


def test_shapes_on_the_meta_device_are_those_on_the_cpu():
    """Without values, and without reading any."""
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    q, k, v = random(5, 4, 16, dtype=torch.bfloat16), *(random(5, 2, d, dtype=torch.bfloat16) for d in (16, 8))
    grad = random(5, 4, 8, dtype=torch.bfloat16)
    angles = torch.ones(4, 1, 1, 8)

    def everything(q, k, v, grad, starts, angles, sizes):
        kind, form = tex.NVTE_QKV_Layout.NVTE_THD_THD_THD, tex.NVTE_QKV_Format.NVTE_THD
        common = (tex.NVTE_Bias_Type.NVTE_NO_BIAS, tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)
        common += (tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, (-1, 0), False)
        forward = tex.fused_attn_fwd(
            *sizes, True, 0.3, 0.0, True, kind, form, form, *common, starts, starts, q, k, v, q.dtype,
            None, None, None, None, None, None, None, None, None, 16, False, False,
        )  # fmt: skip
        backward = tex.fused_attn_bwd(
            *sizes, 0.3, 0.0, True, kind, form, form, kind, form, form, *common, False, starts, starts, q, k, v,
            forward[0], grad, q.dtype, forward[1:], None, None, None, None, None, False,
        )  # fmt: skip
        x, weight = grad.flatten(1), torch.empty(6, 32, dtype=grad.dtype, device=grad.device)
        gamma = torch.ones(32, dtype=x.dtype, device=x.device)
        normed = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, tex.DType.kBFloat16, 0, False)
        return [
            *forward,
            *backward,
            *normed,
            *tex.rmsnorm_bwd(x, x, normed[2], gamma, 0, False),
            gemm(weight, x, "TN")[0],
            gemm(x, gemm(weight, x, "TN")[0], "NT")[0],
            tex.fused_rope_forward(q, angles, None, form, False, starts, 1, 0),
            tex.convert_thd_to_bshd(q, starts, 2, 3),
        ]

    real = everything(q, k, v, grad, starts, angles, (3, 3))
    meta = everything(*(tensor.to("meta") for tensor in (q, k, v, grad, starts, angles)), (3, 3))
    for found, expected in zip(meta, real, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, "meta")


def test_a_function_without_a_stand_in_says_so():
    with pytest.raises(NotImplementedError, match="transformer_engine_torch.newton_schulz was called"):
        tex.newton_schulz()
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.CommOverlapBase was called"):
        tex.CommOverlapBase(1)
    with pytest.raises(NotImplementedError, match="has no dropout"):
        tex.fused_attn_fwd(*[0] * 4, 0.1, *[0] * 27)


EXACTNESS = {tex.DType.kFloat8E4M3: 2**-4, tex.DType.kFloat8E5M2: 2**-3}


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    square=st.booleans(),
    powers=st.booleans(),
    kind=st.sampled_from(sorted(EXACTNESS)),
)
@settings(max_examples=30)
def test_blocks_in_fp8_are_their_values_up_to_rounding(rows, columns, square, powers, kind):
    """By rows and by columns, with factors in the order in which Transformer Engine stores them."""
    values = random(rows, columns) * torch.logspace(-3, 3, columns)
    quantizer = SimpleNamespace(
        dtype=kind, block_len=128, block_scaling_dim=1 + square, force_pow_2_scales=powers, amax_epsilon=0.0
    )
    tiles, padded = (lambda n: -(-n // 128)), (lambda n: -(-n // 4) * 4)
    scales = {
        "rowwise": (tiles(rows), padded(tiles(columns))) if square else (tiles(columns), padded(rows)),
        "columnwise": (tiles(columns), padded(tiles(rows))) if square else (tiles(rows), padded(columns)),
    }
    out = SimpleNamespace(
        _rowwise_data=torch.empty(rows, columns, dtype=torch.uint8),
        _columnwise_data=torch.empty(columns, rows, dtype=torch.uint8),
        _rowwise_scale_inv=torch.empty(scales["rowwise"]),
        _columnwise_scale_inv=torch.empty(scales["columnwise"]),
    )
    tex.quantize(values, quantizer, out)
    for name, expected in (("rowwise", values), ("columnwise", values.t())):
        inverse = getattr(out, f"_{name}_scale_inv")
        height, width = expected.shape
        each = inverse.repeat_interleave(128, 0)[:height] if square else inverse.t()[:height]
        factors = each.repeat_interleave(128, 1)[:, :width]
        dtype = torch.float8_e4m3fn if kind == tex.DType.kFloat8E4M3 else torch.float8_e5m2
        found = getattr(out, f"_{name}_data").view(dtype).float() * factors
        # Values far below the largest of their block are multiples of the smallest 8-bit float.
        smallest = torch.finfo(dtype).smallest_normal * factors
        assert ((found - expected).abs() <= EXACTNESS[kind] * expected.abs().maximum(smallest)).all()
        if powers:
            assert (factors.log2() == factors.log2().round()).all()


def test_delayed_scaling_moves_its_histories_on():
    history, scale = torch.tensor([[0.0, 0.0], [4.0, 1.0], [1.0, 0.0]]), torch.tensor([1.0, 3.0])
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([2.0, 0.5]), [history], [scale], "max", tex.DType.kFloat8E4M3, 1.0
    )
    assert scale.tolist() == [448 / 4 / 2, 448 / 1 / 2]
    assert history.tolist() == [[0.0, 0.0], [1.0, 0.0], [2.0, 0.5]]
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([0.0, 8.0]), [history], [scale], "most_recent", tex.DType.kFloat8E5M2, 0.0
    )
    # Without a magnitude the factor stays.
    assert scale.tolist() == [56.0, 57344 / 8]


def test_bytes_are_transposed_with_the_last_dimension_first():
    data = torch.arange(6, dtype=torch.uint8).view(1, 2, 3)
    assert torch.equal(tex.fp8_transpose(data, tex.DType.kFloat8E4M3), data.permute(2, 0, 1))


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_parts_are_filled_up_with_rows_of_zeros_and_cut_again(sizes):
    padded = [-(-size // 4) * 4 for size in sizes]
    rows, filled = random(sum(sizes), 3), torch.full((sum(padded), 3), 7.0)
    tex.fused_multi_row_padding(rows, filled, sizes, padded)
    for part, each in zip(filled.split(padded), rows.split(sizes), strict=True):
        assert torch.equal(part, torch.cat([each, torch.zeros(len(part) - len(each), 3)]))
    again = torch.empty_like(rows)
    tex.fused_multi_row_unpadding(filled, again, padded, sizes)
    assert torch.equal(again, rows)


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
