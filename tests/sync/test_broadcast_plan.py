"""Which tensors travel together, from whom, and that every rank derives the same of it."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_shards import random_weights, shards_of

from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.broadcast.plan import ITEM_BYTES, plan_broadcast
from megasync.sync.stream import Shards, empty_part, empty_tensors, pack_part, place_part

CPU = torch.device("cpu")

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}

MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "head_dim": 4,
}

DEEPSEEK = {
    **CONFIG,
    "model_type": "deepseek_v3",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}

topologies = st.builds(
    Topology, tensor=st.sampled_from([1, 2, 4]), pipeline=st.sampled_from([1, 2, 4]), data=st.integers(1, 3)
)
limits = st.integers(1, 20_000)
dtypes = st.sampled_from(sorted(ITEM_BYTES))


@given(topology=topologies, limit=limits, dtype=dtypes, tied=st.booleans())
def test_buckets_hold_every_tensor_once_back_to_back(topology, limit, dtype, tied):
    layout = Layout(CONFIG | {"tie_word_embeddings": tied}, topology)
    plan = plan_broadcast(layout, limit, dtype)
    sent = [(entry.name, entry.shape) for bucket in plan.buckets for entry in bucket.tensors]
    assert len(sent) == len(layout.hf_tensors)
    assert dict(sent) == layout.hf_tensors
    for bucket in plan.buckets:
        offset = 0
        for entry in bucket.tensors:
            assert entry.offset == offset
            offset += prod(entry.shape) * ITEM_BYTES[dtype]
        assert bucket.nbytes == offset


def check_contributions(layout, plan, data_parallel):
    """Contributions fill each bucket exactly, and come from ranks of its stage that hold them."""
    for bucket in plan.buckets:
        elements = sum(p.hf_box.rows * p.hf_box.cols for pieces in bucket.contributions.values() for p in pieces)
        assert elements * ITEM_BYTES[bucket.dtype] == bucket.nbytes
        for rank, pieces in bucket.contributions.items():
            coords = layout.topology.coords(rank)
            assert (coords.dp in data_parallel, coords.pp) == (True, bucket.stage)
            assert set(pieces) <= set(layout.pieces(rank))


@given(topology=topologies, limit=limits)
def test_contributions_fill_each_bucket_exactly_and_come_from_ranks_that_hold_them(topology, limit):
    layout = Layout(CONFIG, topology)
    check_contributions(layout, plan_broadcast(layout, limit, "float32"), {0})


@pytest.mark.parametrize(
    ("topology", "members"),
    [
        (Topology(tensor=2, pipeline=2, data=2, expert=2), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (Topology(data=4, expert=2), [(0, 1)]),
        (Topology(tensor=2, data=2, expert=2, expert_tensor=1), [(0, 1)]),
        (Topology(tensor=2, data=2, expert_tensor=1), [(0, 1)]),
    ],
)
def test_experts_come_from_the_first_ranks_that_hold_them(topology, members):
    layout = Layout(MOE, topology)
    plan = plan_broadcast(layout, 4_000, "bfloat16")
    assert [plan.members(stage) for stage in range(topology.pipeline)] == members
    check_contributions(layout, plan, range(topology.data))


def test_tensors_of_another_dtype_have_buckets_of_their_own():
    layout = Layout(DEEPSEEK, Topology())
    plan = plan_broadcast(layout, 2**20, "bfloat16")
    assert [bucket.dtype for bucket in plan.buckets] == ["bfloat16", "float32"]
    biases = [entry.name for entry in plan.buckets[1].tensors]
    assert biases == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(1, 4)]
    assert plan.buckets[1].nbytes == 3 * 4 * 4
    assert {layout.hf_dtype(name, "bfloat16") for name in biases} == {"float32"}
    assert layout.hf_dtype("lm_head.weight", "bfloat16") == "bfloat16"


@given(limit=st.integers(1, 4000), spec=st.sampled_from(["local", "te"]))
def test_down_projections_that_the_engine_fuses_travel_together(limit, spec):
    for bucket in plan_broadcast(Layout(DEEPSEEK, Topology(tensor=2), spec), limit, "float32").buckets:
        names = {entry.name for entry in bucket.tensors}
        for layer in range(4):
            prefix = f"model.layers.{layer}.self_attn"
            assert (f"{prefix}.q_a_proj.weight" in names) == (f"{prefix}.kv_a_proj_with_mqa.weight" in names)


@given(topology=topologies, limit=limits)
def test_a_bucket_is_within_the_limit_or_a_single_fused_group(topology, limit):
    layout = Layout(CONFIG, topology)
    groups = [{name for name, _ in item.tensors} for pp in range(topology.pipeline) for item in layout.placed(pp)]
    for bucket in plan_broadcast(layout, limit, "float32").buckets:
        names = {entry.name for entry in bucket.tensors}
        inside = [group for group in groups if group & names]
        assert set().union(*inside) == names, "a fused group was split"
        assert bucket.nbytes <= limit or len(inside) == 1


@given(topology=topologies, limit=limits)
def test_the_plan_is_the_same_each_time_and_one_rank_sends_per_stage(topology, limit):
    plan = plan_broadcast(Layout(CONFIG, topology), limit, "float32")
    assert plan == plan_broadcast(Layout(dict(reversed(CONFIG.items())), topology), limit, "float32")
    assert plan.senders == tuple(topology.rank(0, 0, stage) for stage in range(topology.pipeline))
    for stage in range(topology.pipeline):
        assert {bucket.sender for bucket in plan.of_stage(stage)} == {plan.senders[stage]}
    assert plan.nbytes == sum(bucket.nbytes for bucket in plan.buckets)


def test_buckets_of_different_senders_alternate_and_one_may_hold_a_whole_stage():
    layout = Layout(CONFIG, Topology(pipeline=2))
    assert [bucket.stage for bucket in plan_broadcast(layout, 4_000, "float32").buckets[:4]] == [0, 1, 0, 1]
    assert len(plan_broadcast(layout, 2**30, "bfloat16").buckets) == 2


def test_another_data_parallel_size_changes_the_ranks_of_the_buckets_alone():
    plan = plan_broadcast(Layout(CONFIG, Topology(tensor=2, pipeline=2, data=3)), 1500, "bfloat16")
    smaller = plan.with_data_parallel(1)
    assert smaller == plan_broadcast(smaller.layout, 1500, "bfloat16") and plan.with_data_parallel(3) is plan
    assert (plan.senders, smaller.senders) == ((0, 6), (0, 2))
    assert [bucket.tensors for bucket in smaller.buckets] == [bucket.tensors for bucket in plan.buckets]
    assert max(max(bucket.contributions) for bucket in smaller.buckets) < 4


def test_unknown_dtypes_and_empty_buckets_are_refused():
    layout = Layout(CONFIG, Topology())
    with pytest.raises(ValueError, match="float64"):
        plan_broadcast(layout, 1, "float64")
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        plan_broadcast(layout, 0, "float32")


GPT_OSS = CONFIG | {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
}


@given(
    topology=st.sampled_from([Topology(), Topology(tensor=2, pipeline=2, data=2, expert=4, expert_tensor=1)]),
    limit=limits,
)
def test_tensors_of_all_experts_are_put_together_from_the_ranks_that_hold_them(topology, limit):
    layout = Layout(GPT_OSS, topology)
    tensors = random_weights(layout)
    shards = [Shards(layout, "float32", rank, shards_of(layout, rank, tensors)) for rank in range(topology.world)]
    streamed = {}
    for bucket in plan_broadcast(layout, limit, "float32").buckets:
        whole = empty_tensors(bucket, CPU)
        for rank in bucket.contributions:
            part = empty_part(bucket, rank, CPU)
            pack_part(bucket, shards[rank], part)
            place_part(bucket, rank, part, whole)
        streamed |= whole
    assert streamed.keys() == tensors.keys()
    assert all(torch.equal(streamed[name], tensors[name]) for name in tensors)
