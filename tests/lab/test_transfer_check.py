"""The check of a layout: silent on a right plan, and naming the tensor that a broken one spoils."""

from dataclasses import replace

import pytest
import torch
from fake_engine import fake_engine, traced
from msgspec import structs

from megasync.lab.layout_check import random_weights
from megasync.lab.transfer_check import check_transfer
from megasync.layout.engine_layout import Fill
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.shard.plan import ShardPlan, plan_shards

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 101,
    "num_hidden_layers": 4,
}
BUCKET_BYTES = 2_000
# Fused with its neighbours on both sides.
VICTIM = "model.layers.2.self_attn.k_proj.weight"
NEIGHBOUR = "model.layers.2.self_attn.v_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
TOPOLOGY = Topology(2, 2, 2)


def case(topology=TOPOLOGY, size=2, engine_dtype=torch.float32, dtype="float32", **changes):
    layout = Layout({**CONFIG, **changes}, topology)
    engine = traced(fake_engine(layout.hf_config, size, engine_dtype), layout)
    return layout, engine, plan_shards(layout, engine, BUCKET_BYTES, dtype)


def run(layout, engine, plan, dtype="float32"):
    return check_transfer(layout, engine, plan, random_weights(layout.hf_tensors), dtype)


@pytest.mark.parametrize(
    ("topology", "size", "changes"),
    [
        (Topology(), 1, {}),
        (Topology(2, 2, 2), 4, {"tie_word_embeddings": True}),
        (Topology(4, 2, 1, virtual=2), 2, {}),
    ],
)
def test_a_right_plan_has_no_problems(topology, size, changes):
    layout, engine, plan = case(topology, size, **changes)
    assert run(layout, engine, plan).problems == []


def test_memory_does_not_grow_with_the_layers():
    shallow, deep = (run(*case(num_hidden_layers=layers)).peak_bytes for layers in (4, 16))
    assert 0 < deep < 1.3 * shallow


def test_an_engine_of_another_dtype_gets_what_a_cast_gives():
    layout, engine, plan = case(engine_dtype=torch.bfloat16)
    assert run(layout, engine, plan).problems == []


def test_padding_that_a_load_does_not_write_is_counted_and_no_problem():
    layout, engine, plan = case()
    without = [structs.replace(rank, fills=()) for rank in engine]
    padding = sum(fill.rows * fill.cols for rank in engine for fill in rank.fills)
    outcome = run(layout, without, plan)
    assert outcome.problems == []
    assert padding and sum(outcome.untouched.values()) == padding


def broken(plan: ShardPlan, change) -> ShardPlan:
    """The plan with other regions in place of the first one of the victim."""
    for index, bucket in enumerate(plan.buckets):
        for at, region in enumerate(bucket.regions):
            if region.slot.hf_name == VICTIM:
                regions = (*bucket.regions[:at], *change(region), *bucket.regions[at + 1 :])
                buckets = list(plan.buckets)
                buckets[index : index + 1] = [replace(bucket, regions=regions)] if regions else []
                return replace(plan, buckets=tuple(buckets))
    raise AssertionError("no bucket has the victim")


def shifted(region):
    yield replace(region, slot=region.slot._replace(offset=region.slot.offset + 1))


def dropped(region):
    yield from ()


def doubled(region):
    yield from (region, region)


def of_other_rows(region):
    """The right numbers of another place of the same shape in the trainer's parameter."""
    first, *rest = region.sources
    box = first.param_box
    other = box._replace(row=box.row + 1, rows=box.rows)
    yield replace(region, sources=(first._replace(param_box=other), *rest))


def beyond_the_end(region):
    yield replace(region, slot=region.slot._replace(offset=10**6))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shifted, "written 0 to 1 times"),
        (dropped, "written 0 times"),
        (doubled, "written 2 times"),
        (of_other_rows, "differ from a load's"),
        (beyond_the_end, "is sent to elements up to"),
    ],
)
def test_a_broken_region_is_found_and_its_tensor_named(change, said):
    layout, engine, plan = case()
    outcome = run(layout, engine, broken(plan, change))
    blamed = [problem for problem in outcome.problems if problem.tensor == VICTIM]
    assert any(said in problem.what for problem in blamed), outcome.problems
    assert all(problem.where.startswith("engine rank") for problem in blamed)
    blamed_too = {NEIGHBOUR} if change is shifted else set()
    if change is not beyond_the_end:
        assert {problem.tensor for problem in outcome.problems} == {VICTIM} | blamed_too


def test_a_constant_over_loaded_elements_is_found():
    layout, engine, plan = case()
    slot = next(slot for slot in engine[1].slots if slot.hf_name == VICTIM)
    bad = [
        engine[0],
        structs.replace(engine[1], fills=(*engine[1].fills, Fill(slot.param, slot.offset, 1, 3, 3, 1, 0.0))),
    ]
    (problem,) = run(layout, bad, plan).problems
    assert problem.tensor == VICTIM and problem.what.startswith("3 of ")


def test_a_trainer_that_holds_the_wrong_rectangle_is_found(monkeypatch):
    layout, engine, plan = case()
    rectangles = Layout.rectangles

    def crossed(self, item, part):
        """The two halves of one tensor's columns change places."""
        return rectangles(self, item, 1 - part if item.tensors[0][0] == DOWN else part)

    crossed_layout = Layout(CONFIG, layout.topology)
    # Who holds what is told right, but each rank fills its shards with the other half.
    assert crossed_layout.holders
    monkeypatch.setattr(Layout, "rectangles", crossed)
    problems = run(crossed_layout, engine, plan).problems
    assert {problem.tensor for problem in problems} == {DOWN}
    assert {problem.where for problem in problems} == {"engine rank 0", "engine rank 1", "trainer"}
