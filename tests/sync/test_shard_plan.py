"""The plan of a shard-to-shard sync, executed in memory: every byte once, from a rank that holds it, to its place."""

import re
from collections import Counter, deque
from math import prod
from unittest import mock

import msgspec
import pytest
import sync_model
import torch
from fake_engine import FakeEngineRank, fake_engine, traced
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from tiny_shards import random_weights, shards_of

from megasync.errors import SyncError
from megasync.layout.engine_layout import EngineRank
from megasync.layout.layout import Box, Layout, intersect
from megasync.layout.shards import box_of, piece_of
from megasync.layout.topology import Topology
from megasync.sync.shard import plan as shard_plan
from megasync.sync.shard.feeds import assign_feeds
from megasync.sync.shard.plan import MOST_SOURCES, plan_shards, receive_plan

SLOW_OK = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw):
    """(config of a tiny model, trainer topology, engine ranks, bucket bytes, bytes from which a message is direct)."""
    tensor, pipeline, data = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    groups = draw(st.sampled_from([2, 4]))
    heads = groups * draw(st.sampled_from([2, 4]))
    config = {
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * 4,
        "head_dim": 4,
        "intermediate_size": 8 * draw(st.integers(1, 4)),
        "vocab_size": draw(st.integers(65, 300)),
        "num_hidden_layers": pipeline,
        "tie_word_embeddings": draw(st.booleans()),
    }
    topology = Topology(tensor, pipeline, data)
    return (
        config,
        topology,
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([64, 1000, 10**6])),
        draw(st.sampled_from([64, 400, 10**6])),
    )


