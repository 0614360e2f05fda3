"""The gated delta net computes what Hugging Face's does, sequence by sequence, packed and with shared prompts.

Float32: outputs agree to 1e-5 of the largest, gradients to 1e-4, and those of weights, which are sums over all tokens,
to 5e-4.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from random_models import MORE_MODELS
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_recurrent_gated_delta_rule,
)

from megasync.layout.layout import Layout
from megasync.layout.shards import box_of, piece_of
from megasync.layout.topology import Topology
from megasync.trainer.attention import Segment, plan_attention
from megasync.trainer.batch import PackedTokens
from megasync.trainer.gated_delta_net import DeltaNetSubmodules, GatedDeltaNet, gated_delta_rule, unit

CPU = torch.device("cpu")
CONFIG = MORE_MODELS["qwen3_next"]
# Roots of many lengths, one shorter than the convolution; responses of one and of several prompts.
TREES = {
    "alone": [Segment(0, 150, None)],
    "packed": [Segment(0, 3, None), Segment(3, 1, None), Segment(4, 70, None), Segment(74, 64, None)],
    "shared": [
        Segment(0, 40, None),
        Segment(40, 5, 0),
        Segment(45, 90, 0),
        Segment(135, 2, None),
        Segment(137, 1, 3),
        Segment(138, 8, 3),
        Segment(146, 130, None),
        Segment(276, 20, 6),
    ],
}


def assert_close(actual, expected, share=1e-5):
    torch.testing.assert_close(actual, expected, atol=share * expected.detach().abs().max().item(), rtol=0)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunks_are_the_recurrence_token_by_token(tokens):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(2, 3, *shape, generator=generator)

    query, key, value = normal(tokens, 8), normal(tokens, 8), normal(tokens, 12)
    decay, rate, state = -5 * normal(tokens).abs(), normal(tokens).sigmoid(), normal(8, 12)
    leaves = [leaf.requires_grad_() for leaf in (query, key, value, decay, rate, state)]
    out, last = gated_delta_rule(unit(query) * 8**-0.5, unit(key), value, decay, rate, state)
    swapped = (part.transpose(1, 2) for part in (query, key, value, decay, rate))
    expected, expected_last = torch_recurrent_gated_delta_rule(
        *swapped, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    expected = expected.transpose(1, 2)
    assert_close(out, expected)
    assert_close(last, expected_last)
    weights = normal(tokens, 12), normal(8, 12)
    actual, wanted = (
        torch.autograd.grad((o * weights[0]).sum() + (s * weights[1]).sum(), leaves)
        for o, s in ((out, last), (expected, expected_last))
    )
    for mine, theirs in zip(actual, wanted, strict=True):
        assert_close(mine, theirs, 1e-4)


class Linear(torch.nn.Linear):
    """torch's, with the constructor and the result of Megatron's."""

    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return super().forward(x), None


@pytest.fixture
def layers():
    """Hugging Face's layer, and ours with its weights; then (our parameter, a gradient in the order of theirs)."""
    torch.manual_seed(5)
    layout = Layout(CONFIG, Topology())
    # Transformers writes into the nested values that it is given.
    values = copy.deepcopy({key: value for key, value in CONFIG.items() if key != "model_type"})
    theirs = Qwen3NextGatedDeltaNet(AutoConfig.for_model("qwen3_next", **values), 0)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=48,
        num_attention_heads=4,
        layernorm_epsilon=CONFIG["rms_norm_eps"],
        use_cpu_initialization=True,
    )
    ours = GatedDeltaNet(
        config,
        DeltaNetSubmodules(Linear, Linear),
        heads=layout.sizes.delta,
        pg_collection=SimpleNamespace(tp=None, cp=None),
    )
    hf = {f"model.layers.0.linear_attn.{name}": value for name, value in theirs.named_parameters()}
    own = {f"decoder.layers.0.self_attention.{name}": value for name, value in ours.named_parameters()}
    with torch.no_grad():
        for weight in hf.values():
            weight.add_(torch.randn_like(weight) * 0.2)
        for weight in own.values():
            weight.fill_(torch.nan)
        pieces = [piece for piece in layout.pieces(0) if piece.hf_name in hf]
        for piece in pieces:
            piece_of(own[piece.param], piece).copy_(box_of(hf[piece.hf_name], piece.hf_box))
    return theirs, ours, hf, own, pieces


@pytest.mark.parametrize("flavour", ["local", "te"])
@pytest.mark.parametrize("name", TREES)
def test_packed_sequences_are_those_of_hugging_face_one_by_one(layers, name, flavour):
    theirs, ours, hf, own, pieces = layers
    segments = TREES[name]
    if flavour == "te" and any(segment.prefix is not None for segment in segments):
        pytest.skip("Transformer Engine's batches share no prompts")
    tokens = segments[-1].start + segments[-1].length
    hidden = torch.randn(tokens, 48).requires_grad_()
    weight = torch.randn(tokens, 48)
    packed = PackedTokens("thd", plan=plan_attention(segments, CPU))
    if flavour == "te":
        starts = torch.tensor([0, *(segment.start + segment.length for segment in segments)], dtype=torch.int32)
        packed = PackedTokens("thd", starts, starts)
    out, _ = ours(hidden[:, None], None, packed_seq_params=packed)
    (out[:, 0] * weight).sum().backward()
    found_gradient, hidden.grad = hidden.grad, None

    expected = []
    for segment in segments:
        own_tokens = hidden[segment.start : segment.start + segment.length]
        before = 0
        if segment.prefix is not None:
            root = segments[segment.prefix]
            own_tokens = torch.cat((hidden[root.start : root.start + root.length], own_tokens))
            before = root.length
        expected.append(theirs(own_tokens[None])[0, before:])
    expected = torch.cat(expected)
    (expected * weight).sum().backward()
    assert_close(out[:, 0], expected)
    assert_close(found_gradient, hidden.grad, 1e-4)
    covered = {name: torch.zeros_like(value) for name, value in hf.items()}
    for piece in pieces:
        box_of(covered[piece.hf_name], piece.hf_box).copy_(piece_of(own[piece.param].grad, piece))
    for name, value in hf.items():
        assert_close(covered[name], value.grad, 5e-4)


def test_bfloat16_differs_from_hugging_face_by_its_rounding(layers):
    theirs, ours, *_ = layers
    segments = TREES["packed"]
    hidden = torch.randn(138, 48).bfloat16()
    packed = PackedTokens("thd", plan=plan_attention(segments, CPU))
    expected = torch.cat([theirs(part[None].float())[0] for part in hidden.split([3, 1, 70, 64])])
    out, _ = ours.bfloat16()(hidden[:, None], None, packed_seq_params=packed)
    assert (out[:, 0].float() - expected).norm() < 0.02 * expected.norm()
