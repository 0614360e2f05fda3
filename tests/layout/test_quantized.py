"""Weights that servers keep in block FP8: cut over ranks like the plain ones, with scales that every rank has whole."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fp8_folders import quantize as quantize_in_turn
from fp8_folders import write_fp8
from random_models import MODELS, MORE_MODELS, write_model
from safetensors.torch import load_file

from megasync.errors import CheckpointError, ConfigError
from megasync.layout import block_fp8
from megasync.layout.block_fp8 import Block, block_maxima, quantize, scales_of, strips
from megasync.layout.layout import Box, Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.quantized import QuantizedLayout, linear_matrices
from megasync.layout.shards import served_in_fp8
from megasync.layout.topology import Topology
from megasync.offline.quantize import write_fp8_folder

BLOCK = Block(20, 28)
SHAPE = (90, 100)
DENSE = {"one": Topology(), "tp2-pp2": Topology(tensor=2, pipeline=2)}
SPARSE = DENSE | {
    "tp2-dp2-ep2-etp1": Topology(tensor=2, data=2, expert=2, expert_tensor=1),
    "tp2-dp2-ep2-etp2": Topology(tensor=2, data=2, expert=2),
}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def parts(size, cuts):
    return pairwise([0, *cuts, size])


@pytest.fixture
def weight():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SHAPE, generator=generator, dtype=torch.bfloat16) * 0.02
    # A block of zeros.
    weight[20:40, 28:56] = 0
    return weight


@pytest.mark.parametrize("cuts", [((), ()), ((30,), ()), ((), (1, 99)), ((7, 20, 65), (28, 70))])
def test_parts_quantize_like_the_whole_block_by_block(weight, cuts, monkeypatch):
    monkeypatch.setattr(block_fp8, "STRIP", 500)
    values, scales = quantize_in_turn(weight, BLOCK)
    boxes = [
        Box(row, end - row, col, stop - col) for row, end in parts(90, cuts[0]) for col, stop in parts(100, cuts[1])
    ]
    maxima = torch.zeros(BLOCK.grid(SHAPE))
    pieces = [
        (strip, weight[strip.row :, strip.col :][: strip.rows, : strip.cols])
        for b in boxes
        for strip in strips(b, BLOCK)
    ]
    for box, part in pieces:
        grid = BLOCK.covering(box)
        own = maxima[grid.row : grid.row + grid.rows, grid.col : grid.col + grid.cols]
        torch.maximum(own, block_maxima(part, box, BLOCK), out=own)
    results = scales_of(maxima, power_of_two=False)
    assert torch.equal(results, scales)
    assert sum(part.numel() for _, part in pieces) == weight.numel()
    for box, part in pieces:
        grid = BLOCK.covering(box)
        own = results[grid.row : grid.row + grid.rows, grid.col : grid.col + grid.cols]
        expected = values[box.row : box.row + box.rows, box.col : box.col + box.cols]
        assert torch.equal(bits(quantize(part, own, box, BLOCK)), bits(expected)), box


def test_scales_are_rounded_up_to_powers_of_two():
    maxima = torch.tensor([448.0, 449.0, 896.0, 0.0, 1e-3])
    exact, rounded = scales_of(maxima, False), scales_of(maxima, True)
    assert rounded[:3].tolist() == [1.0, 2.0, 2.0]
    assert torch.all(rounded >= exact) and torch.all(rounded < 2 * exact)
    assert torch.all(torch.frexp(rounded)[0] == 0.5)


def layout_of(family, topology):
    layout = Layout((MODELS | MORE_MODELS)[family] | {"num_hidden_layers": 4}, topology)
    names = {name for name, shape in layout.hf_tensors.items() if "_proj.weight" in name and len(shape) == 2}
    return layout, QuantizedLayout(layout, BLOCK, names), names


@pytest.mark.parametrize(
    ("family", "topology"),
    [("qwen2", name) for name in DENSE]
    + [(family, name) for family in ("qwen3_moe", "deepseek_v3") for name in SPARSE],
)
def test_pieces_cover_values_and_scales_once(family, topology):
    plain, quantized, names = layout_of(family, SPARSE[topology])
    assert quantized.hf_tensors.keys() == plain.hf_tensors.keys() | {name + "_scale_inv" for name in names}
    for name, shape in quantized.hf_tensors.items():
        rows, cols = shape if len(shape) == 2 else (shape[0], 1)
        covered = torch.zeros(rows, cols, dtype=torch.int64)
        for (_, box, *_), ranks in quantized.holders[name]:
            covered[box.row : box.row + box.rows, box.col : box.col + box.cols] += 1
            assert all(name in {piece.hf_name for piece in quantized.pieces(rank)} for rank in ranks)
        assert torch.all(covered == 1), name
    for name in names:
        assert quantized.hf_dtype(name, "bfloat16") == "float8_e4m3fn"
        assert quantized.hf_dtype(name + "_scale_inv", "bfloat16") == "float32"
        # Whoever has a part of the values has all scales.
        holding = {rank for _, ranks in quantized.holders[name] for rank in ranks}
        assert {rank for _, ranks in quantized.holders[name + "_scale_inv"] for rank in ranks} == holding


def test_another_topology_is_quantized_too():
    _, quantized, names = layout_of("qwen2", Topology(tensor=2, data=4))
    again = quantized.with_replicas(1)
    assert again.topology == Topology(tensor=2, data=1)
    assert again.hf_tensors == quantized.hf_tensors and again.hf_dtype(min(names), "bfloat16") == "float8_e4m3fn"


def test_tensors_that_the_trainer_fuses_are_quantized_together():
    plain, _, names = layout_of("qwen2", Topology())
    only = {name for name in names if "k_proj" not in name}
    with pytest.raises(ConfigError, match=r"q_proj.weight' is in block FP8 and .*k_proj.weight' is not"):
        QuantizedLayout(plain, BLOCK, only).placed(0)


@pytest.fixture
def source(tmp_path) -> Path:
    return write_model(
        tmp_path / "source", MODELS["qwen3"] | {"intermediate_size": 80, "hidden_size": 96, "head_dim": 32}
    )


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_folder_is_quantized_like_block_by_block(source, tmp_path, power_of_two):
    block = Block(16, 16)
    write_fp8_folder(source, tmp_path / "out", block, "bfloat16", power_of_two)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stated = config["quantization_config"]
    assert (stated["weight_block_size"], stated.get("scale_fmt")) == ([16, 16], "ue8m0" if power_of_two else None)
    assert not any("_proj" in name for name in stated["modules_to_not_convert"])
    layout = served_in_fp8(Layout(read_hf_config(source), Topology(tensor=2)), tmp_path / "out")
    assert layout.power_of_two is power_of_two and layout.block == block
    if not power_of_two:
        fp8, _ = write_fp8(source, tmp_path / "fp8", tmp_path / "plain", block)
        expected = {name: tensor for file in fp8.glob("*.safetensors") for name, tensor in load_file(file).items()}
        results = load_file(tmp_path / "out" / "model.safetensors")
        assert results.keys() == expected.keys()
        for name in expected:
            theirs = (
                expected[name] if name + "_scale_inv" in results or "_scale_inv" in name else expected[name].bfloat16()
            )
            assert torch.equal(bits(results[name]), bits(theirs)), name


def test_linear_layers_are_those_of_every_stage():
    config = MODELS["qwen3"] | {"num_hidden_layers": 4}
    one, two = (linear_matrices(Layout(config, Topology(pipeline=stages)), Block(8, 8)) for stages in (1, 2))
    assert one == two and "model.layers.3.mlp.down_proj.weight" in one
    assert {name.split(".")[-2] for name in one} == {
        *(f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down"))
    }


def test_what_cannot_be_quantized_is_refused(source, tmp_path):
    with pytest.raises(ConfigError, match="rows, which is not a multiple of 20"):
        write_fp8_folder(source, tmp_path / "out", Block(20, 20), "bfloat16")
    with pytest.raises(ConfigError, match="no matrix of the model fills a block of 4096 x 4096"):
        write_fp8_folder(source, tmp_path / "out", Block(4096, 4096), "bfloat16")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        write_fp8_folder(source, tmp_path / "out", Block(16, 16), "bfloat16")
    with pytest.raises(ConfigError, match="rollout.fp8=true needs a folder in block FP8"):
        served_in_fp8(Layout(read_hf_config(source), Topology()), source)
