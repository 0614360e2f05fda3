"""Examines all nodes of a Ray cluster: an actor on each (`node_probe`) collects facts, `cluster_checks` evaluates them.

Nothing is left behind.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.config import Config
from megasync.errors import MegasyncError
from megasync.planning.cluster_checks import Answers, examine_nodes
from megasync.planning.finding import FAILURE, OK, Finding
from megasync.planning.node_probe import NodeProbe

POLL_SECONDS = 0.5


def examine_cluster(address: str, nodes: int, wait: float, config: Config | None = None) -> list[Finding]:
    """Waits up to `wait` seconds for `nodes` nodes, then examines them, with a `config` also for that configuration.

    A node that offers Ray no device, such as a head for the driver alone, is none of them.
    Raises MegasyncError if there is no Ray cluster at `address`.
    """
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises what it likes here
        raise MegasyncError(
            f"no Ray cluster can be joined at {address}: {type(error).__name__}: {error}; RAY_AUTH_TOKEN must be the "
            f"cluster's"
        ) from error
    try:
        there = _await_nodes(nodes, wait)
        names = [f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in there]
        if len(there) < nodes:
            fix = "check the Ray logs of the missing nodes; a firewall or another Ray token or version keeps nodes out"
            return [Finding("nodes", FAILURE, f"{len(there)} of {nodes} within {wait:g} s: {', '.join(names)}", fix)]
        addresses = Counter(node["NodeManagerAddress"] for node in there)
        if twice := [address for address, times in addresses.items() if times > 1]:
            fix = "name each machine once: two of the names resolve to the same one"
            return [Finding("nodes", FAILURE, f"{addresses[twice[0]]} Ray nodes at {twice[0]}", fix)]
        probed = RayNodes(names, [node["NodeID"] for node in there])
        return [Finding("nodes", OK, ", ".join(names)), *examine_nodes(probed, config)]
    finally:
        ray.shutdown()


def _await_nodes(nodes: int, wait: float) -> list[dict]:
    deadline = time.monotonic() + wait
    while True:
        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].keys() & {"CPU", "GPU"}]
        there = sorted(alive, key=lambda node: node["NodeManagerAddress"])
        if len(there) >= nodes or time.monotonic() >= deadline:
            return there
        time.sleep(POLL_SECONDS)


class RayNodes:
    """A `NodeProbe` actor on each node; the actors end with this process's Ray session."""

    def __init__(self, names: Sequence[str], ids: Sequence[str]) -> None:
        remote = ray.remote(NodeProbe)
        self._probes = {
            name: remote.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for name, node in zip(names, ids, strict=True)
        }

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._probes)

    def ask(self, method: str, seconds: float, arguments: Mapping[str, tuple]) -> tuple[Answers, dict[str, str]]:
        asked = {getattr(self._probes[name], method).remote(*given): name for name, given in arguments.items()}
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        answers: dict[str, Any] = {}
        lost = {asked[ref]: f"no answer within {seconds:g} s" for ref in late}
        for ref in done:
            try:
                answers[asked[ref]] = ray.get(ref)
            except Exception as error:  # noqa: BLE001 - any error is the finding about that node
                lost[asked[ref]] = str(error).strip().splitlines()[-1]
        return answers, lost
