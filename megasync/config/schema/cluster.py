"""The section of the machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ClusterConfig:
    """The machines that a run takes."""

    # auto takes cuda when there is one.
    device: str = "auto"
    # Ray cluster: null starts one here for the run; "auto" or host:port joins one.
    address: str | None = None
    # GPUs (cuda) or ranks (cpu) of one node; pools are made of whole nodes when they span several.
    devices_per_node: int = 8
    # Address that servers and collectives bind to; auto is each node's own, needed when the pools span nodes.
    host: str = "127.0.0.1"
