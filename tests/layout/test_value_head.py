"""A value model's layout: the head stands on the last stage, loads from a token classifier or is made anew."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny_model, make_tiny_value_model
from tiny_shards import write_checkpoint
from transformers import AutoModelForTokenClassification

from megasync.layout.families import FAMILIES
from megasync.layout.families.value_head import BIAS, WEIGHT
from megasync.layout.layout import Layout
from megasync.layout.shards import describe, export_checkpoint, layout_of, load_shards
from megasync.layout.topology import Topology
from megasync.trainer.model import fresh_value_head

TOPOLOGY = Topology(tensor=2, pipeline=2)
HEAD = {"output_layer.weight": (1, 64), "output_layer.bias": (1,)}


def layout_for(folder, topology=TOPOLOGY):
    return Layout(json.loads((folder / "config.json").read_text()), topology, value_head=True)


def saved(path, folder, layout):
    """A checkpoint of the folder, with a new head where it has none."""
    head = fresh_value_head(layout, seed=7)
    return write_checkpoint(path, layout, lambda rank: load_shards(folder, layout, rank, absent=head))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_stands_on_the_last_stage_in_place_of_the_language_models(tmp_path, tied):
    layout = layout_for(make_tiny_model(tmp_path, tied=tied, tokenizer=False))
    ends = [{name: shape for name, shape in layout.params(rank).items() if "decoder" not in name} for rank in range(4)]
    assert ends == [{"embedding.word_embeddings.weight": (192, 64)}] * 2 + [HEAD] * 2
    assert {WEIGHT, BIAS} < layout.hf_tensors.keys()
    assert "lm_head.weight" not in layout.hf_tensors
    assert not layout.tied


def test_a_description_brings_the_layout_back(tmp_path):
    layout = layout_for(make_tiny_model(tmp_path, tokenizer=False))
    back, dtype = layout_of(json.loads(json.dumps(describe(layout, "bfloat16"))))
    assert (back.value_head, back.hf_tensors, dtype) == (True, layout.hf_tensors, "bfloat16")


def test_a_language_model_gets_the_same_new_head_on_every_rank(tmp_path):
    folder = make_tiny_model(tmp_path, tokenizer=False)
    layout = layout_for(folder)
    held = [load_shards(folder, layout, rank, absent=fresh_value_head(layout, seed=7)) for rank in (2, 3)]
    assert torch.equal(held[0]["output_layer.weight"], held[1]["output_layer.weight"])
    # `make_tiny_model` asks for initial weights of 0.2.
    assert held[0]["output_layer.weight"].std().item() == pytest.approx(0.2, rel=0.3)
    assert held[0]["output_layer.bias"].tolist() == [0]
    assert not torch.equal(fresh_value_head(layout, seed=8)[WEIGHT], held[0]["output_layer.weight"])


def test_a_head_that_is_there_is_kept_and_comes_back_bitwise(tmp_path):
    folder = make_tiny_value_model(tmp_path / "model")
    layout, whole = layout_for(folder), load_file(folder / "model.safetensors")
    export_checkpoint(
        saved(tmp_path / "step", folder, layout),
        make_tiny_model(tmp_path / "policy", tokenizer=False),
        tmp_path / "out",
    )
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], whole[name]) for name in whole)


def test_hugging_face_has_a_token_classifier_of_every_other_family():
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as classifiers

    plain = {kind for kind, family in FAMILIES.items() if family.vision is None}
    assert plain - set(classifiers) == {
        "gemma3_text",
        "glm4_moe",
        "kimi_k2",
        "llama4_text",
        "minimax_m2",
        "qwen3_5_text",
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "glm4", "qwen2_moe", "qwen3_moe"])
def test_the_heads_tensors_are_those_of_the_token_classifier(tmp_path, family):
    folder = make_tiny_value_model(tmp_path, family)
    layout = layout_for(folder, Topology())
    assert layout.hf_tensors == {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}


def test_an_exported_critic_is_loaded_without_further_options(tmp_path):
    source = make_tiny_model(tmp_path / "policy", tokenizer=False)
    layout = layout_for(source, Topology())
    export_checkpoint(saved(tmp_path / "step", source, layout), source, tmp_path / "out")
    model, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.score.out_features, model.dropout.p) == (1, 0.0)
