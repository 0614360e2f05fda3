import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import TrainerConfig
from megasync.errors import ConfigError
from megasync.layout.topology import Topology

sizes = st.integers(1, 5)


@given(tensor=sizes, pipeline=sizes, data=sizes, context=sizes)
def test_ranks_and_coordinates_are_inverse_and_cover_the_world(tensor, pipeline, data, context):
    topology = Topology(tensor, pipeline, data, context=context)
    coords = [topology.coords(rank) for rank in range(topology.world)]
    assert len(set(coords)) == topology.world
    assert [topology.rank(*c) for c in coords] == list(range(topology.world))


def test_coordinates_of_a_rank_outside_are_refused():
    with pytest.raises(ValueError, match="rank 4"):
        Topology(tensor=2, pipeline=2).coords(4)


@given(pipeline=st.integers(2, 5), share=st.integers(1, 4), first=st.integers(1, 6), last=st.integers(1, 6))
def test_uneven_ends_keep_their_share_and_the_middle_is_even(pipeline, share, first, last):
    layers = first + last + share * (pipeline - 2)
    stages = Topology(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last).stage_layers(layers)
    assert [index for (stage,) in stages for index in stage] == list(range(layers))
    assert [len(stage) for (stage,) in stages] == [first, *[share] * (pipeline - 2), last]


@pytest.mark.parametrize(
    ("topology", "layers"),
    [
        (Topology(pipeline=2), 3),
        (Topology(pipeline=4), 2),
        (Topology(pipeline=2, first_stage_layers=3), 3),
        (Topology(pipeline=3, first_stage_layers=1, last_stage_layers=4), 4),
        (Topology(pipeline=2, first_stage_layers=1, last_stage_layers=1), 3),
        (Topology(pipeline=1, first_stage_layers=2), 2),
    ],
)
def test_layers_that_do_not_fit_are_refused_by_key(topology, layers):
    with pytest.raises(ConfigError, match=r"trainer\.(pipeline_parallel|first_stage_layers)"):
        topology.stage_layers(layers)


def test_it_is_read_from_the_trainer_configuration():
    config = TrainerConfig(
        tensor_parallel=2,
        pipeline_parallel=3,
        data_parallel=4,
        last_stage_layers=5,
        expert_parallel=4,
        expert_tensor_parallel=1,
        virtual_pipeline=2,
    )
    assert Topology.from_config(config) == Topology(2, 3, 4, None, 5, 4, 1, 2)
    assert Topology.from_config(TrainerConfig(context_parallel=2)) == Topology(context=2)
    with pytest.raises(ConfigError, match=r"trainer\.data_parallel is 0|trainer\.data"):
        Topology.from_config(TrainerConfig(data_parallel=0))


@pytest.mark.parametrize(
    ("tensor", "data", "pipeline", "expert", "expert_tensor"),
    [(1, 4, 1, 2, 1), (2, 2, 2, 2, None), (2, 2, 1, 4, 1), (2, 4, 2, 2, 1), (1, 4, 2, 2, 2), (4, 2, 1, 2, 2)],
)
@pytest.mark.parametrize("context", [1, 2])
def test_expert_coordinates_are_megatrons(tensor, data, pipeline, expert, expert_tensor, context):
    from megatron.core.parallel_state import RankGenerator

    topology = Topology(tensor, pipeline, data, expert=expert, expert_tensor=expert_tensor, context=context)
    sizes = {"tp": topology.expert_tensor_size, "ep": expert, "dp": topology.expert_data}
    generator = RankGenerator(**sizes, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp")
    for dimension, size in sizes.items():
        for group in generator.get_ranks(dimension):
            field = {"tp": "etp", "ep": "ep", "dp": "edp"}[dimension]
            assert [getattr(topology.expert_coords(rank), field) for rank in group] == list(range(size))
    for dimension, size in (("tp", tensor), ("cp", context), ("dp", data), ("pp", pipeline)):
        for group in dense.get_ranks(dimension):
            assert [getattr(topology.coords(rank), dimension) for rank in group] == list(range(size))


@pytest.mark.parametrize(
    ("pipeline", "layers", "first", "last"),
    [(2, 8, None, None), (2, 6, 2, None), (3, 12, None, None), (3, 10, 2, None), (3, 8, 4, 2), (4, 14, None, 2)],
)
def test_virtual_stages_have_megatrons_layers(pipeline, layers, first, last):
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    topology = Topology(pipeline=pipeline, virtual=2, first_stage_layers=first, last_stage_layers=last)
    stages = topology.stage_layers(layers)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
    )
    for stage, chunks in enumerate(stages):
        for turn, chunk in enumerate(chunks):
            assert chunk.start == get_transformer_layer_offset(config, vp_stage=turn, pp_rank=stage)
    assert sorted(layer for chunks in stages for chunk in chunks for layer in chunk) == list(range(layers))


