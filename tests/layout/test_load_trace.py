"""The trace of a loader against what the same loader does with real numbers, on small modules written by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed

import msgspec
import pytest
import torch
from oracle.engine_oracle import compare
from torch import nn

from megasync.errors import TraceError
from megasync.layout.engine_layout import EngineRank, Fill, Slot
from megasync.layout.layout import Box
from megasync.layout.load_trace import trace_load


def check(model: nn.Module, specs, post_load=lambda model: None) -> EngineRank:
    """The trace, after a replay of it left the same numbers as a real load."""
    held = [*model.parameters(), *model.buffers()]
    before = [(tensor.data.data_ptr(), tensor.clone()) for tensor in held]
    rank = msgspec.convert(msgspec.to_builtins(trace_load(model, specs)), EngineRank)
    for tensor, (address, content) in zip(held, before, strict=True):
        assert tensor.data.data_ptr() == address and torch.equal(tensor, content)
    results = compare(model, specs, rank, post_load)
    assert results["different"] == []
    assert results["loaded"] == sum(slot.hf_box.rows * slot.hf_box.cols for slot in rank.slots)
    return rank


class Module(nn.Module):
    """Parameters of the given shapes, and a loader made of (tensor name -> what to do with it)."""

    def __init__(self, loaders, dtype=torch.float32, buffers=(), **shapes) -> None:
        super().__init__()
        self.loaders = loaders
        for name, shape in shapes.items():
            data = torch.full(shape, 0.5, dtype=dtype)
            if name in buffers:
                self.register_buffer(name, data)
            else:
                self.register_parameter(name, nn.Parameter(data))

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            self.loaders[name](self, weight)


def test_fused_projections_of_one_tensor_rank():
    """Rank 1 of 2: q, k and v below each other, gate and up below each other, the down projection cut by columns."""
    loaders = {
        "q": lambda m, w: m.qkv.data[0:8].copy_(w.narrow(0, 8, 8)),
        "k": lambda m, w: m.qkv.data[8:12].copy_(w.chunk(2)[1]),
        "v": lambda m, w: m.qkv.data.narrow(0, 12, 4).copy_(w[4:]),
        "q_bias": lambda m, w: m.bias.data[:8].copy_(w[8:]),
        "gate": lambda m, w: m.gate_up.data[:6].copy_(w[6:]),
        "up": lambda m, w: m.gate_up[6:].data.copy_(w[6:]),
        "down": lambda m, w: m.down.data.copy_(w[:, 6:]),
        "norm": lambda m, w: m.norm.data.copy_(w),
    }
    model = Module(loaders, qkv=(16, 5), bias=(16,), gate_up=(12, 5), down=(5, 6), norm=(5,), spare=(3,))
    specs = [("q", (16, 5)), ("k", (8, 5)), ("v", (8, 5)), ("q_bias", (16,)), ("gate", (12, 5)), ("up", (12, 5))]
    rank = check(model, [*specs, ("down", (5, 12)), ("norm", (5,))])
    assert rank.unwritten == ("spare",)
    # What SGLang itself does not look for in a checkpoint.
    model.spare._skip_weight_check = True
    assert trace_load(model, [*specs, ("down", (5, 12)), ("norm", (5,))]).unwritten == ()
    assert rank.dtypes["qkv"] == "float32" and rank.sizes["qkv"] == 80
    results = {slot.hf_name: slot for slot in rank.slots}
    assert results["k"] == Slot("k", Box(4, 4, 0, 5), "qkv", 40, 5, 1)
    assert results["down"] == Slot("down", Box(0, 5, 6, 6), "down", 0, 6, 1)
    assert results["q_bias"] == Slot("q_bias", Box(8, 8, 0, 1), "bias", 0, 1, 1)


def test_experts_in_one_parameter_of_three_dimensions():
    def gate(expert):
        return lambda m, w: m.w13.data[expert].narrow(0, 0, 3).copy_(w[3:])

    def down(expert):
        return lambda m, w: m.w2.data[expert].copy_(w[:, 3:].t())

    loaders = {f"gate{e}": gate(e) for e in range(3)} | {f"down{e}": down(e) for e in range(3)}
    model = Module(loaders, w13=(3, 6, 4), w2=(3, 3, 5))
    specs = [(f"gate{e}", (6, 4)) for e in range(3)] + [(f"down{e}", (5, 6)) for e in range(3)]
    rank = check(model, specs)
    assert len(rank.slots) == 6
    assert Slot("gate2", Box(3, 3, 0, 4), "w13", 48, 4, 1) in rank.slots
    # A transposed matrix is a matter of strides.
    assert Slot("down1", Box(0, 5, 3, 3), "w2", 15, 1, 5) in rank.slots


def test_experts_fused_in_one_tensor_of_three_dimensions():
    def load(m, w):
        for expert, (gate, up) in enumerate(zip(*w.chunk(2, dim=1), strict=True)):
            m.w13.data[expert, :2].copy_(gate[2:])
            m.w13.data[expert, 2:].copy_(up[2:])

    rank = check(Module({"w": load}, w13=(3, 4, 5)), [("w", (3, 8, 5))])
    # The matrix has the rows of one expert after those of another.
    assert rank.slots[0] == Slot("w", Box(2, 2, 0, 5), "w13", 0, 5, 1)
    assert len(rank.slots) == 6
    whole = check(Module({"w": lambda m, w: m.w.data.copy_(w)}, w=(3, 8, 5)), [("w", (3, 8, 5))])
    assert whole.slots == (Slot("w", Box(0, 24, 0, 5), "w", 0, 5, 1),)


def test_a_tensor_that_the_loader_overwrites_is_a_fill():
    """As SGLang does with the bias of gpt-oss's experts on all tensor-parallel ranks but the first."""

    def load(m, w):
        m.w.data.copy_(w.zero_())

    rank = check(Module({"w": load}, w=(3, 4)), [("w", (3, 4))])
    assert (rank.slots, rank.fills) == ((), (Fill("w", 0, 1, 12, 1, 1, 0.0),))


