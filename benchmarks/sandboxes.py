"""How fast sandboxes start, and that many starts and stops leave nothing.

    python benchmarks/sandboxes.py                       latency and throughput of each kind that works here
    python benchmarks/sandboxes.py --soak 10000          starts and stops, and what is left afterwards

CPU time is that of this process, of the keeper and of all sandboxes of the kind `process`: on a machine with other load
it says more than seconds do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path

import psutil

from megasync.coding.sandbox import run_program
from megasync.sandboxes import Limits, Spec, Starter
from megasync.sandboxes.kinds import starter_of
from megasync.sandboxes.local import Keeper, isolation
from megasync.sandboxes.pool import WarmPool

# What the soak leaves in a part of its sandboxes for their end to clean up.
_MESS = "mkdir -p a/b; touch x; for i in 1 2 3; do setsid sleep 600 & done"


def _cpu(keeper: int) -> float:
    """Seconds of CPU time so far: of this process, the keeper, and the sandboxes that it has reaped."""
    times = psutil.Process(keeper).cpu_times()
    return time.process_time() + times.user + times.system + times.children_user + times.children_system


def _held(keeper: int) -> dict[str, object]:
    """What starts and stops may not change."""
    found: dict[str, object] = {}
    for name, pid in (("own", os.getpid()), ("keeper", keeper)):
        found[f"{name} descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        found[f"{name} mounts"] = len(Path(f"/proc/{pid}/mounts").read_text().splitlines())
    found["processes below the keeper"] = len(psutil.Process(keeper).children(recursive=True))
    found["folders"] = len([*Path("/tmp").glob("megasync-sandbox-*")])
    return found


async def _latency(starter: Starter, count: int) -> str:
    """Start, a command, and stop, one after the other."""
    starts, commands, stops = [], [], []
    for _ in range(count):
        begun = time.perf_counter()
        sandbox = await starter.start()
        started = time.perf_counter()
        await sandbox.run("true")
        ran = time.perf_counter()
        await sandbox.stop()
        starts.append(started - begun)
        commands.append(ran - started)
        stops.append(time.perf_counter() - ran)
        # Whatever a pool starts meanwhile is not counted.
        await asyncio.sleep(0.05)
    names = zip(("start", "command", "stop"), (starts, commands, stops), strict=True)
    return ", ".join(f"{name} {statistics.median(v) * 1e3:.1f} ms (max {max(v) * 1e3:.1f})" for name, v in names)


async def _throughput(starter: Starter, count: int, parallel: int, command: str = "") -> str:
    async def once(number: int) -> None:
        async with await starter.start() as sandbox:  # pyright: ignore[reportGeneralTypeIssues]
            if command and number % 10 == 0:
                await sandbox.run(command)

    keeper = Keeper.shared().process.pid
    begun, cpu = time.perf_counter(), _cpu(keeper)
    free = asyncio.Semaphore(parallel)

    async def one(number: int) -> None:
        async with free:
            await once(number)

    await asyncio.gather(*map(one, range(count)))
    seconds, used = time.perf_counter() - begun, _cpu(keeper) - cpu
    return f"{count / seconds:.0f} starts and stops a second, {used / count * 1e3:.1f} ms of CPU each"


async def _measure(count: int) -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {isolation()}")
    for kind in ("process", "bubblewrap"):
        starter = starter_of(Spec(kind))
        print(f"{kind}: {await _latency(starter, 20)}")
        told = await _throughput(starter, count, 8)
        # What runs inside bwrap is not reaped by the keeper, so its CPU time is unknown.
        print(f"{kind}: {told if kind == 'process' else told.partition(',')[0]}")
        pool = WarmPool(starter, 4)
        await pool.fill()
        print(f"{kind}, warm: {await _latency(pool, 20)}")
        await pool.close()
    keeper = Keeper.shared().process.pid
    begun, cpu = time.perf_counter(), _cpu(keeper)
    for _ in range(10):
        await asyncio.gather(*(run_program("print(input())", "1\n", Limits()) for _ in range(4)))
    seconds, used = time.perf_counter() - begun, _cpu(keeper) - cpu
    print(f"code reward: {40 / seconds:.0f} programs a second, {used / 40 * 1e3:.1f} ms of CPU each")


async def _soak(count: int) -> None:
    starter = starter_of(Spec())
    await (await starter.start()).stop()
    keeper = Keeper.shared().process.pid
    before = _held(keeper)
    for done in range(0, count, 1000):
        told = await _throughput(starter, min(1000, count - done), 16, _MESS)
        print(f"{min(done + 1000, count)}: {told}", flush=True)
    after = _held(keeper)
    for name, value in before.items():
        print(f"{name}: {value} before, {after[name]} after")
    print(f"keeper: {psutil.Process(keeper).memory_info().rss / 2**20:.0f} MiB")
    if before != after:
        raise SystemExit("something is left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="starts and stops of the throughput")
    parser.add_argument("--soak", type=int, default=0, help="starts and stops of the soak; 0 measures instead")
    options = parser.parse_args()
    asyncio.run(_soak(options.soak) if options.soak else _measure(options.count))


if __name__ == "__main__":
    main()
