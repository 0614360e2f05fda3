"""The layout against three oracles: Hugging Face's own tensors, plain tensor algebra, and itself in reverse."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import ALIASES, MODELS, MORE_MODELS
from safetensors.torch import load_file

from megasync.errors import ConfigError
from megasync.layout import shards as shards_module
from megasync.layout.families import FAMILIES, Split
from megasync.layout.families.delta_net import DELTA
from megasync.layout.families.latent import LATENT
from megasync.layout.layout import Layout, padded_vocab
from megasync.layout.shards import assemble, load_shards
from megasync.layout.topology import Topology

SLOW_OK = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


# Values of options that a family's tensors depend on.
SHARED = {"n_shared_experts": [1, 2], "first_k_dense_replace": [0, 1, 2]}
SPARSE = {"decoder_sparse_step": [1, 2], "mlp_only_layers": [[], [1]]}
DELTAS = {"linear_num_key_heads": [4, 8], "full_attention_interval": [2, 3, 4]}
VARIED = {
    "glm4": {"attention_bias": [False, True]},
    "glm4_moe": {"attention_bias": [False, True], "use_qk_norm": [False, True], **SHARED},
    "minimax_m2": {"rotary_dim": [2, 4]},
    "llama4_text": {"interleave_moe_layer_step": [1, 2], "intermediate_size_mlp": [4, 12, 20]},
    "qwen2_moe": SPARSE,
    "qwen3_moe": SPARSE,
    "qwen3_next": {**SPARSE, **DELTAS},
    "qwen3_5_text": DELTAS,
    "deepseek_v3": {"q_lora_rank": [None, 8], **SHARED},
    "gemma3_text": {"tie_word_embeddings": [True]},
}


@st.composite
def cases(draw):
    """(config of a tiny model, topology) that Megatron can build."""
    plain = {kind for kind, family in FAMILIES.items() if family.vision is None}
    kind = draw(st.sampled_from(sorted(plain - set(ALIASES))))
    tensor = draw(st.sampled_from([1, 2, 4]))
    data = draw(st.sampled_from([1, 2]))
    pipeline = draw(st.integers(1, 3))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    # MiniMax-M2's norms of keys are cut at groups.
    groups = draw(st.sampled_from([n for n in (1, 2, 4, 8) if kind != "minimax_m2" or n >= tensor]))
    heads = groups * draw(st.sampled_from([1, 2, 3])) * (tensor if groups < tensor else 1)
    counts = [virtual * draw(st.integers(1, 2)) for _ in range(pipeline)]
    counts[1:-1] = [virtual] * len(counts[1:-1])
    config = (MODELS | MORE_MODELS)[kind] | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kind in LATENT else groups,
        "hidden_size": heads * 4,
        "head_dim": 4,
        "intermediate_size": 8 if kind in ("minimax_m2", "gpt_oss", "llama4_text") else 4 * draw(st.integers(1, 5)),
        "moe_intermediate_size": 8,
        "vocab_size": draw(st.integers(3, 300)),
        "num_hidden_layers": sum(counts),
        "layer_types": None,
        "tie_word_embeddings": draw(st.booleans()),
    }
    config |= {name: draw(st.sampled_from(values)) for name, values in VARIED.get(kind, {}).items()}
    if kind in DELTA:
        config["linear_num_value_heads"] = config["linear_num_key_heads"] * draw(st.sampled_from([1, 2]))
        interval = config["full_attention_interval"]
        kinds = ["linear_attention" if n % interval else "full_attention" for n in range(1, sum(counts) + 1)]
        config["layer_types"] = kinds
    split = {}
    if FAMILIES[kind].sparse:
        splits = [(1, None), (1, 1), (2, 1), (2, 2), (4, 1), (1, tensor * data)]
        fits = [(ep, etp) for ep, etp in splits if tensor * data % (ep * (etp or tensor)) == 0]
        if kind == "gpt_oss":
            fits = [(ep, etp) for ep, etp in fits if (etp or tensor) == 1]
        split["expert"], split["expert_tensor"] = draw(st.sampled_from(fits))
    uneven = {"first_stage_layers": counts[0]} if pipeline > 1 else {}
    if pipeline > 2:
        uneven["last_stage_layers"] = counts[-1]
    # Hugging Face derives what is None, and head sizes of these.
    derived = {"head_dim"} if kind.startswith("qwen2") or kind in LATENT else set()
    config = {
        name: value for name, value in config.items() if name not in derived and (name, value) != ("layer_types", None)
    }
    return config, Topology(tensor, pipeline, data, virtual=virtual, **uneven, **split)


def expected_shard(item, whole, layout, rank):
    """What Megatron holds, written with reshape and chunk instead of rectangles."""
    sizes, topology = layout.sizes, layout.topology
    part, parts = topology.coords(rank).tp, topology.tensor
    if item.ep is not None:
        part, parts = topology.expert_coords(rank).etp, topology.expert_tensor_size
    tensors = [whole[name] for name, _ in item.tensors]
    if item.stacked is not None:
        tensors = [tensors[0][item.stacked].t()]
    match item.split:
        case Split.REPLICATED:
            return tensors[0]
        case Split.ROW:
            return tensors[0].chunk(parts, dim=1)[part]
        case Split.COLUMN:
            return tensors[0].chunk(parts)[part]
        case Split.VOCAB:
            rows = torch.zeros(layout.padded_vocab, tensors[0].shape[1])
            rows[: sizes.vocab] = tensors[0]
            return rows.chunk(parts)[part]
        case Split.GATED:
            halves = tensors if len(tensors) == 2 else tensors[0].chunk(2)
            return torch.cat([half.chunk(parts)[part] for half in halves])
        case Split.QKV:
            q, k, v = (tensor.reshape(sizes.groups, -1, *tensor.shape[1:]) for tensor in tensors)
            return torch.cat([q, k, v], dim=1).flatten(0, 1).chunk(parts)[part]
        case Split.GATED_QKV:
            both = tensors[0].reshape(sizes.groups, -1, 2, sizes.head_dim, sizes.hidden)
            q, gate = (both[:, :, half].flatten(1, 2) for half in range(2))
            k, v = (tensor.reshape(sizes.groups, -1, sizes.hidden) for tensor in tensors[1:])
            return torch.cat([q, gate, k, v], dim=1).flatten(0, 1).chunk(parts)[part]
        case Split.SECTIONS:
            heads = sizes.delta
            channels = [heads.key_dim, heads.key_dim, heads.group * heads.value_dim]
            if item.param.endswith("conv1d.weight"):
                sections = tensors[0].split([heads.keys * rows for rows in channels])
            else:
                sections = []
                if len(tensors) == 4:
                    sections = [*tensors[0].split([heads.keys * rows for rows in channels]), *tensors[1:]]
                    tensors = []
                fused = ([*channels, channels[-1]], [heads.group] * 2)[: len(tensors)]
                for tensor, rows in zip(tensors, fused, strict=True):
                    by_head = tensor.reshape(heads.keys, -1, sizes.hidden)
                    sections += [section.flatten(0, 1) for section in by_head.split(rows, dim=1)]
            return torch.cat([section.chunk(parts)[part] for section in sections])


@SLOW_OK
@given(case=cases(), spec=st.sampled_from(["local", "te"]))
def test_shards_are_megatrons_and_give_the_checkpoint_back_bitwise(case, spec, make_model, save_model):
    config, topology = case
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(save_model(make_model(**config), Path(folder)), topology, spec)
        whole = load_file(Path(folder) / "model.safetensors")
        held = [load_shards(folder, layout, rank) for rank in range(topology.world)]
    for rank, shard in enumerate(held):
        assert {name: tuple(tensor.shape) for name, tensor in shard.items()} == layout.params(rank)
        for item in layout.of_rank(rank):
            assert torch.equal(shard[item.param], expected_shard(item, whole, layout, rank)), (item.param, rank)
    back = {name: assemble(name, layout, lambda rank, param: held[rank][param]) for name in layout.hf_tensors}
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], whole[name]) for name in back)


@SLOW_OK
@given(case=cases())
def test_every_element_is_held_exactly_once_except_padding(case):
    config, topology = case
    layout = Layout(config, topology)
    whole = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in layout.hf_tensors.items()}
    for holders in layout.holders.values():
        for piece, _ in holders:
            shards_module.box_of(whole[piece.hf_name], piece.hf_box).add_(1)
    assert all((count == 1).all() for count in whole.values())
    for rank in range(topology.world):
        held = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in layout.params(rank).items()}
        for piece in layout.pieces(rank):
            assert piece.hf_box.rows == piece.param_box.rows
            assert piece.hf_box.cols == piece.param_box.cols
            shards_module.piece_of(held[piece.param], piece).add_(1)
        for item in layout.of_rank(rank):
            count = held[item.param]
            if item.split is Split.VOCAB:
                real = max(0, min(len(count), layout.sizes.vocab - topology.coords(rank).tp * len(count)))
                assert (count[real:] == 0).all()
                count = count[:real]
            assert (count == 1).all(), item.param


@SLOW_OK
@given(case=cases())
def test_holders_name_every_rank_that_has_the_piece_and_writers_the_first(case):
    config, topology = case
    layout = Layout(config, topology)
    having = {}
    for rank in range(topology.world):
        copies = {item.param for item in layout.of_rank(rank) if item.copy}
        for piece in layout.pieces(rank):
            if piece.param not in copies:
                having.setdefault(piece, []).append(rank)
    assert {piece: ranks for holders in layout.holders.values() for piece, ranks in holders} == {
        piece: tuple(ranks) for piece, ranks in having.items()
    }
    for rank in range(topology.world):
        writers = layout.writers(rank)
        copies = {item.param for item in layout.of_rank(rank) if item.copy}
        assert writers.keys() == layout.params(rank).keys() - copies
        for piece in layout.pieces(rank):
            if piece in having:
                assert writers[piece.param] == having[piece][0]


def test_a_rank_reads_only_its_own_slices(make_model, save_model, tmp_path, monkeypatch):
    topology = Topology(tensor=2, pipeline=2)
    layout = Layout(save_model(make_model(), tmp_path), topology)
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
    held = load_shards(tmp_path, layout, topology.rank(tp=1, dp=0, pp=1))
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
    assert "output_layer.weight" in layout.params(2)
    assert "lm_head.weight" not in layout.hf_tensors
    assert [holder.ranks for holder in layout.holders["model.embed_tokens.weight"]] == [(0,), (1,)]
    assert "output_layer.weight" not in Layout(config, Topology(tensor=2)).params(0)


def test_specs_differ_only_in_the_names_of_two_norms():
    local, te = (set(Layout(json.loads(LLAMA), Topology(), spec).params(0)) for spec in ("local", "te"))
    assert {name.split(".", 3)[-1] for name in local - te} == {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
    assert {name.split(".", 3)[-1] for name in te - local} == {
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    }


def test_down_projections_are_cut_in_local_layers_and_whole_in_transformer_engines():
    local, te = (Layout(DEEPSEEK, Topology(tensor=2), spec).params(0) for spec in ("local", "te"))
    attention = "decoder.layers.0.self_attention."
    assert local[attention + "linear_q_down_proj.weight"] == (4, 24)
    assert local[attention + "linear_kv_down_proj.weight"] == (6, 24)
    assert te[attention + "linear_q_down_proj.weight"] == (8, 24)
    assert te[attention + "linear_kv_down_proj.weight"] == (12, 24)
    assert {name.removeprefix(attention) for name in te.keys() - local.keys() if name.startswith(attention)} == {
        "linear_q_up_proj.layer_norm_weight",
        "linear_kv_up_proj.layer_norm_weight",
    }


MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 9,
}
NEXT = {
    **MOE,
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
LLAMA = """{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 12,
 "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 65}"""

DEEPSEEK = {
    **json.loads(LLAMA),
    "model_type": "deepseek_v3",
    "q_lora_rank": 8,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("change", "topology", "words"),
    [
        ({"model_type": "gpt2"}, {}, "'gpt2'.*llama, .*qwen3"),
        ({"attention_bias": True}, {}, "attention_bias=True"),
        ({"hidden_size": None}, {}, "'hidden_size'"),
        ({"num_key_value_heads": 4}, {}, "num_attention_heads=6.*num_key_value_heads=4"),
        ({}, {"tensor": 4}, "num_attention_heads=6.*tensor_parallel=4"),
        ({"intermediate_size": 13}, {"tensor": 2}, "intermediate_size=13"),
        ({}, {"tensor": 3}, "num_key_value_heads=2.*tensor_parallel=3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}, {"tensor": 3}, "20 rows"),
        ({}, {"pipeline": 3}, "pipeline_parallel=3"),
        ({}, {"data": 2, "expert": 2}, "expert_parallel=2 splits experts, but the model has none"),
        ({}, {"data": 2, "expert_tensor": 2}, "expert_tensor_parallel=2 splits experts"),
        (MOE, {"data": 4, "expert": 4}, "6 experts are not divisible by trainer.expert_parallel=4"),
        (MOE, {"data": 2, "expert_tensor": 2}, "moe_intermediate_size=9.*expert_tensor_parallel=2"),
        (MOE | {"num_experts": None}, {}, "no 'num_experts'"),
        ({"model_type": "mistral"}, {}, "sliding_window=4096 in config.json is not supported for mistral"),
        (DEEPSEEK | {"q_lora_rank": 9}, {"tensor": 2}, "q_lora_rank=9 is not divisible"),
        (DEEPSEEK | {"kv_lora_rank": 11}, {"tensor": 2}, r"kv_lora_rank \+ qk_rope_head_dim=13 is not divisible"),
        (DEEPSEEK | {"kv_lora_rank": None}, {}, "no 'kv_lora_rank'"),
        (
            DEEPSEEK | {"norm_topk_prob": False},
            {},
            "norm_topk_prob=False in config.json is not supported for deepseek_v3",
        ),
        (DEEPSEEK | {"rms_norm_eps": 1e-5}, {}, "rms_norm_eps=1e-05"),
        (MOE | {"model_type": "qwen2_moe", "qkv_bias": False}, {}, "qkv_bias=False"),
        (NEXT | {"attention_bias": True}, {}, "attention_bias=True in config.json is not supported for qwen3_next"),
        (NEXT | {"linear_num_key_heads": 3}, {"tensor": 2}, "linear_num_key_heads=3 is not divisible by trainer.tens"),
        (NEXT | {"linear_num_value_heads": 3}, {}, "linear_num_value_heads=3 is not a multiple of linear_num_key_h"),
        (NEXT | {"layer_types": ["full_attention"] * 2}, {}, "layer_types .*full_attention_interval=4 .*it has full_"),
        (NEXT | {"linear_key_head_dim": 0}, {}, "linear_key_head_dim=0 in config.json must be a whole number from 1"),
        (NEXT | {"full_attention_interval": None}, {}, "config.json has no 'full_attention_interval'"),
        (NEXT | {"full_attention_interval": 0}, {}, "full_attention_interval=0 in config.json must be a whole number"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(change, topology, words):
    with pytest.raises(ConfigError, match=words):
        Layout(json.loads(LLAMA) | change, Topology(**topology))


@pytest.mark.parametrize(("name", "other"), ALIASES.items())
def test_a_model_type_that_hugging_face_lacks_has_the_table_of_another(name, other):
    assert FAMILIES[name] is FAMILIES[other]


def test_an_unknown_spec_is_refused():
    with pytest.raises(ConfigError, match="'transformer'"):
        Layout(json.loads(LLAMA), Topology(), "transformer")