def test_vocabulary_padding_is_a_fill():
    def load(m, w):
        rows = w.narrow(0, 8, 3)
        m.embed[: len(rows)].data.copy_(rows)
        m.embed[len(rows) :].data.fill_(0)

    rank = check(Module({"w": load}, embed=(8, 4)), [("w", (11, 4))])
    assert rank.fills == (Fill("embed", 12, 1, 20, 1, 1, 0.0),)


def padded_with_cat(m, w):
    parts = [torch.cat([part, torch.zeros(1, 4)]) for part in w.split([2, 3, 1])]
    m.w.data.copy_(torch.cat(parts)[2:8])


def padded_with_pad(m, w):
    m.w.data.copy_(nn.functional.pad(w, (0, 1, 2, 0), value=-3.0)[1:7, 1:])


def padded_by_a_copy_of_zeros(m, w):
    m.w.data[:5].copy_(w[1:])
    m.w.data.narrow(0, 5, 1).copy_(torch.zeros_like(m.w.narrow(0, 5, 1)))


def zeroed_first(m, w):
    m.w.data.zero_()
    m.w.data[:, :2].copy_(w[:, 2:])


@pytest.mark.parametrize("load", [padded_with_cat, padded_with_pad, padded_by_a_copy_of_zeros, zeroed_first])
def test_padding(load):
    rank = check(Module({"w": load}, w=(6, 4)), [("w", (6, 4))])
    assert rank.fills and rank.slots


def two_tensors_in_one(m, w, kept={}):  # noqa: B006
    kept[len(w)] = w
    if len(kept) == 2:
        m.w.data.copy_(torch.cat([kept.pop(2), kept.pop(4)]).narrow(0, 1, 4))


