"""The layout against three oracles: Hugging Face's own tensors, plain tensor algebra, and itself in reverse."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megasync.errors import ConfigError
from megasync.sync import shards as shards_module
from megasync.sync.families import Split
from megasync.sync.layout import Layout, padded_vocab
from megasync.sync.shards import assemble, load_shards
from megasync.sync.topology import Topology

SLOW_OK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw):
    """(config of a tiny model, topology) that Megatron can build."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    heads = groups * draw(st.sampled_from([1, 2, 3])) * (tensor if groups < tensor else 1)
    counts = [draw(st.integers(1, 2)) for _ in range(pipeline)]
    counts[1:-1] = [1] * len(counts[1:-1])
    config = {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * 4,
        "head_dim": 4,
        "intermediate_size": 4 * draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(3, 300)),
        "num_hidden_layers": sum(counts),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if config["model_type"] == "qwen2":
        del config["head_dim"]
    uneven = {"first_stage_layers": counts[0], "last_stage_layers": counts[-1]} if pipeline > 1 else {}
    return config, Topology(tensor, pipeline, draw(st.integers(1, 2)), **uneven)


def expected_shard(item, whole, layout, tp):
    """What Megatron holds, written with reshape and chunk instead of rectangles."""
    sizes, parts = layout.sizes, layout.topology.tensor
    tensors = [whole[name] for name, _ in item.tensors]
    match item.split:
        case Split.REPLICATED:
            return tensors[0]
        case Split.ROW:
            return tensors[0].chunk(parts, dim=1)[tp]
        case Split.VOCAB:
            rows = torch.zeros(layout.padded_vocab, tensors[0].shape[1])
            rows[: sizes.vocab] = tensors[0]
            return rows.chunk(parts)[tp]
        case Split.GATED:
            return torch.cat([tensor.chunk(parts)[tp] for tensor in tensors])
        case Split.QKV:
            q, k, v = (tensor.reshape(sizes.groups, -1, *tensor.shape[1:]) for tensor in tensors)
            return torch.cat([q, k, v], dim=1).flatten(0, 1).chunk(parts)[tp]


@SLOW_OK
@given(case=cases(), spec=st.sampled_from(["local", "te"]))
def test_shards_are_megatrons_and_give_the_checkpoint_back_bitwise(case, spec, make_model, save_model):
    config, topology = case
    model = make_model(**config)
    whole = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(save_model(model, Path(folder)), topology, spec)
        held = {
            (tp, pp): load_shards(folder, layout, tp, pp)
            for tp in range(topology.tensor)
            for pp in range(topology.pipeline)
        }
    for (tp, pp), shard in held.items():
        assert {name: tuple(tensor.shape) for name, tensor in shard.items()} == layout.params(tp, pp)
        for item in layout.placed(pp):
            assert torch.equal(shard[item.param], expected_shard(item, whole, layout, tp)), (item.param, tp, pp)
    back = {name: assemble(name, layout, lambda tp, pp: held[tp, pp]) for name in layout.hf_tensors}
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    assert back.keys() == whole.keys() - tied
    assert all(torch.equal(back[name], whole[name]) for name in back)


@SLOW_OK
@given(case=cases())
def test_every_element_is_written_exactly_once_except_padding(case):
    config, topology = case
    layout = Layout(config, topology)
    whole = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in layout.hf_tensors.items()}
    for holders in layout.holders.values():
        for _, _, piece in holders:
            shards_module.box_of(whole[piece.hf_name], piece.hf_box).add_(1)
    assert all((count == 1).all() for count in whole.values())
    for pp in range(topology.pipeline):
        for tp in range(topology.tensor):
            held = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in layout.params(tp, pp).items()}
            for piece in layout.pieces(tp, pp):
                assert piece.hf_box.rows == piece.param_box.rows
                assert piece.hf_box.cols == piece.param_box.cols
                shards_module.box_of(held[piece.param], piece.param_box).add_(1)
            for item in layout.placed(pp):
                count = held[item.param]
                if item.split is Split.VOCAB:
                    real = max(0, min(len(count), layout.sizes.vocab - tp * len(count)))
                    assert (count[real:] == 0).all()
                    count = count[:real]
                assert (count == 1).all(), item.param


def test_a_rank_reads_only_its_own_slices(make_model, save_model, tmp_path, monkeypatch):
    layout = Layout(save_model(make_model(), tmp_path), Topology(tensor=2, pipeline=2))
    read = []
    reader = shards_module.HfFolder.reader

    def counting(self, name, shape):
        inner = reader(self, name, shape)

        def read_box(box):
            part = inner(box)
            read.append((name, part.numel()))
            return part

        return read_box

    monkeypatch.setattr(shards_module.HfFolder, "reader", counting)
    held = load_shards(tmp_path, layout, 1, 1)
    padding = held["output_layer.weight"].shape[0] * 2 - layout.sizes.vocab
    assert sum(count for _, count in read) == sum(t.numel() for t in held.values()) - padding * layout.sizes.hidden
    assert not any(name.startswith(("model.layers.0", "model.embed")) for name, _ in read)


@given(vocab=st.integers(1, 300_000), tp=st.integers(1, 16))
def test_padded_vocabulary_is_the_smallest_multiple_of_64_per_rank(vocab, tp):
    padded = padded_vocab(vocab, tp)
    assert padded % (64 * tp) == 0
    assert vocab <= padded < vocab + 64 * tp


def test_a_tied_embedding_stands_on_both_ends_and_is_taken_from_the_first():
    config = json.loads(LLAMA) | {"tie_word_embeddings": True}
    layout = Layout(config, Topology(tensor=2, pipeline=2))
    assert "output_layer.weight" in layout.params(0, 1)
    assert "lm_head.weight" not in layout.hf_tensors
    assert {holder.pp for holder in layout.holders["model.embed_tokens.weight"]} == {0}
    assert "output_layer.weight" not in Layout(config, Topology(tensor=2)).params(0, 0)


def test_specs_differ_only_in_the_names_of_two_norms():
    local, te = (set(Layout(json.loads(LLAMA), Topology(), spec).params(0, 0)) for spec in ("local", "te"))
    assert {name.split(".", 3)[-1] for name in local - te} == {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
    assert {name.split(".", 3)[-1] for name in te - local} == {
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    }


LLAMA = """{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 12,
 "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 65}"""


@pytest.mark.parametrize(
    ("change", "topology", "words"),
    [
        ({"model_type": "gpt2"}, {}, "'gpt2'.*llama, qwen2, qwen3"),
        ({"attention_bias": True}, {}, "attention_bias=True"),
        ({"hidden_size": None}, {}, "'hidden_size'"),
        ({"num_key_value_heads": 4}, {}, "num_attention_heads=6.*num_key_value_heads=4"),
        ({}, {"tensor": 4}, "num_attention_heads=6.*tensor_parallel=4"),
        ({"intermediate_size": 13}, {"tensor": 2}, "intermediate_size=13"),
        ({}, {"tensor": 3}, "num_key_value_heads=2.*tensor_parallel=3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}, {"tensor": 3}, "20 rows"),
        ({}, {"pipeline": 3}, "pipeline_parallel=3"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(change, topology, words):
    with pytest.raises(ConfigError, match=words):
        Layout(json.loads(LLAMA) | change, Topology(**topology))


def test_an_unknown_spec_is_refused():
    with pytest.raises(ConfigError, match="'transformer'"):
        Layout(json.loads(LLAMA), Topology(), "transformer")
