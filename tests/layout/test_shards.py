import json
import math
import os
import shutil
from unittest.mock import Mock

import pytest
import torch
from random_models import MORE_MODELS, write_model
from safetensors.torch import load_file, save_file
from tiny_shards import write_checkpoint
from transformers import AutoModelForCausalLM

from megasync.errors import CheckpointError
from megasync.layout import shards
from megasync.layout.layout import Layout
from megasync.layout.shards import export_checkpoint, load_shards, shard_file
from megasync.layout.topology import Topology


@pytest.fixture
def folder(make_model, save_model, tmp_path):
    """(folder, config, state dict) of a tiny model in one file."""
    model = make_model()
    path = tmp_path / "model"
    return path, save_model(model, path), model.state_dict()


def checkpoint_of(path, hf_dir, layout, dtype="float32"):
    return write_checkpoint(path, layout, lambda rank: load_shards(hf_dir, layout, rank), dtype)


def test_a_folder_of_many_files_loads_like_one(make_model, save_model, tmp_path):
    model = make_model()
    config = save_model(model, tmp_path / "one")
    save_model(model, tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    layout = Layout(config, Topology(tensor=2))
    one, many = (load_shards(tmp_path / name, layout, 1) for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_shards_have_the_dtype_that_was_asked_for(folder):
    path, config, state = folder
    held = load_shards(path, Layout(config, Topology()), 0, torch.bfloat16)
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert torch.equal(held["decoder.final_layernorm.weight"], state["model.norm.weight"].bfloat16())


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        shards.HfFolder(tmp_path)


def test_a_missing_file_is_named(make_model, save_model, tmp_path):
    config = save_model(make_model(), tmp_path, max_shard_size="8KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        load_shards(tmp_path, Layout(config, Topology()), 0)


UP = "model.layers.1.mlp.up_proj.weight"


def spoilt(value):
    def spoil(state):
        state[UP][3, 2] = value

    return spoil


@pytest.mark.parametrize(
    ("change", "vocabulary", "words"),
    [
        (lambda state: state.pop(UP), 101, r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (lambda state: None, 99, r"embed_tokens.*\[101, 16\].*\[99, 16\]"),
        *(
            (spoilt(value), 101, r"up_proj\.weight' in .*model\.safetensors holds NaN or infinity")
            for value in (math.nan, math.inf, -math.inf)
        ),
    ],
)
def test_a_missing_a_misshapen_and_a_non_finite_tensor_are_named(folder, change, vocabulary, words):
    path, config, state = folder
    change(state)
    save_file(state, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_shards(path, Layout(config | {"vocab_size": vocabulary}, Topology()), 0)


def test_a_damaged_file_is_named(folder):
    path, config, _ = folder
    (path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_shards(path, Layout(config, Topology()), 0)


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_checkpoint_is_bitwise_the_model(make_model, save_model, tmp_path, tied):
    model = make_model(tie_word_embeddings=tied)
    source = tmp_path / "model"
    layout = Layout(save_model(model, source), Topology(tensor=2, pipeline=2))
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("stays behind")
    export_checkpoint(checkpoint_of(tmp_path / "step", source, layout), source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    written, saved = (load_file(path / "model.safetensors") for path in (tmp_path / "out", source))
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in saved)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(again(torch.tensor([[1, 2, 3]])).logits, model(torch.tensor([[1, 2, 3]])).logits)


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("qwen3_moe", Topology(tensor=2, data=2, pipeline=2, virtual=2, expert=2)),
        ("gpt_oss", Topology(tensor=2, data=2, pipeline=2, expert=2, expert_tensor=1)),
        ("qwen2_moe", Topology(tensor=2, data=2, expert=4, expert_tensor=1)),
        ("deepseek_v3", Topology(tensor=2, data=2, pipeline=2, expert=2)),
        ("glm4_moe", Topology(tensor=2, data=2, expert=4, expert_tensor=1)),
        ("minimax_m2", Topology(tensor=2, data=2, pipeline=2, expert=2)),
        ("mistral", Topology(pipeline=2, virtual=2, data=2)),
        ("glm4", Topology(tensor=2, pipeline=2)),
    ],
)
def test_each_parameter_is_stored_once_and_exported_bitwise(tmp_path, family, topology):
    source = write_model(tmp_path / "model", MORE_MODELS[family])
    layout = Layout(MORE_MODELS[family], topology)
    checkpoint = checkpoint_of(tmp_path / "step", source, layout)
    stored = sum(tensor.numel() for file in checkpoint.glob("*.safetensors") for tensor in load_file(file).values())
    tables = sum(shape[0] == layout.sizes.vocab for shape in layout.hf_tensors.values())
    padding = tables * (layout.padded_vocab - layout.sizes.vocab) * layout.sizes.hidden
    assert stored == sum(torch.Size(shape).numel() for shape in layout.hf_tensors.values()) + padding
    with shards.ShardFiles(checkpoint) as files:
        read = shards.reading_parts(layout, files.part)
        for rank in range(topology.world):
            loaded = shards.fill_params(layout, rank, read, torch.float32)
            expected = load_shards(source, layout, rank)
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], expected[name]) for name in expected)
            # A data-parallel rank's optimizer has some rows of a parameter.
            pieces = shards.pieces_by_param(layout, rank)
            for name, whole in expected.items():
                rows = range(len(whole) // 3, len(whole) - len(whole) // 4)
                part = shards.fill_rows(tuple(whole.shape), pieces[name], rows, read, torch.float32)
                assert torch.equal(part, whole[rows.start : rows.stop])
    export_checkpoint(checkpoint, source, tmp_path / "out")
    written, saved = (load_file(path / "model.safetensors") for path in (tmp_path / "out", source))
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in saved)


def test_a_routers_bias_stays_float32_and_layers_that_predict_ahead_are_gone_from_the_config(tmp_path):
    source = write_model(tmp_path / "model", MORE_MODELS["deepseek_v3"])
    layout = Layout(MORE_MODELS["deepseek_v3"], Topology(tensor=2))
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    export_checkpoint(checkpoint_of(tmp_path / "step", source, layout, "bfloat16"), source, tmp_path / "out")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_large_export_is_cut_into_files_with_an_index(folder, tmp_path, monkeypatch):
    path, config, state = folder
    monkeypatch.setattr(shards, "MAX_FILE_BYTES", 12_000)
    layout = Layout(config, Topology(tensor=2))
    export_checkpoint(checkpoint_of(tmp_path / "step", path, layout, "bfloat16"), path, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 2 for tensor in state.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], state[name].bfloat16())
    assert set(index["weight_map"]) == set(state)


