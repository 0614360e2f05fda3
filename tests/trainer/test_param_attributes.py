"""The attributes by which Megatron reduces gradients and counts them in the norm follow the layout."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megasync.layout.adapter import AdapterLayout, AdapterShape, fused_projections
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.trainer.param_attributes import set_param_attributes

TENSOR = 2
DOWN = "decoder.layers.0.self_attention.linear_{}_down_proj.weight"


class TensorGroup:
    """All of a process group that the question needs."""

    def __init__(self, rank):
        self.rank = lambda: rank


def layout_of(path, spec, value_head=False, **topology):
    values = json.loads((Path(path) / "config.json").read_text())
    return Layout(values, Topology(**topology), spec, value_head)


def adapters_of(layout, rank=4):
    targets = {name for names in fused_projections(layout) for name in names}
    return AdapterLayout(layout, AdapterShape(rank, 1.0, tuple(sorted(targets))))


def marked(layout, rank, sequence_parallel=True):
    """A rank's parameters; before the call their attributes are wrong, alternately true and false."""
    weights = {}
    for turn, (name, shape) in enumerate(layout.params(rank).items()):
        param = torch.nn.Parameter(torch.empty(shape, device="meta"))
        for mark in ("tensor_model_parallel", "sequence_parallel", "allreduce", "shared", "partial_expert"):
            setattr(param, mark, bool(turn % 2))
        weights[name] = param
    set_param_attributes(weights, layout, rank, sequence_parallel)
    return weights


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("value_head", [False, True], ids=["logits", "values"])
@pytest.mark.parametrize(
    "family",
    ["qwen3", "glm4", "llama", "qwen2_moe", "deepseek_v3", "deepseek_v3_plain", "glm4_moe", "minimax_m2", "gpt_oss"],
)
def test_the_gradient_norm_counts_each_element_once(models, family, spec, value_head):
    """Over all tensor and pipeline ranks and all expert ranks; embeddings are counted with their padding."""
    expert = {"expert": 2, "expert_tensor": 1} if any(x in family for x in ("moe", "deepseek", "gpt")) else {}
    layout = layout_of(models[family], spec, value_head, tensor=TENSOR, pipeline=2, first_stage_layers=1, **expert)
    padding = layout.padded_vocab - layout.sizes.vocab
    tables = sum(shape[0] == layout.sizes.vocab for shape in layout.hf_tensors.values())
    expected = sum(map(prod, layout.hf_tensors.values())) + tables * padding * layout.sizes.hidden
    assert sum(counted(layout, rank) for rank in range(layout.topology.world)) == expected


def counted(layout, rank):
    """Elements that a rank counts in the norm."""
    group = TensorGroup(layout.topology.coords(rank).tp)
    return sum(
        param.numel()
        for param in marked(layout, rank).values()
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, group)
    )


# What of an expert's adapters every rank that shares it holds whole.
WHOLE = ("linear_fc1.adapter.down", "linear_fc2.adapter.up")


@pytest.mark.parametrize("spec", ["local", "te"])
def test_the_gradient_norm_counts_whole_factors_of_cut_experts_once(models, spec):
    layout = adapters_of(layout_of(models["qwen3_moe"], spec, tensor=TENSOR, pipeline=2, first_stage_layers=1))
    expected = sum(map(prod, layout.hf_tensors.values()))
    assert sum(counted(layout, rank) for rank in range(layout.topology.world)) == expected


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_that_share_an_expert_add_the_gradients_of_its_whole_factors_and_of_nothing_else(models, spec, tensor):
    layout = adapters_of(layout_of(models["qwen3_moe"], spec, tensor=tensor, data=2 // tensor, expert_tensor=2))
    for rank in range(layout.topology.world):
        for name, param in marked(layout, rank).items():
            whole = ".experts." in name and any(part in name for part in WHOLE)
            assert param.partial_expert == whole, name
            assert param.shared == (whole and rank == 1), name
    alone = adapters_of(layout_of(models["qwen3_moe"], spec, tensor=tensor, data=2 // tensor, expert_tensor=1))
    assert not any(param.partial_expert or param.shared for param in marked(alone, 1).values())


def test_down_projections_are_sharded_in_one_flavour_and_replicated_in_the_other(models):
    results = {}
    for spec in ("local", "te"):
        weights = marked(layout_of(models["deepseek_v3"], spec, tensor=TENSOR), 1)
        for x in ("q", "kv"):
            param = weights[DOWN.format(x)]
            results[spec, x] = param.tensor_model_parallel, param.partition_dim, param.sequence_parallel
    assert results["local", "q"] == results["local", "kv"] == (True, 0, False)
    assert results["te", "q"] == results["te", "kv"] == (False, -1, True)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_gradients_are_summed_where_each_tensor_rank_sees_its_own_tokens(models, spec):
    """Everything replicated but a value head, which every tensor rank computes for all tokens."""
    layout = layout_of(models["qwen2_moe"], spec, value_head=True, tensor=TENSOR)
    whole = layout_of(models["qwen2_moe"], spec, value_head=True, tensor=1).params(0)
    weights = marked(layout, 1)
    for name, param in weights.items():
        replicated = tuple(param.shape) == whole[name]
        head = name.startswith("output_layer.")
        assert param.sequence_parallel == (replicated and not head), name
    assert not any(param.sequence_parallel for param in marked(layout, 1, sequence_parallel=False).values())


def test_experts_gradients_stay_among_the_ranks_that_hold_them(models):
    layout = layout_of(models["qwen3_moe"], "te", tensor=TENSOR, expert=2, expert_tensor=1)
    for name, param in marked(layout, 1).items():
        assert param.allreduce == (".experts." not in name), name


def test_only_the_copy_of_a_tied_embedding_is_shared(models):
    layout = layout_of(models["qwen2_moe"], "te", pipeline=2)
    shared = [name for rank in range(2) for name, param in marked(layout, rank).items() if param.shared]
    assert shared == ["output_layer.weight"]
