"""Megatron's process groups, which it keeps once per process; several engines of one process share them."""

from __future__ import annotations

from megatron.core import parallel_state

from megasync.errors import ConfigError
from megasync.layout.topology import Topology


def open_groups(topology: Topology) -> None:
    """Opens the groups of a topology, or takes those that are open already; a collective.

    Raises:
        ConfigError: groups of other sizes are open in this process.
    """
    virtual = topology.virtual if topology.virtual > 1 else None
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            topology.tensor,
            topology.pipeline,
            virtual,
            expert_model_parallel_size=topology.expert,
            expert_tensor_parallel_size=topology.expert_tensor_size,
            create_gloo_process_groups=False,
        )
        return
    wanted = (topology.tensor, topology.pipeline, virtual, topology.expert, topology.expert_tensor_size)
    found = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    if found != wanted:
        raise ConfigError(
            f"Megatron's process groups are open in this process with (tensor, pipeline, virtual, expert, expert tensor) "
            f"sizes {found}, and this engine wants {wanted}; give all engines of one process the same sizes"
        )
