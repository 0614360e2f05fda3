"""Rollout workers in processes of their own, against the same work in the driver, on a null server.

    python benchmarks/workers.py [--workers 0 1 2] [--groups 96] [--turns 8] [--tokens 128] [--repeats 3]

The null server is a separate process that sends a fixed answer, which takes it little CPU. Every group has 8
conversations of `turns` turns, each of which continues the tokens so far; groups are scored, encoded and handed to a
buffer that keeps nothing. Worker counts alternate within each round, so that other load on the machine affects all
of them; the first round is a warm-up. CPU is that of the driver's process, and of all workers together, per request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
from rollout import REQUEST_TIMEOUT, null_server

from megasync.buffer.segments import GroupSink
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.rollout_workers import RolloutWorkers, WorkerActor
from megasync.config import Config
from megasync.config.schema import GroupConfig, SamplingConfig, ScheduleConfig
from megasync.observe.context import RunContext
from megasync.rewards import RewardRunner
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.group_worker import GroupSpec, GroupWorker
from megasync.rollout.inflight import QuarantineClient
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.rollouter import Rollouter
from megasync.rollout.selection import Selection
from megasync.rollout.worker_link import LocalProcess, PolledEnd, WorkerEnd, WorkerProcess
from megasync.trajectory import Prompt

SAMPLES = 8
PROMPT, ASKED = 256, 32  # tokens
INFLIGHT = 32  # groups


class Converse:
    """A workflow of `turns` turns."""

    __name__ = "converse"

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def __call__(self, client: Any, sample: dict[str, Any]) -> Any:
        ids = list(sample["prompt_ids"])
        for _ in range(self._turns):
            reply = await client.generate(ids)
            ids = [*reply.prompt_ids, *reply.token_ids, *[7] * ASKED]
        return client.conversation.trajectories(None)


def by_length(completions: list[str], **columns: Any) -> list[float]:
    return [float(number) for number, _ in enumerate(completions)]


class NoBuffer(GroupSink):
    """Takes every group and keeps none. `admit` waits once `total` are admitted."""

    def __init__(self, total: int = 0) -> None:
        super().__init__(self._taken, None)
        self._left = total

    async def _taken(self, call: str, *_: Any) -> Any:
        return {} if call == "partials" else True

    async def admit(self, uid: str) -> None:
        if not self._left:
            await asyncio.Event().wait()
        self._left -= 1

    async def reclaim(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def unfinished(self, uids: Any) -> list[str]:
        return list(uids)


class Prompts:
    def __init__(self) -> None:
        self._drawn = 0

    def next(self) -> Prompt:
        self._drawn += 1
        return self.get(f"0:{self._drawn}")

    def get(self, uid: str) -> Prompt:
        return Prompt(uid, [5] * PROMPT, {"prompt": "x"})

    def admitted(self, uid: str) -> None: ...


class NoServers:
    async def isolate(self, avoid: Collection[int]) -> None: ...
    def release(self, slot: int) -> None: ...
    def refund_restart(self, slot: int) -> None: ...


class NoPools(Pools):
    """Workers share the one node of this Ray, without placement groups."""

    def __init__(self) -> None:
        super().__init__({}, "cpu")

    def slot_on_node(self, pool: str, node: int) -> int:
        return 0

    def same_node_options(self, pool: str, slot: int) -> dict[str, Any]:
        return {"num_cpus": 0}

    async def nodes(self, pool: str) -> dict[int, str]:
        return {}


@dataclass(frozen=True)
class Work:
    url: str
    turns: int
    tokens: int

    def serve(self, end: WorkerEnd) -> None:
        """A worker as a run has it, with a client of the null server and a buffer that keeps nothing."""
        quarantine = QuarantineClient(partial(end.ask, "enter"), partial(end.tell, "end"))
        client = RolloutClient(
            self.url,
            [],
            ServedModel(1000, 1_000_000),
            RequestSettings(SamplingConfig(max_new_tokens=self.tokens), REQUEST_TIMEOUT),
            quarantine=quarantine,
        )
        selection = Selection(GroupConfig(), SAMPLES, self.tokens)
        spec = GroupSpec(Converse(self.turns), RewardRunner(by_length), selection)
        buffer: Any = NoBuffer()
        worker = GroupWorker(
            client,
            buffer,
            spec,
            on_ended=partial(end.tell, "ended"),
            on_failed=partial(end.tell, "failed"),
            quarantine=quarantine,
        )

        async def cpu() -> float:
            return time.process_time()

        end.serve(worker, {"watch": quarantine.watch}, {"cpu": cpu, "close": client.close})


async def build(work: Work, clock_offset: float) -> PolledEnd:
    end = WorkerEnd()
    work.serve(end)
    return PolledEnd(end)


def build_here(work: Work) -> WorkerEnd:
    end = WorkerEnd()
    work.serve(end)
    return end


@dataclass(frozen=True)
class Round:
    rate: float
    driver: float
    workers: float


async def play(work: Work, workers: int, groups: int) -> Round:
    config = Config()
    config.rollout.workers = workers
    quarantine = Quarantine(NoServers())
    schedule = ScheduleConfig(groups_per_step=16, samples_per_group=SAMPLES, max_inflight_groups=INFLIGHT)
    source: Any = Prompts()
    buffer: Any = NoBuffer(groups)
    rollouter = Rollouter(source, buffer, schedule)
    pools = NoPools()

    def process(number: int) -> WorkerProcess:
        return WorkerActor(number, pools, partial(build, work)) if workers else LocalProcess(partial(build_here, work))

    crew = RolloutWorkers(config, process, quarantine, lambda: None, RunContext())
    await crew.start()
    crew.follow(rollouter.add, rollouter.remove)
    links = list(crew._links.values()) if workers else []
    before = [await link.ask("cpu") for link in links]
    cpu, start = time.process_time(), time.perf_counter()
    run = asyncio.create_task(rollouter.run())
    while rollouter.finished_groups < groups:
        await asyncio.sleep(0.01)
        if run.done():
            run.result()
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    theirs = sum([await link.ask("cpu") for link in links]) - sum(before)
    rollouter.stop()
    await run
    await crew.stop()
    await quarantine.close()
    requests = groups * SAMPLES * work.turns
    return Round(requests / seconds, 1e3 * used / requests, 1e3 * theirs / requests)


async def measure(work: Work, counts: list[int], groups: int, repeats: int) -> dict[int, list[Round]]:
    rounds: dict[int, list[Round]] = {workers: [] for workers in counts}
    for repeat in range(repeats + 1):
        for workers in counts:
            found = await play(work, workers, groups)
            if repeat:
                rounds[workers].append(found)
    return rounds


def measure_workers(
    counts: list[int], groups: int = 96, turns: int = 8, tokens: int = 128, repeats: int = 3
) -> dict[int, list[Round]]:
    """The rounds of each number of workers, in a Ray of its own."""
    # The workers import this module by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    import workers

    cluster = RayCluster(Config(), devices_needed=1)
    cluster.connect()
    try:
        with null_server("null_fixed.py", str(tokens)) as url:
            return asyncio.run(workers.measure(workers.Work(url, turns, tokens), counts, groups, repeats))
    finally:
        cluster.close()


def show(rounds: dict[int, list[Round]]) -> None:
    first = min((count for count in rounds if count), default=0)
    print(
        f"| workers | requests/s | × {first} | driver: CPU ms a request | workers: CPU ms a request | driver's share |"
    )
    print("|---|---|---|---|---|---|")
    for count, found in rounds.items():
        rate = statistics.median(r.rate for r in found)
        ratio = statistics.median(r.rate / one.rate for r, one in zip(found, rounds[first], strict=True))
        driver, workers = statistics.median(r.driver for r in found), statistics.median(r.workers for r in found)
        share = driver / (driver + workers)
        print(f"| {count} | {rate:.0f} | {ratio:.2f} | {driver:.3f} | {workers:.3f} | {share:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--groups", type=int, default=96)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rounds = measure_workers(given.workers, given.groups, given.turns, given.tokens, given.repeats)
    print(f"{psutil.cpu_count()} cores; {given.groups} groups of {SAMPLES} conversations of {given.turns} turns\n")
    show(rounds)


if __name__ == "__main__":
    main()