def test_tensors_concatenated_across_calls_then_cut():
    model = Module({"a": two_tensors_in_one, "b": two_tensors_in_one}, w=(4, 3))
    rank = check(model, [("a", (2, 3)), ("b", (4, 3))])
    assert rank.slots == (Slot("a", Box(1, 1, 0, 3), "w", 0, 3, 1), Slot("b", Box(0, 3, 0, 3), "w", 3, 3, 1))


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(lambda m, w: m.w.data.copy_(w.view(3, 2, 2, 4).transpose(1, 2).reshape(12, 4)), id="reordered"),
        pytest.param(lambda m, w: m.w.data.copy_(w[3:4, 1:2]), id="one number everywhere"),
        pytest.param(lambda m, w: m.w.data.view(6, 2, 4).copy_(torch.stack(w.chunk(2), dim=1)), id="interleaved"),
        pytest.param(lambda m, w: m.w.data.view(4, 3, 4)[:, 1:].copy_(w[:4, None].expand(4, 2, 4)), id="replicated"),
        pytest.param(lambda m, w: m.w.data.view(-1)[4:20].copy_(w.view(-1)[8:24]), id="flat"),
        pytest.param(lambda m, w: m.w.data[::2].copy_(w[1::2]), id="every other row"),
    ],
)
def test_views_of_any_kind(load):
    check(Module({"w": load}, w=(12, 4)), [("w", (12, 4))])


def test_casts_and_moves_point_to_the_tensor():
    def load(m, w):
        m.w.data.copy_(w.to(torch.float32).contiguous().clone()[2:].to(m.w.device).to(torch.bfloat16))

    rank = check(Module({"w": load}, torch.bfloat16, w=(4, 4)), [("w", (6, 4))])
    assert rank.slots == (Slot("w", Box(2, 4, 0, 4), "w", 0, 4, 1),)
    assert rank.dtypes == {"w": "bfloat16"}


def test_buffers_count_when_they_are_loaded():
    model = Module({"bias": lambda m, w: m.bias.copy_(w)}, buffers=("bias", "angles"), bias=(4,), angles=(9,))
    rank = check(model, [("bias", (4,))])
    assert rank.sizes == {"bias": 4} and rank.unwritten == ()


def test_the_last_load_of_a_place_counts():
    def copy(m, w):
        return m.w.data.copy_(w)

    rank = check(Module({"embed": copy, "head": copy}, w=(4, 3)), [("embed", (4, 3)), ("head", (4, 3))])
    assert [slot.hf_name for slot in rank.slots] == ["head"]


def test_work_of_executors_is_traced_and_other_threads_keep_theirs():
    class Threaded(Module):
        def load_weights(self, weights) -> None:
            with ThreadPoolExecutor() as executor:
                futures = [executor.submit(self.loaders[name], self, weight) for name, weight in weights]
                for future in as_completed(futures):
                    future.result()

    submit = ThreadPoolExecutor.submit
    loaders = {"a": lambda m, w: m.a.data.copy_(w), "b": lambda m, w: m.b.data.copy_(w[1:])}
    rank = check(Threaded(loaders, a=(3, 2), b=(4,)), [("a", (3, 2)), ("b", (5,))])
    assert {slot.param for slot in rank.slots} == {"a", "b"}
    assert ThreadPoolExecutor.submit is submit


def test_values_derived_after_loading_are_left_to_the_hook():
    class Derived(Module):
        def load_weights(self, weights) -> None:
            super().load_weights(weights)
            self.post_load_weights()

        def post_load_weights(self) -> None:
            self.doubled = self.w.data * 2

    model = Derived({"w": lambda m, w: m.w.data.copy_(w)}, w=(2, 2))
    trace_load(model, [("w", (2, 2))])
    assert not hasattr(model, "doubled")
    check(model, [("w", (2, 2))], Derived.post_load_weights)
    assert model.doubled.max() == 8


