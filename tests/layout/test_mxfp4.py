"""Folders in MXFP4 load exactly as Hugging Face dequantizes them, whatever part a rank holds."""

import itertools
import json
import random

import pytest
import torch
from random_models import MORE_MODELS, write_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megasync.errors import CheckpointError, ConfigError
from megasync.layout.layout import Box, Layout
from megasync.layout.model_files import read_hf_config, read_storage
from megasync.layout.mxfp4 import dequantized
from megasync.layout.shards import HfFolder, load_shards
from megasync.layout.topology import Topology
from megasync.sglang.plugin import dequantize_weights

CONFIG = MORE_MODELS["gpt_oss"] | {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def folders(tmp_path):
    """A folder in MXFP4 of random bytes, and what Hugging Face makes of it in float32."""
    source = write_model(tmp_path / "source", CONFIG)
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = plain[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(90, 140, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    values = json.loads((source / "config.json").read_text())
    for kind, tensors, stated in (("mxfp4", stored, {"quant_method": "mxfp4"}), ("plain", plain, None)):
        (tmp_path / kind).mkdir()
        save_file(tensors, tmp_path / kind / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / kind / "config.json").write_text(json.dumps(values | {"quantization_config": stated}))
    return tmp_path / "mxfp4", tmp_path / "plain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["local", "te"])
def test_ranks_load_what_hugging_face_dequantizes(folders, dtype, spec):
    assert (read_storage(folders[0]), read_storage(folders[1])) == ("mxfp4", None)
    layout = Layout(read_hf_config(folders[0]), Topology(tensor=2, pipeline=2, expert=2, expert_tensor=1), spec)
    for rank in range(layout.topology.world):
        ours, theirs = (load_shards(folder, layout, rank, dtype) for folder in folders)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name].dtype == dtype and torch.equal(ours[name], theirs[name]), name


def test_every_rectangle_is_that_of_the_whole(folders):
    """Also those that begin within a group of 32, and those of several experts."""
    whole = load_file(folders[1] / "model.safetensors")[DOWN]
    with HfFolder(folders[0]) as folder:
        read = folder.reader(DOWN, tuple(whole.shape))
        matrix = whole.flatten(0, 1)
        for row, rows, col in itertools.product((0, 1, 31, 32, 60, 64, 200), (1, 33, 64, 130), (0, 5, 90)):
            box = Box(row, rows, col, 6)
            assert torch.equal(read(box), matrix[row : row + rows, col : col + 6]), box


def test_a_whole_folder_is_dequantized_in_any_order(folders):
    weights = list(load_file(folders[0] / "model.safetensors").items())
    random.Random(3).shuffle(weights)
    actual = dict(dequantize_weights("mxfp4", lambda: iter(weights)))
    expected = load_file(folders[1] / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        blocks = load_file(folders[0] / "model.safetensors").get(name + "_blocks")
        if blocks is not None:
            scales = load_file(folders[0] / "model.safetensors")[name + "_scales"]
            assert torch.equal(tensor, convert_moe_packed_tensors(blocks, scales))
        assert torch.equal(tensor.float(), expected[name])
    with pytest.raises(ConfigError, match="_blocks' is one of blocks and scales in MXFP4; the other is missing"):
        list(dequantized((name, tensor) for name, tensor in weights if not name.endswith("_scales")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(DOWN + "_scales"), "in MXFP4 without its scales .*down_proj_scales"),
        (lambda tensors: tensors.pop(DOWN + "_blocks"), "has no tensor .*down_proj'"),
        (
            lambda tensors: tensors.update({DOWN + "_scales": tensors[DOWN + "_scales"][:, :-1].contiguous()}),
            r"down_proj_scales' .* has shape \[8, 95, 2\] and dtype U8, but its config.json requires \[8, 96, 2\]",
        ),
        (
            lambda tensors: tensors.update({DOWN + "_blocks": tensors[DOWN + "_blocks"].float()}),
            "down_proj_blocks' .* dtype F32, but its config.json requires .* and U8",
        ),
    ],
)
def test_missing_and_wrong_tensors_are_named(folders, change, words):
    tensors = load_file(folders[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, folders[0] / "model.safetensors", metadata={"format": "pt"})
    layout = Layout(read_hf_config(folders[0]), Topology())
    with pytest.raises(CheckpointError, match=words):
        load_shards(folders[0], layout, 0)


def test_another_models_mxfp4_is_refused_by_name(tmp_path):
    path = write_model(tmp_path / "model", MORE_MODELS["qwen3_moe"])
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match="'mxfp4' .* cannot be loaded for model_type='qwen3_moe', only for gpt_oss"):
        read_hf_config(path)
