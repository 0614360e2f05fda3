"""Whether megasync's own costs allow a run of 1,000 GPUs: one row per figure, with its goal.

    python benchmarks/scale.py [--only NAME ...] [--quick] [--check]

Each figure is measured by the benchmark that owns it, in a process of its own. `--quick` shortens the measurements, not
the sizes that a goal is about. `--check` exits with status 1 and names the rows that miss their goal. docs/scale.md has
the arithmetic behind the goals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

# What the child process writes before its result.
RESULT = "result: "


@dataclass(frozen=True)
class Goal:
    """A bound of a measured value."""

    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Figure:
    """One row. `measure` takes whether to be quick and returns the values that `goals` bounds, by the same names."""

    what: str
    unit: str
    goals: Mapping[str, Goal]
    measure: Callable[[bool], dict[str, float]]


def buffer_rate(quick: bool) -> dict[str, float]:
    from buffer import DURABLE, measure, ratio

    from megasync.cluster.ray_cluster import RayCluster
    from megasync.config import Config

    async def ratios() -> dict[str, float]:
        found = {}
        for label, tokens in {"1k": 1000, "10k": 10_000, "100k": 100_000}.items():
            with tempfile.TemporaryDirectory() as folder:
                _, seconds = await measure(tokens, 3 if quick else 5, Path(folder))
            queue = next(iter(seconds.values()))
            found[label] = ratio(queue, seconds[DURABLE])
        return found

    cluster = RayCluster(Config(), devices_needed=1)
    cluster.connect()
    try:
        return asyncio.run(ratios())
    finally:
        cluster.close()


def bytes_per_token(quick: bool) -> dict[str, float]:
    import random

    from buffer import SCHEDULE, make_group, named

    from megasync.buffer import AsyncBuffer
    from megasync.buffer.payload import encode

    tokens, groups = 100_000, 4 if quick else 16
    group = make_group(tokens, random.Random(0))
    arrays = [(t.prompt_ids, t.response_ids, t.logprobs, t.loss_mask, t.versions) for t in group.trajectories]
    memory = sum(
        ids.nbytes
        + response.nbytes
        + logprobs.nbytes
        + mask.values.nbytes
        + mask.ends.nbytes
        + 2 * versions.ends.nbytes
        for ids, response, logprobs, mask, versions in arrays
    )
    wire = len(pickle.dumps(encode(group), protocol=5))

    async def commit(folder: Path) -> None:
        buffer = AsyncBuffer(replace(SCHEDULE, groups_per_step=groups), ledger=folder / "ledger.db")
        for number in range(groups):
            await buffer.admit(f"0:{number}")
            await buffer.commit(encode(named(group, f"0:{number}", 0)))
        await buffer.release()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(commit(Path(folder)))
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {"memory": memory / tokens, "disk": disk / tokens / groups, "wire": wire / tokens}


def rank_step(quick: bool) -> dict[str, float]:
    from trainer_share import arguments, measure_step

    return {"": measure_step(arguments(["--steps", "2" if quick else "5"]))["total"]}


def packing(quick: bool) -> dict[str, float]:
    from trainer_share import measure_packing

    return {"": statistics.median(measure_packing(65_536, 512, 5740.0) for _ in range(1 if quick else 3))}


def late_turn(quick: bool) -> dict[str, float]:
    from rollout import ANSWER, measure_long, null_server

    with null_server("null_fixed.py", str(ANSWER)) as url:
        found = asyncio.run(measure_long(url, 4 if quick else 12))
    return {name: turns[-1] / turns[0] for name, (turns, _) in found.items()}


def live_memory(quick: bool) -> dict[str, float]:
    from rollout import ANSWER, measure_live, null_server

    with null_server("null_fixed.py", str(ANSWER)) as url:
        each = asyncio.run(measure_live(url, 500 if quick else 16_000))
    return {"each": each / 1e6, "16,000": 16_000 * each / 1e9}


def loop_lag(quick: bool) -> dict[str, float]:
    from fleet import measure

    found = measure(servers=512, count=10_000, seconds=10.0 if quick else 30.0)
    return {"median": found.median, "longest": found.longest}


def kill_noticed(quick: bool) -> dict[str, float]:
    from fleet import measure

    found = measure(servers=512, count=0, seconds=1.0, hold=1.0, settle=5.0)
    return {"": found.noticed}


def workers(quick: bool) -> dict[str, float]:
    from workers import measure_workers

    rounds = measure_workers([1, 2], groups=24 if quick else 96, repeats=1 if quick else 3)
    pairs = list(zip(rounds[1], rounds[2], strict=True))
    return {
        "rate": statistics.median(two.rate / one.rate for one, two in pairs),
        "driver's share of CPU": statistics.median(two.driver / (two.driver + two.workers) for _, two in pairs),
    }


def gateway(quick: bool) -> dict[str, float]:
    from rollout import measure, null_server

    with null_server() as url:
        rounds = asyncio.run(measure(url, sessions=1000, turns=4, tokens=64, repeats=2 if quick else 5))
    pairs = zip(rounds["raw"], rounds["gateway"], strict=True)
    return {"": statistics.median(raw.seconds / through.seconds for raw, through in pairs)}


FIGURES = {
    "buffer": Figure(
        "groups/s through the durable buffer over a queue in a Ray actor, by tokens of a group",
        "",
        {name: Goal(limit, at_least=True) for name, limit in (("1k", 4.0), ("10k", 10.0), ("100k", 20.0))},
        buffer_rate,
    ),
    "bytes": Figure("bytes a token", "", dict.fromkeys(("memory", "disk", "wire"), Goal(9.0)), bytes_per_token),
    "rank-step": Figure(
        "CPU of one of 64 data ranks for a step of 47 M tokens, without the model", "s", {"": Goal(2.0)}, rank_step
    ),
    "packing": Figure("packing 65,536 sequences over 512 ranks", "s", {"": Goal(3.0)}, packing),
    "late-turn": Figure(
        "CPU of turn 50 at 32k tokens over turn 1, by the form of prompts",
        "",
        {"tokens + new": Goal(1.3), "chat messages": Goal(1.3)},
        late_turn,
    ),
    "live": Figure(
        "memory of a live conversation of 32k tokens (MB), and of 16,000 (GB)",
        "",
        {"each": Goal(0.35), "16,000": Goal(8.0)},
        live_memory,
    ),
    "workers": Figure(
        "requests/s of two rollout workers over one",
        "",
        {"rate": Goal(1.7, at_least=True), "driver's share of CPU": Goal(0.1)},
        workers,
    ),
    "gateway": Figure("requests/s through the gateway over raw aiohttp", "", {"": Goal(0.5, at_least=True)}, gateway),
    "loop-lag": Figure(
        "lag of the driver's event loop with 512 servers and 10,000 requests in flight",
        "ms",
        {"median": Goal(20.0), "longest": Goal(250.0)},
        loop_lag,
    ),
    "kill-noticed": Figure("time until a killed server of 512 is noticed", "ms", {"": Goal(1000.0)}, kill_noticed),
}


def measured(name: str, quick: bool) -> dict[str, float]:
    """Measures one figure in a new process. Raises RuntimeError, with its output, when that fails."""
    command = [sys.executable, __file__, "--child", name, *(["--quick"] if quick else [])]
    child = subprocess.run(command, capture_output=True, text=True)
    results = [line.removeprefix(RESULT) for line in child.stdout.splitlines() if line.startswith(RESULT)]
    if child.returncode or len(results) != 1:
        raise RuntimeError(f"{name} failed with status {child.returncode}:\n{(child.stdout + child.stderr)[-2000:]}")
    return json.loads(results[0])


def row(figure: Figure, found: Mapping[str, float]) -> str:
    goals = figure.goals
    values = ", ".join(f"{label} {found[label]:.3g}".strip() for label in goals)
    bounds = ", ".join(f"{label} {goal}".strip() for label, goal in goals.items())
    return f"| {figure.what} | {values} {figure.unit}".rstrip() + f" | {bounds} {figure.unit}".rstrip() + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a goal is missed")
    parser.add_argument("--child", choices=FIGURES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        logging.disable(logging.WARNING)
        print(RESULT + json.dumps(FIGURES[given.child].measure(given.quick)))
        return
    print("| figure | measured | goal |\n|---|---|---|")
    missed = []
    for name in given.only or FIGURES:
        figure, found = FIGURES[name], measured(name, given.quick)
        print(row(figure, found), flush=True)
        missed += [f"{name} {label}".strip() for label, goal in figure.goals.items() if not goal.met(found[label])]
    if given.check and missed:
        sys.exit(f"Goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
