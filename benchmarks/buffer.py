"""Throughput of the buffer, durable and in memory, compared with a queue in a Ray actor and with raw SQLite writes.

    python benchmarks/buffer.py [--tokens 1000 10000 100000] [--repeats 5]
    python benchmarks/buffer.py --recovery
    python benchmarks/buffer.py --bookkeeping

Every variant takes the same groups (8 responses, random ids and log-probs) through their whole life cycle, 8 groups per
step: from responses in memory, as arrays or lists, to the same in memory. For megasync this is encode, admit, commit,
lease, load, ack and publish, with bodies in segments and headers in the ledger; for the queue, put and get of pickled
groups; for SQLite, one transaction per group (WAL, synchronous=NORMAL) and one that deletes the step's groups. MB/s
always counts pickled bytes. Variants alternate within each round; the table shows medians, and ratios to the queue in
the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import random
import sqlite3
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import ray

from megasync.buffer import AsyncBuffer
from megasync.buffer.payload import encode
from megasync.buffer.segments import load
from megasync.cluster.ray_cluster import RayCluster
from megasync.config import Config
from megasync.config.schema import ScheduleConfig
from megasync.trajectory import Group, Trajectory
from megasync.trajectory.runs import Runs

SAMPLES = 8
STEP = 8
SCHEDULE = ScheduleConfig(groups_per_step=STEP, samples_per_group=SAMPLES, max_staleness=1)
VOCABULARY = 150_000


@dataclass(frozen=True)
class Way:
    """`live` takes the groups of one step through their life cycle. `prepare` makes them, and is not measured."""

    prepare: Callable[[list[Group]], list[Any]]
    live: Callable[[list[Any]], Awaitable[None]]


class DequeQueue:
    """A typical queue between rollout and training."""

    def __init__(self) -> None:
        self._groups: deque[bytes] = deque()

    async def put(self, data: bytes) -> None:
        self._groups.append(data)

    async def get(self, number: int) -> list[bytes]:
        return [self._groups.popleft() for _ in range(number)]


def make_group(tokens: int, rng: random.Random) -> Group:
    """A group of random responses with ``tokens`` response tokens in total."""
    n = tokens // SAMPLES
    responses = [
        Trajectory(
            prompt_ids=[rng.randrange(VOCABULARY) for _ in range(64)],
            response_ids=[rng.randrange(VOCABULARY) for _ in range(n)],
            loss_mask=[1] * n,
            logprobs=[-3 * rng.random() for _ in range(n)],
            versions=[0] * n,
            reward=rng.random(),
        )
        for _ in range(SAMPLES)
    ]
    return Group("", responses)


def named(group: Group, uid: str, version: int) -> Group:
    """The same responses as a new group, labelled as sampled by `version`."""
    versions = Runs.fill(version, len(group.trajectories[0].versions))
    return Group(uid, [replace(t, versions=versions) for t in group.trajectories])


def as_lists(group: Group) -> dict[str, Any]:
    """The group as systems with a plain queue hold it: lists of Python numbers."""
    return {"uid": group.uid, "trajectories": [trajectory.plain() for trajectory in group.trajectories]}


def through_buffer(buffer: Any) -> Way:
    uids, steps, versions = count(), count(1), count()

    def prepare(groups: list[Group]) -> list[Group]:
        version = next(versions)
        return [named(group, str(next(uids)), version) for group in groups]

    async def commit(group: Group) -> None:
        assert await buffer.commit(encode(group))

    async def live(ready: list[Group]) -> None:
        step = next(steps)
        await asyncio.gather(*(buffer.admit(group.uid) for group in ready))
        await asyncio.gather(*map(commit, ready))
        batch = await buffer.lease(step, step - 1)
        assert sum(len(load(group).trajectories) for group in batch) == STEP * SAMPLES
        await buffer.ack(step)
        await buffer.publish(step)

    return Way(prepare, live)


def through_queue(queue: Any) -> Way:
    lists: dict[int, dict[str, Any]] = {}

    async def live(ready: list[dict[str, Any]]) -> None:
        await asyncio.gather(*(queue.put.remote(pickle.dumps(group)) for group in ready))
        assert len([pickle.loads(data) for data in await queue.get.remote(STEP)]) == STEP

    return Way(lambda groups: [lists.setdefault(id(group), as_lists(group)) for group in groups], live)


def through_sqlite(database: sqlite3.Connection) -> Way:
    numbers = count()
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    database.execute("CREATE TABLE payloads (number INTEGER PRIMARY KEY, data BLOB)")
    encoded: dict[int, Any] = {}

    def prepare(groups: list[Group]) -> list[Any]:
        """Every step writes the bytes of the group's first encoding."""
        for group in groups:
            if id(group) not in encoded:
                encoded[id(group)] = encode(group).body
        return [encoded[id(group)] for group in groups]

    async def live(bodies: list[Any]) -> None:
        for body in bodies:
            database.execute("INSERT INTO payloads VALUES (?, ?)", (next(numbers), body))
        database.execute("DELETE FROM payloads")

    return Way(prepare, live)


DURABLE = "megasync, durable"


def ways(stack: AsyncExitStack, folder: Path) -> dict[str, Way]:
    durable = AsyncBuffer(SCHEDULE, ledger=folder / "ledger.db")
    stack.push_async_callback(durable.release)
    database = stack.enter_context(closing(sqlite3.connect(folder / "raw.db", isolation_level=None)))
    return {
        "queue in a Ray actor": through_queue(ray.remote(DequeQueue).options(num_cpus=0).remote()),
        DURABLE: through_buffer(durable),
        "megasync, in memory": through_buffer(AsyncBuffer(SCHEDULE)),
        "bare SQLite": through_sqlite(database),
    }


