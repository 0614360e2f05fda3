"""Folders with a vision tower: the language model is trained, the tower's tensors pass through unchanged."""

import pytest
import torch
from random_models import MORE_MODELS, write_model
from safetensors.torch import load_file, save_file
from tiny_shards import write_checkpoint
from transformers import AutoModelForImageTextToText

from megasync.errors import CheckpointError, ConfigError, TraceError
from megasync.layout.adapter import AdapterLayout, AdapterShape
from megasync.layout.block_fp8 import Block
from megasync.layout.engine_layout import EngineRank, Fill, Slot
from megasync.layout.families import language_model
from megasync.layout.layout import Box, Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.quantized import QuantizedLayout
from megasync.layout.shards import box_of, export_checkpoint, fill_params, load_shards, read_layout
from megasync.layout.topology import Topology
from megasync.offline.merge import export_model

FAMILIES = ["gemma3", "qwen3_5", "qwen3_5_moe", "llama4"]
# The model without the tower: its type, and how names begin with it and without.
TEXT = {
    "gemma3": ("gemma3_text", "language_model.", ""),
    "qwen3_5": ("qwen3_5_text", "model.language_model.", "model."),
    "llama4": ("llama4_text", "language_model.", ""),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def folder(family, tmp_path):
    path = write_model(tmp_path / "model", MORE_MODELS[family])
    (path / "preprocessor_config.json").write_text("{}")
    return path


def logits(path):
    model, report = AutoModelForImageTextToText.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model(torch.arange(3, 12)[None]).logits


def checkpoint(path, folder, layout, dtype=torch.float32):
    def shards(rank):
        # As training would.
        return {name: tensor * 1.5 for name, tensor in load_shards(folder, layout, rank, dtype).items()}

    return write_checkpoint(path, layout, shards, str(dtype).removeprefix("torch."))


def test_the_tables_name_every_tensor_that_hugging_face_loads(folder):
    layout = Layout(read_hf_config(folder), Topology())
    logits(folder)
    assert layout.hf_tensors.keys() | layout.frozen_tensors.keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("family", sorted(TEXT), indirect=True)
def test_the_language_model_is_laid_out_as_without_a_tower(family, folder):
    kind, root, plain = TEXT[family]
    topology = Topology(tensor=2, pipeline=2)
    layout = Layout(read_hf_config(folder), topology)
    text = Layout({**MORE_MODELS[family]["text_config"], "model_type": kind}, topology)
    assert layout.sizes == text.sizes
    assert {name.replace(root, plain): shape for name, shape in layout.hf_tensors.items()} == text.hf_tensors
    for rank in range(topology.world):
        named = [piece._replace(hf_name=piece.hf_name.replace(root, plain)) for piece in layout.pieces(rank)]
        assert named == text.pieces(rank)


def test_an_export_is_a_complete_folder_with_the_tower_bit_for_bit(folder, tmp_path, monkeypatch):
    layout = Layout(read_hf_config(folder), Topology(tensor=2, pipeline=2))
    step = checkpoint(tmp_path / "step", folder, layout)
    assert read_layout(step)[0].hf_tensors == layout.hf_tensors
    export_checkpoint(step, folder, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if name in layout.frozen_tensors else tensor * 1.5), name
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    save_file(after, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(tmp_path / "out"), logits(folder))
    # Several files, and a tower in another dtype than the checkpoint.
    monkeypatch.setattr("megasync.layout.shards.MAX_FILE_BYTES", 20_000)
    export_checkpoint(step, folder, tmp_path / "many")
    assert torch.equal(logits(tmp_path / "many"), logits(folder))


def test_an_export_keeps_the_towers_own_dtype(folder, tmp_path):
    layout = Layout(read_hf_config(folder), Topology())
    step = checkpoint(tmp_path / "step", folder, layout, torch.bfloat16)
    export_checkpoint(step, folder, tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if name in layout.frozen_tensors else torch.bfloat16), name


def test_an_export_without_a_tensor_of_the_tower_is_refused(folder, tmp_path):
    layout = Layout(read_hf_config(folder), Topology())
    step = checkpoint(tmp_path / "step", folder, layout)
    tensors = load_file(folder / "model.safetensors")
    victim = next(iter(layout.frozen_tensors))
    del tensors[victim]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=victim):
        export_checkpoint(step, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_have_the_names_of_peft_and_merge_into_a_complete_folder(folder, tmp_path):
    peft = pytest.importorskip("peft")
    shape = AdapterShape(rank=3, scale=2.0, targets=("down_proj", "gate_proj", "o_proj", "up_proj"))
    layout = AdapterLayout(Layout(read_hf_config(folder), Topology(tensor=2, pipeline=2)), shape)
    torch.manual_seed(0)
    whole = {name: torch.randn(shape) * 0.2 for name, shape in layout.hf_tensors.items()}

    def shards(rank):
        return fill_params(layout, rank, lambda name, box: box_of(whole[name], box), torch.float32)

    step = write_checkpoint(tmp_path / "step", layout, shards)
    export_checkpoint(step, folder, tmp_path / "peft")
    assert load_file(tmp_path / "peft" / "adapter_model.safetensors").keys() == whole.keys()
    export_model(step, folder, tmp_path / "merged")
    base = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")(torch.arange(3, 12)[None]).logits
    torch.testing.assert_close(adapted, logits(tmp_path / "merged"), atol=1e-5, rtol=1e-5)
    assert (adapted - logits(folder)).abs().max() > 0.1


def test_published_configurations_leave_out_what_transformers_assumes():
    """The text_config of Gemma-3-4B."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    values = {"model_type": "gemma3", "text_config": text, "vision_config": MORE_MODELS["gemma3"]["vision_config"]}
    model = language_model(values)
    sizes = Layout(model, Topology()).sizes
    assert (sizes.vocab, sizes.heads, sizes.groups, sizes.head_dim, sizes.tied) == (262208, 8, 4, 256, True)
    assert (model["rms_norm_eps"], model["max_position_embeddings"], model["sliding_window"]) == (1e-6, 131072, 1024)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gemma3", {"text_config": None}, "text_config=None"),
        ("gemma3", {"vision_config": 3}, "vision_config=3"),
        ("gemma3", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        (
            "gemma3",
            {"text_config": {"tie_word_embeddings": False}},
            "contradicts tie_word_embeddings=True of the whole",
        ),
        ("gemma3", {"vision_config": {"vision_use_head": True}}, "vision_use_head"),
        *(
            (family, {"vision_config": {**MORE_MODELS[family]["vision_config"], key: value}}, words)
            for family, key, value, words in (
                ("gemma3", "patch_size", "14", "vision_config.patch_size='14'"),
                ("qwen3_5", "out_hidden_size", 32, "out_hidden_size=32"),
                ("qwen3_5", "deepstack_visual_indexes", [1], "deepstack_visual_indexes"),
                ("llama4", "projector_output_dim", 32, "projector_output_dim=32"),
                ("llama4", "vision_output_dim", None, "vision_output_dim=7680"),
                ("llama4", "multi_modal_projector_bias", True, "multi_modal_projector_bias"),
            )
        ),
    ],
)
def test_contradictions_and_towers_that_a_family_does_not_have_are_refused(family, change, words):
    with pytest.raises(ConfigError, match=words):
        Layout(language_model({**MORE_MODELS[family], **change}), Topology()).frozen_tensors  # noqa: B018


def test_block_fp8_is_refused(folder):
    layout = Layout(read_hf_config(folder), Topology())
    with pytest.raises(ConfigError, match="vision tower"):
        QuantizedLayout(layout, Block(16, 16), [])


BOX = Box(0, 4, 0, 4)


def engine_rank(*slots):
    sizes = {"language": 16, "tower": 16}
    fill = Fill("tower", 0, 1, 1, 1, 1, 0.0)
    return EngineRank(slots, (fill,), dict.fromkeys(sizes, "float32"), sizes, ("left",))


def test_a_trace_without_the_tower_has_no_parameter_of_it_and_still_tells_what_nothing_fills():
    own, frozen = Slot("model.norm", BOX, "language", 0, 4, 1), Slot("vision.norm", BOX, "tower", 0, 4, 1)
    kept = engine_rank(own, frozen).without({"vision.norm": (16,)})
    assert kept == EngineRank((own,), (), {"language": "float32"}, {"language": 16}, ("left",))
    rank = engine_rank(own)
    assert rank.without({}) is rank


def test_a_parameter_of_both_is_refused():
    mixed = Slot("model.norm", BOX, "tower", 0, 4, 1), Slot("vision.norm", BOX, "tower", 0, 4, 1)
    with pytest.raises(TraceError, match=r"'tower' has 'model.norm'"):
        engine_rank(*mixed).without(["vision.norm"])