def test_values_that_a_norm_derives_while_loading_are_left_to_its_own_hook():
    """As SGLang's norms do that multiply by 1 + w."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))
            self.register_buffer("gemma_weight", torch.ones(3), persistent=False)

        def load(self, weight) -> None:
            self.weight.data.copy_(weight)
            self.refresh_gemma_weight()

        def refresh_gemma_weight(self) -> None:
            self.gemma_weight.copy_(self.weight.data).add_(1.0)

    model = Module({"norm": lambda m, w: m.norm.load(w)})
    model.norm = Norm()
    rank = check(model, [("norm", (3,))])
    assert [slot.param for slot in rank.slots] == ["norm.weight"]
    assert torch.equal(model.norm.gemma_weight, model.norm.weight + 1)


def test_a_trace_in_inference_mode_sees_through_composite_operations():
    """SGLang's scheduler lives in inference mode, where reshape, to and narrow arrive undecomposed."""

    def load(m, w):
        return m.w.data.copy_(w.reshape(3, 8).to(torch.bfloat16).narrow(1, 0, 4).contiguous())

    model = Module({"w": load}, torch.bfloat16, w=(3, 4))
    with torch.inference_mode():
        rank = trace_load(model, [("w", (6, 4))])
    assert rank == trace_load(model, [("w", (6, 4))])
    assert sum(slot.hf_box.rows * slot.hf_box.cols for slot in rank.slots) == 12


def replaces(m, w):
    m.w.data = torch.ones(2, 2)


def into_a_plain_tensor(m, w):
    torch.zeros(2, 2).copy_(w)


def filled_after(m, w):
    m.w.data.copy_(w)
    m.w.data[1:, 1:].zero_()


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda m, w: m.w.data.copy_(w + 1), r"Module\.load_weights uses aten\.add\.Tensor on tensor 'layer\.w'"),
        (lambda m, w: m.w.data.mul_(2), r"aten\.mul_\.Tensor on parameter 'w'"),
        (lambda m, w: m.w.data.fill_(w.sum().item()), r"aten\.sum.* on tensor 'layer\.w'"),
        (lambda m, w: m.w.data.copy_(m.other.data), r"copies parameter 'other' into parameter 'w'"),
        (lambda m, w: m.w.data.copy_(m.other.data.clone()), r"reads parameter 'other'"),
        (lambda m, w: m.w.data.copy_(torch.eye(2)), r"writes .* into parameter 'w', which is not a constant"),
        (lambda m, w: m.w.data.copy_(w.view(torch.int32)), r"aten\.view\.dtype on tensor 'layer\.w'"),
        (lambda m, w: m.w.data.copy_(w.flip(0)), r"aten\.flip\.default on tensor 'layer\.w'"),
        (
            lambda m, w: m.w.data[0].copy_(w.view(-1)[1:3]),
            r"elements of tensor 'layer\.w' .* do not form a rectangle: .*element 1",
        ),
        (lambda m, w: m.nothing, r"AttributeError while it loaded layer\.w: .*nothing"),
        (into_a_plain_tensor, r"writes tensor 'layer\.w' into a tensor of shape \[2, 2\].*neither a parameter nor"),
        (filled_after, r"fills a part of 'w' that it loaded from 'layer\.w'"),
        (replaces, r"replaces parameter 'w'"),
    ],
)
def test_what_slots_cannot_express_is_refused_by_name(load, words):
    model = Module({"layer.w": load}, w=(2, 2), other=(2, 2))
    held = {name: tensor.data.data_ptr() for name, tensor in model.named_parameters()}
    with pytest.raises(TraceError, match=words):
        trace_load(model, [("layer.w", (2, 2))])
    assert held == {name: tensor.data.data_ptr() for name, tensor in model.named_parameters()}
    assert all(bool((tensor == 0.5).all()) for tensor in model.parameters())
