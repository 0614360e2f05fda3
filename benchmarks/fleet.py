"""Event-loop lag of a driver that supervises many servers and has many requests in flight.

    python benchmarks/fleet.py [--servers 512] [--requests 10000] [--seconds 30]

Real: the fleet with its slots, health machines, outlier detection and router slot; the agents' long calls through Ray;
the processes that they watch; the rollout client and its connections. Stand-ins: one process answers the control calls
of all servers and of the router (`null_cluster.py`), another one all requests (`null_server.py`), each server's process
is a `sleep`, and the agents of all nodes share two Ray actors, because this many servers, actors and nodes do not fit
on one machine.

The requests start one after the other and are answered `--hold` seconds later, so they end evenly over time. The
measurement begins when all are in flight. Then one server is killed, to measure how soon the fleet notices while the
load continues.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from rollout import null_server, watch_lag

from megasync.cluster.actors import ActorGroup
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.node_agents import NodeAgent, NodeAgents
from megasync.cluster.ray_cluster import RayCluster
from megasync.concurrency.garbage import short_collections
from megasync.concurrency.tasks import cancel_and_wait, gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.schema import SamplingConfig
from megasync.observe.context import RunContext
from megasync.observe.stacks import ProcessStacks
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.serving.control import ServerControl
from megasync.serving.process_watch import ProcessId, ProcessWatch, process_id
from megasync.serving.router import RouterMembers

VOCABULARY = 1000
SERVERS_PER_NODE = 8
AGENT_PROCESSES = 2
PROMPT_TOKENS, NEW_TOKENS = 512, 64


class Watches:
    """The watches of several nodes in one process."""

    def __init__(self) -> None:
        self._watches: dict[str, ProcessWatch] = {}

    async def ended(self, node: str, processes: list[ProcessId], seconds: float) -> list[ProcessId]:
        return await self._watches.setdefault(node, ProcessWatch()).ended(processes, seconds)


class SharedAgent(NodeAgent):
    """The agent of one node: a watch in a Ray actor that several nodes share."""

    def __init__(self, group: ActorGroup, node: str) -> None:
        self._group = group
        self._node = node

    async def ended(self, processes: Sequence[ProcessId], seconds: float, timeout: float) -> list[ProcessId]:
        slot = hash(self._node) % len(self._group.handles)
        return await self._group.on_one(slot, timeout, Watches.ended, self._node, list(processes), seconds)

    async def stacks(self, families: Sequence[tuple[str, int]], seconds: float) -> list[ProcessStacks]:
        return []

    def kill(self) -> None: ...


class NullProcess:
    """A server's process, or the router's: it sleeps, while the null cluster answers under its URL."""

    def __init__(self, url: str, node: str, agents: NodeAgents) -> None:
        self.url = url
        self._node = node
        self._agents = agents
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, timeout: float) -> str:
        self._process = subprocess.Popen(["sleep", "86400"])  # noqa: ASYNC220 - takes a millisecond
        return self.url

    async def ended(self) -> None:
        assert self._process is not None
        await self._agents.ended(self._node, process_id(self._process.pid))

    async def tail(self, lines: int) -> str:
        return ""

    async def visible_devices(self) -> str:
        return ""

    async def metrics_url(self) -> str:
        return self.url

    def processes(self) -> list[tuple[str, int]]:
        return [] if self._process is None else [(self._node, self._process.pid)]

    async def stop(self, timeout: float) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)


class NullProcesses(FleetProcesses):
    """Null processes in the place of a fleet's."""

    def __init__(self, config: Config, url: str, agents: NodeAgents) -> None:
        pools: Any = None
        super().__init__(config, Path("."), pools, pools, Keys("key", "key"))
        self._base = url
        self._agents = agents
        self._starts = Counter[int]()
        self.started: dict[int, NullProcess] = {}

    def server(self, index: int, shared_gpus: Sequence[str] = ()) -> NullProcess:
        self._starts[index] += 1
        url = f"{self._base}/s{index}-{self._starts[index]}"
        self.started[index] = NullProcess(url, f"node {index // SERVERS_PER_NODE}", self._agents)
        return self.started[index]

    def router(self, servers: Any, port: int) -> NullProcess:
        return NullProcess(f"{self._base}/router", "node 0", self._agents)

    def members(self, router_url: str) -> RouterMembers:
        return RouterMembers(ServerControl(router_url))


