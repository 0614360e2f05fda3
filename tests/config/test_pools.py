"""A pool takes a part of one node, or whole nodes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megasync.config.pools import (
    PoolSpec,
    devices_needed,
    engine_devices,
    engine_nodes,
    engines,
    nodes_needed,
    pool_specs,
    server_devices,
    server_slots,
)
from megasync.config.schema import ClusterConfig, Config, RolloutConfig, TrainerConfig
from megasync.errors import ConfigError


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 4),
    data=st.integers(1, 6),
    servers=st.integers(1, 20),
    server_tensor=st.sampled_from([1, 2, 4, 8]),
    stages=st.integers(1, 4),
    per_node=st.sampled_from([2, 4, 8]),
)
def test_every_process_has_its_devices_on_one_node(tensor, pipeline, data, servers, server_tensor, stages, per_node):
    config = Config(
        trainer=TrainerConfig(tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data),
        rollout=RolloutConfig(servers=servers, tensor_parallel=server_tensor, pipeline_parallel=stages),
        cluster=ClusterConfig(devices_per_node=per_node),
    )
    try:
        specs = pool_specs(config)
    except ConfigError:
        assume(False)
    for spec in specs.values():
        assert spec.slots_per_node * spec.devices <= per_node
        assert spec.nodes * spec.slots_per_node >= spec.slots
        bundles = spec.bundles("cuda")
        assert len(bundles) == spec.nodes
        # No device is reserved that no process uses, and none is missing.
        assert sum(bundle["GPU"] for bundle in bundles) == spec.total_devices
        assert all(bundle["GPU"] <= per_node for bundle in bundles)
    assert specs["trainer"].slots == tensor * pipeline * data
    assert specs["rollout"].slots * specs["rollout"].devices == servers * server_tensor * stages
    nodes = nodes_needed(specs, per_node)
    assert nodes * per_node >= sum(spec.total_devices for spec in specs.values())


@pytest.mark.parametrize(("tensor", "stages", "nodes"), [(4, 2, 1), (8, 2, 2), (4, 4, 2), (16, 2, 4)])
def test_a_server_takes_whole_nodes_for_its_stages(tensor, stages, nodes):
    config = Config(rollout=RolloutConfig(servers=2, tensor_parallel=tensor, pipeline_parallel=stages))
    assert engine_nodes(config) == nodes
    assert pool_specs(config)["rollout"].total_devices == 2 * tensor * stages


@pytest.mark.parametrize(
    ("tensor", "stages", "reason"),
    [(2, 5, "tensor_parallel=2 x pipeline_parallel=5 is more than"), (3, 8, "stage on parts of several nodes")],
)
def test_stages_that_do_not_fit_whole_nodes_are_refused(tensor, stages, reason):
    with pytest.raises(ConfigError, match=reason):
        pool_specs(Config(rollout=RolloutConfig(tensor_parallel=tensor, pipeline_parallel=stages)))


def with_engines(prefill: int, decode: int, per_node: int = 8, **rollout) -> Config:
    return Config(
        rollout=RolloutConfig(prefill_engines=prefill, decode_engines=decode, **rollout),
        cluster=ClusterConfig(devices_per_node=per_node),
    )


@pytest.mark.parametrize(
    ("config", "count", "of_engine", "of_server", "slots"),
    [
        (with_engines(0, 0), 1, 1, 1, 1),
        (with_engines(0, 0, tensor_parallel=4), 1, 4, 4, 1),
        # One engine on two nodes, with a process on each.
        (with_engines(0, 0, tensor_parallel=16), 1, 16, 16, 2),
        (with_engines(1, 1), 2, 1, 2, 2),
        (with_engines(1, 3, tensor_parallel=2), 4, 2, 8, 4),
    ],
)
def test_a_server_takes_a_slot_for_each_of_its_engines_or_nodes(config, count, of_engine, of_server, slots):
    rollout = config.rollout
    assert (engines(rollout), engine_devices(rollout), server_devices(rollout)) == (count, of_engine, of_server)
    assert server_slots(config) == slots
    assert server_slots(config) * rollout.servers == pool_specs(config)["rollout"].slots


def test_the_pool_has_a_slot_for_each_engine_of_each_server():
    specs = pool_specs(with_engines(1, 3, servers=2))
    assert specs["rollout"] == PoolSpec("rollout", slots=8, devices=1, slots_per_node=8)
    assert specs["rollout"].bundles("cuda") == [{"GPU": 8.0, "CPU": 8.0}]
    assert devices_needed(specs) == 9 and nodes_needed(specs, 8) == 2


def test_engines_of_one_server_may_be_on_several_nodes():
    config = with_engines(1, 3, servers=1, tensor_parallel=4)
    spec = pool_specs(config)["rollout"]
    assert spec == PoolSpec("rollout", slots=4, devices=4, slots_per_node=2)
    assert spec.nodes == 2 and engine_nodes(config) == 1


def test_engines_that_do_not_fill_whole_nodes_are_refused():
    reason = r"servers=3 of 4 engines .* of 2 devices each .* one node holds \(5; .* multiple of 5"
    with pytest.raises(ConfigError, match=reason):
        pool_specs(with_engines(1, 3, per_node=10, servers=3, tensor_parallel=2))
    # Fewer than a node holds need not fill it.
    assert pool_specs(with_engines(1, 3, per_node=10, servers=1, tensor_parallel=2))["rollout"].nodes == 1
    assert pool_specs(with_engines(1, 3, per_node=10, servers=5, tensor_parallel=2))["rollout"].nodes == 4


def test_small_pools_share_a_node_and_large_ones_do_not():
    def nodes(data, servers):
        config = Config(trainer=TrainerConfig(data_parallel=data), rollout=RolloutConfig(servers=servers))
        return nodes_needed(pool_specs(config), 8)

    assert nodes(4, 4) == 1
    assert nodes(5, 4) == 2
    assert nodes(16, 8) == 3


def test_a_cpu_pool_requests_only_cpus():
    specs = pool_specs(Config(rollout=RolloutConfig(servers=3, tensor_parallel=2)))
    assert specs["rollout"].bundles("cpu") == [{"CPU": 6}]


def shared_device(data=1, servers=1):
    return Config(
        trainer=TrainerConfig(data_parallel=data),
        rollout=RolloutConfig(servers=servers),
        cluster=ClusterConfig(devices_per_node=1, share_device=True),
    )


def test_a_rank_and_a_server_can_share_one_device():
    specs = pool_specs(shared_device())
    assert [spec.bundles("cuda") for spec in specs.values()] == [[{"GPU": 0.5, "CPU": 0.5}]] * 2
    assert devices_needed(specs) == nodes_needed(specs, 1) == 1
    # An evaluation starts no ranks, so its server has the device to itself.
    (alone,) = pool_specs(shared_device(), training=False).values()
    assert alone.bundles("cuda") == [{"GPU": 1.0, "CPU": 1.0}]


def colocated(**rollout) -> Config:
    return Config(
        trainer=TrainerConfig(tensor_parallel=4, data_parallel=2),
        rollout=RolloutConfig(**rollout),
        cluster=ClusterConfig(devices_per_node=8, colocate=True),
    )


def test_colocated_servers_use_the_devices_of_the_ranks():
    specs = pool_specs(colocated(servers=4, tensor_parallel=2))
    assert specs["rollout"].within == "trainer" and specs["rollout"].devices == 2
    assert devices_needed(specs) == 8 and nodes_needed(specs, 8) == 1
    # An evaluation starts no ranks, so servers have devices of their own.
    (alone,) = pool_specs(colocated(servers=4, tensor_parallel=2), training=False).values()
    assert alone.bundles("cuda") == [{"GPU": 8.0, "CPU": 8.0}]
