import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import TrainerConfig
from megasync.errors import ConfigError
from megasync.sync.topology import Coords, Topology

sizes = st.integers(1, 5)


@given(tensor=sizes, pipeline=sizes, data=sizes)
def test_ranks_and_coordinates_are_inverse_and_cover_the_world(tensor, pipeline, data):
    topology = Topology(tensor, pipeline, data)
    coords = [topology.coords(rank) for rank in range(topology.world)]
    assert len(set(coords)) == topology.world
    assert [topology.rank(*c) for c in coords] == list(range(topology.world))


def test_order_is_tensor_then_data_then_pipeline():
    topology = Topology(tensor=2, pipeline=2, data=3)
    assert [topology.coords(rank) for rank in (0, 1, 2, 6)] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert topology.coords(11) == Coords(tp=1, dp=2, pp=1)


def test_coordinates_of_a_rank_outside_are_refused():
    with pytest.raises(ValueError, match="rank 4"):
        Topology(tensor=2, pipeline=2).coords(4)


@given(pipeline=st.integers(2, 5), share=st.integers(1, 4), first=st.integers(1, 6), last=st.integers(1, 6))
def test_uneven_ends_keep_their_share_and_the_middle_is_even(pipeline, share, first, last):
    layers = first + last + share * (pipeline - 2)
    stages = Topology(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last).stage_layers(layers)
    assert [index for stage in stages for index in stage] == list(range(layers))
    assert [len(stage) for stage in stages] == [first, *[share] * (pipeline - 2), last]


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
    config = TrainerConfig(tensor_parallel=2, pipeline_parallel=3, data_parallel=4, last_stage_layers=5)
    assert Topology.from_config(config) == Topology(2, 3, 4, None, 5)
    with pytest.raises(ConfigError, match=r"trainer\.data_parallel is 0|trainer\.data"):
        Topology.from_config(TrainerConfig(data_parallel=0))
