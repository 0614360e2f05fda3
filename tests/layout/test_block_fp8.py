"""A folder in block FP8 loads as the weights that it stands for, whatever rectangle is read."""

import json

import pytest
import torch
from fp8_folders import write_fp8
from random_models import MODELS, MORE_MODELS, write_model
from safetensors.torch import load_file, save_file
from tiny_shards import write_checkpoint
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megasync.errors import CheckpointError, ConfigError
from megasync.layout.block_fp8 import Block, dequantize, dequantized, stored_block
from megasync.layout.layout import Box, Layout
from megasync.layout.model_files import read_hf_config, read_storage
from megasync.layout.shards import HfFolder, export_checkpoint, load_shards
from megasync.layout.topology import Topology

# Small blocks divide none of the small models' splits; large ones are those of the published folders.
SMALL, LARGE = (20, 28), (128, 128)
WIDE = {"hidden_size": 320, "intermediate_size": 400, "num_attention_heads": 20, "num_key_value_heads": 4}
INDEX, FIRST, SECOND = (
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def make(tmp_path):
    def make(config, block=SMALL, **options):
        source = write_model(tmp_path / "source", config)
        return write_fp8(source, tmp_path / "fp8", tmp_path / "plain", block, **options)

    return make


def assert_loads(folders, topology, dtype, spec="local"):
    fp8, plain = folders
    layout = Layout(read_hf_config(fp8), topology, spec)
    for rank in range(topology.world):
        ours, theirs = (load_shards(folder, layout, rank, dtype) for folder in (fp8, plain))
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name]), name


# Blocks are parts of matrices; the tensors of all experts of gpt-oss and Llama 4 have three dimensions. Folders with a
# vision tower are refused.
WITHOUT = {
    "gpt_oss",
    "llama4_text",
    "llama4_text_plain",
    *(name for name, config in MORE_MODELS.items() if "vision_config" in config),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("family", sorted({*MODELS, *MORE_MODELS} - WITHOUT))
@pytest.mark.parametrize("spec", ["local", "te"])
def test_every_family_loads_exactly(make, family, spec):
    config = (MODELS | MORE_MODELS)[family] | {"num_hidden_layers": 4}
    assert_loads(make(config), Topology(tensor=2, pipeline=2), torch.float32, spec)


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_128_that_ranks_cut_load_exactly_in_bfloat16(make, scales_dtype):
    folders = make(MODELS["qwen3"] | WIDE, LARGE, scales_dtype=scales_dtype)
    assert read_storage(folders[0]) == LARGE
    assert_loads(folders, Topology(tensor=4), torch.bfloat16)


def test_every_rectangle_is_that_of_the_whole(make):
    fp8, plain = make(MODELS["qwen3"])
    shape, whole = (96, 48), load_file(plain / "model.safetensors")[UP]
    edges = (0, 1, 19, 20, 21, 40, 59)
    with HfFolder(fp8) as folder:
        read = folder.reader(UP, shape)
        for row in edges:
            for rows in (1, 20, 37):
                for col in (0, 1, 27, 28, 29):
                    for cols in (1, 19):
                        box = Box(row, rows, col, cols)
                        assert torch.equal(read(box), whole[row : row + rows, col : col + cols]), box


def test_hugging_face_dequantizes_to_the_same_bits(make):
    fp8, _ = make(MODELS["qwen3"], (24, 16))
    stored = load_file(fp8 / FIRST) | load_file(fp8 / SECOND)
    theirs = Fp8Dequantize(type("Quantizer", (), {"quantization_config": FineGrainedFP8Config()})())
    names = [name for name in stored if name + "_scale_inv" in stored and stored[name].shape[0] % 24 == 0]
    assert UP in names
    for name in names:
        values, scales = stored[name], stored[name + "_scale_inv"]
        ours = dequantize(values, scales, Box(0, values.shape[0], 0, values.shape[1]), Block(24, 16))
        assert torch.equal(theirs._dequantize_one(values, scales, torch.float32), ours)


def test_a_stream_of_tensors_is_dequantized_in_any_order(make):
    fp8, plain = make(MORE_MODELS["deepseek_v3"])
    first, second = (list(load_file(fp8 / file).items()) for file in (FIRST, SECOND))
    expected = load_file(plain / "model.safetensors")
    for stream in (first + second, second + first):
        results = dict(dequantized(iter(stream), Block(*SMALL)))
        assert results.keys() == expected.keys()
        assert all(torch.equal(results[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match="not both"):
        list(dequantized(iter(first), Block(*SMALL)))
    with pytest.raises(ConfigError, match="not that of blocks"):
        list(dequantized(iter(first + second), Block(128, 128)))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors'"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"bits": 4}, "quant_method=None"),
        ("fp8", "quant_method=None"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt='e5m2'"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, stated, message):
    config = MODELS["qwen3"] | {"quantization_config": stated}
    with pytest.raises(ConfigError, match=message):
        stored_block(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_hf_config(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        HfFolder(tmp_path)


def change(fp8, *, block=None, without=(), **tensors):
    """Changes the block in config.json, and tensors in the second file, which has the scales."""
    if block is not None:
        config = json.loads((fp8 / "config.json").read_text())
        config["quantization_config"]["weight_block_size"] = block
        (fp8 / "config.json").write_text(json.dumps(config))
    held = load_file(fp8 / SECOND) | tensors
    save_file({name: held[name] for name in held if name not in without}, fp8 / SECOND)
    index = json.loads((fp8 / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in without}
    (fp8 / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": [UP + "_scale_inv"]}, rf"'{UP}' in FP8 without its scales '{UP}_scale_inv'"),
        ({"block": [64, 64]}, r"shape \[\d, \d\], but .* \[\d, \d\] blocks .*weight_block_size=\[64, 64\]"),
        ({UP + "_scale_inv": torch.ones(5, 3)}, rf"{UP}_scale_inv' in .* shape \[5, 3\].*\[5, 2\] blocks"),
        ({UP + "_scale_inv": torch.ones(5, 2, dtype=torch.int32)}, "stored as I32, not as F32"),
    ],
)
def test_missing_and_wrong_scales_are_named(make, changes, message):
    fp8, _ = make(MODELS["qwen3"])
    change(fp8, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_shards(fp8, Layout(read_hf_config(fp8), Topology()), 0)


def test_fp8_that_the_config_does_not_state_is_refused(make):
    fp8, plain = make(MODELS["qwen3"])
    (fp8 / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"stored as F8_E4M3, which its config\.json does not explain"):
        load_shards(fp8, Layout(read_hf_config(fp8), Topology()), 0)


def test_an_export_is_the_dequantized_model_without_quantization(make, tmp_path):
    fp8, plain = make(MORE_MODELS["kimi_k2"])
    layout = Layout(read_hf_config(fp8), Topology(tensor=2))
    assert "quantization_config" not in layout.hf_config
    step = write_checkpoint(
        tmp_path / "step", layout, lambda rank: load_shards(fp8, layout, rank, torch.bfloat16), "bfloat16"
    )
    export_checkpoint(step, fp8, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    written, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", plain))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor.to(written[name].dtype))
        assert written[name].dtype == (torch.float32 if name.endswith("bias") else torch.bfloat16)
