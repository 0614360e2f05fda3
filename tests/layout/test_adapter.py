"""Adapters as rectangles: also those of an output layer, and of a model with fewer of them than ranks have room for."""

import json
import resource

import pytest
import torch
from random_models import MODELS, MORE_MODELS

from megasync.errors import CheckpointError, ConfigError, DataError
from megasync.layout.adapter import AdapterLayout, AdapterShape, kinds_of_projections
from megasync.layout.layout import Box, Layout
from megasync.layout.shards import assemble, box_of, fill_params
from megasync.layout.topology import Topology
from megasync.tenants.saved_adapter import AdapterFiles, SavedAdapter, padded

CONFIGS = MODELS | MORE_MODELS
TOPOLOGIES = [
    Topology(),
    Topology(tensor=2),
    Topology(pipeline=2, virtual=2),
    Topology(tensor=2, pipeline=2, data=2),
]


def shape_of(layout, rank, **kinds):
    found = kinds_of_projections(layout)
    return AdapterShape(rank, 2.0, tuple(sorted(t for kind in found if kinds.get(kind, True) for t in found[kind])))


def factors_of(layout):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in layout.hf_tensors.items()}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("family", ["mistral", "qwen2_moe"])
def test_ranks_hold_a_small_model_and_zeros(family, topology):
    base = Layout(CONFIGS[family], topology)
    layout = AdapterLayout(base, shape_of(base, 5))
    small = AdapterLayout(Layout(CONFIGS[family], Topology()), shape_of(base, 2, mlp=False))
    factors = factors_of(small)
    assert ("base_model.model.lm_head.lora_B.weight", (131, 2)) in small.hf_tensors.items()
    read = padded(lambda name, box: box_of(factors[name], box), small.hf_tensors)
    params = [fill_params(layout, rank, read, torch.float32) for rank in range(topology.world)]
    for name, (rows, columns) in layout.hf_tensors.items():
        whole = assemble(name, layout, lambda rank, param: params[rank][param])
        expected = torch.zeros(rows, columns)
        if name in factors:
            expected[: factors[name].shape[0], : factors[name].shape[1]] = factors[name]
        assert torch.equal(whole, expected), name
    # The rows of vocabulary padding are zero too.
    heads = [each for rank in params for name, each in rank.items() if name.endswith("output_layer.adapter.up")]
    assert heads and sum(int(head.count_nonzero()) for head in heads[: topology.tensor]) == 131 * 2


def arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_a_folder_holds_what_was_written(tmp_path):
    layout = Layout(CONFIGS["qwen2"], Topology())
    adapters = AdapterLayout(layout, shape_of(layout, 2))
    factors = factors_of(adapters)
    for _ in range(2):
        SavedAdapter(adapters.shape, str(tmp_path), arrays(factors), {"exp_avg": arrays(factors)}, 3).write(
            tmp_path / "a"
        )
    with AdapterFiles(tmp_path / "a", adapters) as files:
        assert files.updates() == 3
        for read in (files.factors(), files.moments("exp_avg")):
            for name, (rows, columns) in adapters.hf_tensors.items():
                assert torch.equal(read(name, Box(0, rows, 0, columns)), factors[name])
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], "lm_head" in config["target_modules"]) == (2, 4.0, True)


def test_a_folder_without_room_is_an_error_and_leaves_nothing(tmp_path):
    layout = Layout(CONFIGS["qwen2"], Topology())
    adapters = AdapterLayout(layout, shape_of(layout, 2))
    saved = SavedAdapter(adapters.shape, str(tmp_path), arrays(factors_of(adapters)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="a cannot be written: .*File too large"):
            saved.write(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_written(tmp_path, value):
    layout = Layout(CONFIGS["qwen2"], Topology())
    adapters = AdapterLayout(layout, shape_of(layout, 2))
    factors = arrays(factors_of(adapters))
    name = list(factors)[-1]
    factors[name] = factors[name].copy()
    factors[name].flat[-1] = value
    with pytest.raises(DataError, match=f"{name} would have values that are not finite"):
        SavedAdapter(adapters.shape, str(tmp_path), factors).write(tmp_path / "a")
    assert not any(tmp_path.iterdir())


def test_other_adapters_are_refused(tmp_path):
    layout = Layout(CONFIGS["qwen2"], Topology())
    adapters = AdapterLayout(layout, shape_of(layout, 2))
    SavedAdapter(adapters.shape, str(tmp_path), arrays(factors_of(adapters))).write(tmp_path / "a")
    for other, text in (
        (shape_of(layout, 3), "r=2, not 3"),
        (AdapterShape(2, 3.0, adapters.shape.targets), "lora_alpha=4.0, not 6.0"),
        (shape_of(layout, 2, unembed=False), "target_modules="),
    ):
        with pytest.raises(CheckpointError, match=text):
            AdapterFiles(tmp_path / "a", AdapterLayout(layout, other))
    with AdapterFiles(tmp_path / "a", adapters) as files, pytest.raises(CheckpointError, match="is missing"):
        files.updates()


def test_adapters_are_of_attention_mlps_or_the_output_layer():
    for family, attention in (("qwen2", "o_proj"), ("deepseek_v3", "q_b_proj"), ("qwen3_next", "q_proj")):
        kinds = kinds_of_projections(Layout(CONFIGS[family], Topology()))
        assert attention in kinds["attention"] and "down_proj" in kinds["mlp"] and kinds["unembed"] == {"lm_head"}
        assert not kinds["attention"] & kinds["mlp"]
    with pytest.raises(ConfigError, match="names 'embed_tokens'; the model has .*, lm_head"):
        AdapterLayout(Layout(CONFIGS["qwen2"], Topology()), AdapterShape(2, 1.0, ("embed_tokens",)))