async def measure(tokens: int, repeats: int, folder: Path) -> tuple[float, dict[str, list[float]]]:
    """Bytes of a pickled group of `tokens` tokens, and seconds a group of each way by round, the queue's first."""
    rng = random.Random(0)
    groups = [make_group(tokens, rng) for _ in range(STEP)]
    size = statistics.mean(len(pickle.dumps(as_lists(group))) for group in groups)
    steps = max(2, min(50, 400_000 // tokens))
    seconds: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        made = ways(stack, folder)
        for repeat in range(repeats + 1):
            for name, way in made.items():
                took = 0.0
                for _ in range(steps):
                    ready = way.prepare(groups)
                    start = time.perf_counter()
                    await way.live(ready)
                    took += time.perf_counter() - start
                # The first round is a warm-up.
                if repeat:
                    seconds.setdefault(name, []).append(took / (steps * STEP))
    return size, seconds


def rows(tokens: int, size: float, seconds: dict[str, list[float]]) -> Iterable[str]:
    (queue, *_) = seconds.values()
    return (
        f"| {tokens} | {name} | {1 / statistics.median(took):.0f} | {size / statistics.median(took) / 1e6:.0f} | "
        f"{ratio(queue, took):.2f} |"
        for name, took in seconds.items()
    )


def ratio(queue: list[float], took: list[float]) -> float:
    """The rate relative to the queue's, the median over rounds."""
    return statistics.median(q / t for q, t in zip(queue, took, strict=True))


async def recovery(groups: int, tokens: int, history: int, folder: Path, repeats: int) -> str:
    """Measures how long a buffer takes to load a ledger with finished groups and a `history` of earlier groups."""
    path = folder / f"recovery-{groups}-{tokens}-{history}.db"
    schedule = replace(SCHEDULE, groups_per_step=groups, max_staleness=0)
    buffer = AsyncBuffer(schedule, ledger=path)
    group = make_group(tokens, random.Random(0))
    for number in range(groups):
        await buffer.admit(f"live {number}")
        await buffer.commit(encode(named(group, f"live {number}", 0)))
    await buffer.release()
    with closing(sqlite3.connect(path)) as file, file:
        rows = ((10_000_000 + n, f"past {n}") for n in range(history))
        file.executemany("INSERT INTO groups VALUES (?, ?, 'dropped', -1, 'failed', 0, '', NULL)", rows)
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        again = AsyncBuffer(schedule, ledger=path)
        took.append(time.perf_counter() - start)
        assert (await again.counts())["slots"]["finished"] == groups
        await again.release()
    megabytes = sum(f.stat().st_size for f in folder.glob(path.name + "*")) / 1e6  # noqa: ASYNC240 - a benchmark
    return f"| {groups} | {tokens} | {history} | {megabytes:.1f} | {statistics.median(took) * 1e3:.0f} |"


async def bookkeeping(capacity: int, repeats: int) -> str:
    """Measures a commit, a drop and the admission that follows, while a lease, a reclaim and more admissions wait."""
    took = []
    for _ in range(repeats):
        schedule = replace(SCHEDULE, groups_per_step=capacity // 2, samples_per_group=2)
        buffer = AsyncBuffer(schedule)
        group = make_group(2 * SAMPLES, random.Random(0))
        for number in range(capacity - 100):
            await buffer.admit(f"0:{number}")
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(buffer.lease(1, 0)),
            asyncio.ensure_future(buffer.reclaim("somebody")),
        ]
        waits += [asyncio.ensure_future(buffer.admit(f"1:{number}")) for number in range(200)]
        await asyncio.sleep(0)
        groups = [encode(named(group, f"0:{number + 1}", 0)) for number in range(100)]
        start = time.process_time()
        for number, each in enumerate(groups):
            await buffer.commit(each)
            await buffer.drop(f"0:{number + 101}", "failed")
            await asyncio.sleep(0)
        took.append((time.process_time() - start) / len(groups))
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return f"| {capacity} | {statistics.median(took) * 1e6:.0f} |"


async def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if arguments.bookkeeping:
            print("| open groups | microseconds a group |\n|---|---|")
            for capacity in (512, 2048, 8192, 32_768):
                print(await bookkeeping(capacity, arguments.repeats), flush=True)
            return
        if arguments.recovery:
            print("| finished groups | tokens a group | groups before | MB on disk | ms |\n|---|---|---|---|---|")
            for groups, tokens, history in (
                (16, 1000, 0),
                (256, 1000, 0),
                (256, 10_000, 0),
                (16, 100_000, 0),
                (100_000, 16, 0),
            ):
                print(await recovery(groups, tokens, history, Path(name), arguments.repeats), flush=True)
            print(await recovery(16, 1000, 1_000_000, Path(name), arguments.repeats))
            return
        cluster = RayCluster(Config(), devices_needed=1)
        cluster.connect()
        try:
            print("| tokens | | groups/s | MB/s | ratio |\n|---|---|---|---|---|")
            for tokens in arguments.tokens:
                folder = Path(name) / str(tokens)
                folder.mkdir()
                print("\n".join(rows(tokens, *await measure(tokens, arguments.repeats, folder))), flush=True)
        finally:
            cluster.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recovery", action="store_true", help="time to start again by size, instead")
    parser.add_argument(
        "--bookkeeping", action="store_true", help="time of a change by the groups that are open, instead"
    )
    parser.add_argument("--folder", help="where the files are written; the system's temporary folder by default")
    asyncio.run(main(parser.parse_args()))