def place(slot, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((slot.hf_box.rows, slot.hf_box.cols), (slot.row_stride, slot.col_stride), slot.offset)


def execute(plan, shards, engine) -> list[dict[str, torch.Tensor]]:
    """Writes every region where the plan says; how often each element of the engine was written."""
    written = [{name: torch.zeros_like(t, dtype=torch.int) for name, t in rank.tensors().items()} for rank in engine]
    for bucket in plan.buckets:
        live = engine[bucket.target].tensors()
        for region in bucket.regions:
            box = region.slot.hf_box
            message = torch.full((box.rows, box.cols), torch.nan)
            for piece in region.sources:
                source = piece_of(shards[bucket.source][piece.param], piece)
                assert not bucket.direct or source.is_contiguous()
                inside = piece.hf_box._replace(row=piece.hf_box.row - box.row, col=piece.hf_box.col - box.col)
                target = box_of(message, inside)
                assert target.isnan().all(), "two pieces fill the same place of a message"
                target.copy_(source.view_as(target))
            place(region.slot, live[region.slot.param]).copy_(message)
            place(region.slot, written[bucket.target][region.slot.param]).add_(1)
    return written


@given(cases())
@SLOW_OK
def test_every_element_is_written_once_with_the_bits_of_a_load(case):
    config, topology, size, limit, direct = case
    layout = Layout(config, topology)
    whole = random_weights(layout)
    shards = [shards_of(layout, rank, whole) for rank in range(topology.world)]
    engine, oracle = fake_engine(config, size), fake_engine(config, size)
    ranks = traced(engine, layout)
    with mock.patch.object(shard_plan, "DIRECT_BYTES", direct):
        plan = plan_shards(layout, ranks, limit, "float32")
    assert all(bucket.nbytes == 4 * bucket.elements >= direct for bucket in plan.buckets if bucket.direct)
    written = execute(plan, shards, engine)
    for tp in range(size):
        oracle[tp].load_weights(whole.items())
        filled = {(fill.param, fill.offset) for fill in ranks[tp].fills}
        for name, expected in oracle[tp].tensors().items():
            assert torch.equal(engine[tp].tensors()[name], expected), name
            counts = written[tp][name]
            assert counts.max() <= 1
            # What is not written is what the loader itself fills with zeros.
            assert (counts == 1).all() or any(param == name for param, _ in filled)


# More ranks than may be sources of one engine rank.
MANY = (
    {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "head_dim": 4,
        "intermediate_size": 24,
        "vocab_size": 65,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    },
    Topology(tensor=4, pipeline=2, data=3),
    1,
    1000,
    64,
)


@given(cases())
@example(MANY)
@SLOW_OK
def test_buckets_keep_to_the_limit_and_replicas_share_the_work(case):
    config, topology, size, limit, direct = case
    layout = Layout(config, topology)
    ranks = traced(fake_engine(config, size), layout)
    with mock.patch.object(shard_plan, "DIRECT_BYTES", direct):
        plan = plan_shards(layout, ranks, limit, "float32")
    widest = max(shape[-1] for shape in layout.hf_tensors.values()) * 4
    assert max(bucket.nbytes for bucket in plan.buckets) <= max(limit, widest) + 8
    needed = sum(slot.hf_box.rows * slot.hf_box.cols * 4 for rank in ranks for slot in rank.slots)
    padding = 8 * len(plan.buckets)
    assert needed <= plan.nbytes <= needed + padding
    # Replicas differ by one assignment at most: the largest part of a slot that one rank sends.
    sent = plan.sent_bytes()
    for tp in range(topology.tensor):
        for pp in range(topology.pipeline):
            replicas = [sent.get(topology.rank(tp, dp, pp), 0) for dp in range(topology.data)]
            if topology.world > shard_plan.MOST_SOURCES:
                # Some send nothing.
                replicas = [nbytes for nbytes in replicas if nbytes]
            assert max(replicas) - min(replicas) <= max(limit, widest) + padding


@pytest.mark.parametrize(
    ("config", "trainer", "engine", "engines", "most_links"),
    [
        (sync_model.QWEN3_32B, Topology(8, 2, 32), Topology(2), 256, 8),
        (sync_model.LLAMA_70B, Topology(8, 4, 8), Topology(8), 32, 8),
        (sync_model.QWEN3_32B, Topology(8, 2, 1), Topology(2), 8, 8),
        (sync_model.LLAMA_70B, Topology(8, 4, 8), Topology(8), 2, 8),
    ],
    ids=["512 to 256 x TP2", "256 to 32 x TP8", "16 to 8 x TP2", "256 to 2 x TP8"],
)
def test_at_full_size_links_are_few_and_senders_send_equally_much(config, trainer, engine, engines, most_links):
    layout, ranks = Layout(config, trainer.with_replicas(1)), sync_model.engine_ranks(config, engine)
    single = plan_shards(layout, ranks, sync_model.BUCKET_BYTES, "bfloat16")
    most = max(1, MOST_SOURCES // max(len(single.sources_of(tp)) for tp in range(engine.world)))
    feeds = assign_feeds([], engines, trainer.replicas, min(most, trainer.replicas))
    links, sent = Counter(), Counter()
    for shares in {feed.shares for feed in feeds}:
        few = Layout(config, trainer.with_replicas(len(shares)))
        plan = plan_shards(few, ranks, sync_model.BUCKET_BYTES, "bfloat16", shares)
        assert max(len(plan.sources_of(tp)) for tp in range(engine.world)) <= 16
        for feed in (feed for feed in feeds if feed.shares == shares):
            for local, nbytes in plan.sent_bytes().items():
                rank = trainer.rank_of(feed.replicas, local)
                links[rank] += 1
                sent[rank] += nbytes
    assert max(links.values()) <= most_links
    assert max(sent.values()) <= 1.1 * sum(sent.values()) / len(sent)
    # All of them, as far as the limit of sources allows.
    assert len(sent) == trainer.world * min(1, most * engines / trainer.replicas)


@given(cases(), st.integers(0, 5))
@SLOW_OK
def test_one_queue_a_rank_never_blocks(case, turn):
    """As NCCL does: a message needs the head of both ranks' queues."""
    config, topology, size, limit, direct = case
    layout = Layout(config, topology)
    ranks = traced(fake_engine(config, size), layout)
    with mock.patch.object(shard_plan, "DIRECT_BYTES", direct):
        plan = plan_shards(layout, ranks, limit, "float32")
    queues = [deque(tag for tag, _ in plan.of_source(source)) for source in range(topology.world)]
    for tp in range(size):
        queues.append(deque(bucket.tag for bucket in receive_plan(plan, tp, "", (), turn).buckets))
    left = len(plan.buckets)
    while left:
        heads = Counter(queue[0] for queue in queues if queue)
        met = {tag for tag, ends in heads.items() if ends == 2}
        assert met, f"{left} messages are left and no two ranks meet"
        for queue in queues:
            if queue and queue[0] in met:
                queue.popleft()
        left -= len(met)
    assert not any(queues)


def test_the_plan_is_the_same_wherever_it_is_made_and_engines_of_the_same_ranks_begin_with_different_ones():
    layout, ranks = small_case()
    plan = plan_shards(layout, ranks, 500, "float32")
    first = [receive_plan(plan, 0, "", (), turn).buckets[0].source for turn in range(len(plan.sources_of(0)))]
    assert sorted(first) == plan.sources_of(0)
    copies = [msgspec.convert(msgspec.to_builtins(rank), EngineRank) for rank in ranks]
    assert plan == plan_shards(layout, copies, 500, "float32")


def small_case() -> tuple[Layout, list[EngineRank]]:
    config = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "vocab_size": 101,
        "num_hidden_layers": 2,
    }
    layout = Layout(config, Topology(2, 1, 2))
    return layout, traced(fake_engine(config, 2), layout)


def without_a_tensor(layout: Layout, ranks: list[EngineRank]) -> tuple[Layout, list[EngineRank], str]:
    name = "model.layers.1.mlp.down_proj.weight"
    kept = [EngineRank(tuple(s for s in r.slots if s.hf_name != name), r.fills, r.dtypes, r.sizes) for r in ranks]
    return layout, kept, rf"keep 0 of the {prod(layout.hf_tensors[name])} elements of '{name}'"


def with_an_unwritten_parameter(layout: Layout, ranks: list[EngineRank]) -> tuple[Layout, list[EngineRank], str]:
    more = [EngineRank(r.slots, r.fills, r.dtypes, r.sizes, ("extra.weight",)) for r in ranks]
    return layout, more, r"parameters of engine rank 0 unwritten: extra\.weight"


def quantized(layout: Layout, ranks: list[EngineRank]) -> tuple[Layout, list[EngineRank], str]:
    name = ranks[0].slots[0].param
    other = [structs.replace(rank, dtypes={**rank.dtypes, name: "float8_e4m3fn"}) for rank in ranks]
    return layout, other, rf"keeps '{re.escape(name)}' in float8_e4m3fn, .* unquantized"


def of_a_smaller_model(layout: Layout, ranks: list[EngineRank]) -> tuple[Layout, list[EngineRank], str]:
    smaller = Layout({**layout.hf_config, "num_hidden_layers": 1}, layout.topology)
    return smaller, ranks, r"the engine keeps 'model\.layers\.1\.[^']*', which the trainer"


@pytest.mark.parametrize("change", [without_a_tensor, with_an_unwritten_parameter, quantized, of_a_smaller_model])
def test_what_does_not_fit_together_is_named(change):
    layout, ranks, words = change(*small_case())
    with pytest.raises(SyncError, match=words):
        plan_shards(layout, ranks, 500, "float32")


boxes = st.builds(Box, st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5))


@given(boxes, boxes)
def test_the_intersection_holds_the_common_elements(one, other):
    def elements(box):
        return {(r, c) for r in range(box.row, box.row + box.rows) for c in range(box.col, box.col + box.cols)}

    common = intersect(one, other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)


def test_the_fake_engine_cuts_as_servers_do():
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "intermediate_size": 8}
    rank = FakeEngineRank({**config, "model_type": "llama", "vocab_size": 10, "num_hidden_layers": 1}, 1, 4)
    q, k = torch.arange(64.0).view(8, 8), 100 + torch.arange(32.0).view(4, 8)
    attention = "model.layers.0.self_attn."
    rank.load_weights([(f"{attention}q_proj.weight", q), (f"{attention}k_proj.weight", k)])
    held = rank.held[rank.names.index("0.qkv")].data
    # The second of four ranks has the second head, and shares the first key-value head with the first rank.
    assert torch.equal(held[:2], q[2:4])
    assert torch.equal(held[2:4], k[:2])