@dataclass(frozen=True)
class Measured:
    """Lags in milliseconds, the driver's CPU seconds per second, and milliseconds until a killed server is noticed."""

    lags: Sequence[float]
    cpu: float
    requests_per_second: float
    noticed: float

    @property
    def median(self) -> float:
        return statistics.median(self.lags)

    @property
    def longest(self) -> float:
        return max(self.lags)


async def requests(client: RolloutClient, count: int, hold: float, done: list[float]) -> None:
    """Keeps `count` requests in flight; appends a clock reading to `done` for each that ends."""

    async def one(number: int) -> None:
        await asyncio.sleep(hold * number / count)
        prompt = [1 + (number + at) % (VOCABULARY - 1) for at in range(PROMPT_TOKENS)]
        while True:
            await client.generate(prompt)
            done.append(time.perf_counter())

    await gather_or_cancel(asyncio.Event().wait(), *(one(number) for number in range(count)))


async def drive(
    url: str, generation: str, servers: int, count: int, seconds: float, hold: float, settle: float, agents: NodeAgents
) -> Measured:
    config = Config()
    config.rollout.servers, config.rollout.stream_interval = servers, 0
    processes = NullProcesses(config, url, agents)
    fleet = Fleet(config, processes, VOCABULARY, RunContext())
    departed = asyncio.Event()
    fleet.on_departure(lambda *_: departed.set())
    await fleet.start()
    settings = RequestSettings(SamplingConfig(max_new_tokens=NEW_TOKENS), 600.0)
    client = RolloutClient(generation, [], ServedModel(VOCABULARY, 1 << 20), settings)
    done: list[float] = []
    load = asyncio.create_task(requests(client, count, hold, done))
    lags: list[float] = []
    try:
        await fleet.joined([control.url for control in fleet.joiners()])
        # Until every request is in flight, and the servers' speeds are compared.
        await asyncio.sleep(max(2 * hold, settle))
        done.clear()
        watch = asyncio.create_task(watch_lag(lags))
        cpu, start = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - start
        watch.cancel()
        assert not load.done(), load
        assert len(fleet.serving()) == servers, fleet.metrics()
        departed.clear()
        killed = time.perf_counter()
        processes.started[servers // 2].kill()
        await departed.wait()
        noticed = 1e3 * (time.perf_counter() - killed)
        return Measured(lags, cpu / wall, len(done) / seconds, noticed)
    finally:
        await cancel_and_wait(load)
        await client.close()
        await fleet.stop()


def measure(
    servers: int = 512, count: int = 10_000, seconds: float = 30.0, hold: float = 30.0, settle: float = 65.0
) -> Measured:
    """The driver's lag with this many null servers and requests in flight, `settle` seconds after the start."""

    async def run(url: str, generation: str) -> Measured:
        group = ActorGroup(
            "node agent", [ray.remote(Watches).options(num_cpus=0).remote() for _ in range(AGENT_PROCESSES)]
        )
        agents = NodeAgents(lambda node: SharedAgent(group, node))
        try:
            async with short_collections():
                return await drive(url, generation, servers, count, seconds, hold, settle, agents)
        finally:
            agents.close()
            group.kill()

    # Ray's workers cannot import this module by its name.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster = RayCluster(Config(), devices_needed=AGENT_PROCESSES)
    cluster.connect()
    try:
        with null_server("null_cluster.py") as url, null_server("null_server.py", "--hold", str(hold)) as generation:
            return asyncio.run(run(url, generation))
    finally:
        cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=512)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--hold", type=float, default=30.0)
    parser.add_argument("--settle", type=float, default=65.0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    found = measure(given.servers, given.requests, given.seconds, given.hold, given.settle)
    ordered = sorted(found.lags)
    row = [given.servers, given.requests, round(found.requests_per_second), round(found.cpu, 2)]
    row += [round(lag, 1) for lag in (found.median, ordered[int(0.99 * len(ordered))], found.longest)]
    print("| servers | in flight | requests/s | CPU share | lag ms: median | 99 % | longest | kill noticed ms |")
    print("|---|---|---|---|---|---|---|---|")
    print("|", " | ".join(map(str, [*row, round(found.noticed)])), "|")


if __name__ == "__main__":
    main()
