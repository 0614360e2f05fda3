"""A pool takes a part of one node, or whole nodes."""

from hypothesis import assume, given
from hypothesis import strategies as st

from megasync.config.pools import nodes_needed, pool_specs
from megasync.config.schema import ClusterConfig, Config, RolloutConfig, TrainerConfig
from megasync.errors import ConfigError


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 4),
    data=st.integers(1, 6),
    servers=st.integers(1, 20),
    server_tensor=st.sampled_from([1, 2, 4, 8]),
    per_node=st.sampled_from([2, 4, 8]),
)
def test_every_process_has_its_devices_on_one_node(tensor, pipeline, data, servers, server_tensor, per_node):
    config = Config(
        trainer=TrainerConfig(tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data),
        rollout=RolloutConfig(servers=servers, tensor_parallel=server_tensor),
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
    nodes = nodes_needed(specs, per_node)
    assert nodes * per_node >= sum(spec.total_devices for spec in specs.values())


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