@pytest.mark.parametrize(
    ("pipeline", "counts"), [(2, (1, 3)), (3, (4, 1, 2)), (2, (1, 2, 3, 1)), (3, (2, 3, 3, 1, 2, 1))]
)
def test_a_pipeline_layout_gives_each_chunk_megatrons_layers(pipeline, counts):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from megasync.config.schema import TrainerConfig
    from megasync.trainer.model import _pipeline_layout

    virtual = len(counts) // pipeline
    topology = Topology(pipeline=pipeline, virtual=virtual, pipeline_layout=counts)
    rows = _pipeline_layout(TrainerConfig(pipeline_layout=list(counts)))
    megatron = PipelineParallelLayerLayout(rows, pipeline)
    megatron.validate_layer_layout(sum(counts), None)
    layers = iter(range(sum(counts)))
    expected = {}
    for turn in range(virtual):
        for stage in range(pipeline):
            held = megatron.layout[stage][turn]
            expected[stage, turn] = [next(layers) for kind in held if kind.name == "decoder"]
    stages = topology.stage_layers(sum(counts))
    assert {(s, t): list(chunk) for s, chunks in enumerate(stages) for t, chunk in enumerate(chunks)} == expected


def test_a_topology_from_json_equals_the_one_that_was_written():
    topology = Topology(pipeline=2, pipeline_layout=(1, 3))
    assert Topology(**json.loads(json.dumps(asdict(topology)))) == topology


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"virtual": 2}, r"virtual_pipeline=2.*pipeline_parallel=1"),
        ({"virtual": 0}, r"virtual_pipeline is 0"),
        ({"expert": 0}, r"expert_parallel is 0"),
        ({"expert": 2}, r"expert_parallel=2 x trainer.expert_tensor_parallel=1.*divide the 1 ranks"),
        ({"tensor": 2, "expert": 2}, r"expert_tensor_parallel=2 \(as trainer.tensor_parallel\)"),
        ({"data": 2, "expert_tensor": 4}, r"expert_tensor_parallel=4 must divide the 2 ranks"),
    ],
)
def test_expert_and_virtual_sizes_that_do_not_fit_are_refused_by_key(sizes, words):
    with pytest.raises(ConfigError, match=words):
        Topology(**sizes)


def test_virtual_stages_must_divide_the_layers_of_each_stage():
    with pytest.raises(ConfigError, match=r"virtual_pipeline=2.*\[3, 3\] of 6"):
        Topology(pipeline=2, virtual=2).stage_layers(6)
    with pytest.raises(ConfigError, match="only one of them"):
        Topology(pipeline=2, virtual=2, first_stage_layers=4, last_stage_layers=2).stage_layers(6)


@given(tensor=st.sampled_from([1, 2, 4]), data=sizes, pipeline=st.sampled_from([1, 2]), context=st.integers(1, 3))
def test_expert_peers_are_closed_under_sharing_experts_and_under_tensor_parallelism(tensor, data, pipeline, context):
    stage = tensor * data * context
    divisors = [size for size in range(1, stage + 1) if stage % size == 0]
    for shared in divisors:
        topology = Topology(tensor, pipeline, data, expert=shared, expert_tensor=1, context=context)
        copies = {}
        for rank in topology.stage_ranks(pipeline - 1):
            copies.setdefault(topology.expert_coords(rank).edp, set()).add(topology.coords(rank).dp)
        for together in copies.values():
            for dp in together:
                peers = topology.expert_peers(dp)
                assert together <= set(peers)
                assert all(topology.expert_peers(peer) == peers for peer in peers)


def test_other_numbers_of_ranks_and_replicas_keep_all_but_the_data_parallel_size() -> None:
    whole = Topology(tensor=2, pipeline=2, data=4, context=2)
    assert whole.with_replicas(6) == Topology(tensor=2, pipeline=2, data=6)
    assert whole.largest_on(100) == whole.largest_on(32) == whole
    assert whole.largest_on(31) == replace(whole, data=3)
    assert whole.largest_on(8) == replace(whole, data=1)
    assert whole.largest_on(31, least=3) == replace(whole, data=3)
    assert whole.largest_on(23, least=3) is None and whole.largest_on(7) is None
    # Eight expert-parallel ranks take two or four data ranks.
    assert Topology(tensor=2, data=4, expert=4, expert_tensor=1).largest_on(7) == Topology(
        tensor=2, data=2, expert=4, expert_tensor=1
    )