def test_an_incomplete_checkpoint_leaves_no_output(folder, tmp_path):
    path, config, _ = folder
    layout = Layout(config, Topology(tensor=2))
    checkpoint = checkpoint_of(tmp_path / "step", path, layout)
    (checkpoint / shard_file(1)).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors is missing"):
        export_checkpoint(checkpoint, path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "step"]


def test_an_export_is_readable_and_replaces_an_earlier_one_only_when_it_is_whole(folder, tmp_path, monkeypatch):
    path, config, state = folder
    checkpoint = checkpoint_of(tmp_path / "step", path, Layout(config, Topology()))
    out = tmp_path / "out"
    out.mkdir()
    (out / "of an earlier export").touch()
    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_file", Mock(side_effect=OSError("no space left")))
        with pytest.raises(CheckpointError, match=f"export to {out} failed: no space left"):
            export_checkpoint(checkpoint, path, out, replace=True)
    assert [each.name for each in out.iterdir()] == ["of an earlier export"]
    before = os.umask(0o027)
    try:
        export_checkpoint(checkpoint, path, out, replace=True)
    finally:
        os.umask(before)
    assert load_file(out / "model.safetensors").keys() == state.keys()
    assert {each.stat().st_mode & 0o777 for each in out.iterdir()} == {0o640} and out.stat().st_mode & 0o777 == 0o750
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "out", "step"]


def test_a_checkpoint_without_layout_and_a_full_output_folder_are_refused(folder, tmp_path):
    path, config, _ = folder
    (tmp_path / "step").mkdir()
    with pytest.raises(CheckpointError, match=r"no layout\.json"):
        export_checkpoint(tmp_path / "step", path, tmp_path / "out")
    shutil.rmtree(tmp_path / "step")
    checkpoint = checkpoint_of(tmp_path / "step", path, Layout(config, Topology()))
    with pytest.raises(CheckpointError, match="not empty"):
        export_checkpoint(checkpoint, path, path)
    (checkpoint / "layout.json").write_text('{"spec": "local"}')
    with pytest.raises(CheckpointError, match=r"layout\.json is damaged"):
        export_checkpoint(checkpoint, path, tmp_path / "out")
