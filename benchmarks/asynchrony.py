"""Speedup from asynchrony: whole runs of one configuration that differ only in `schedule.max_staleness`.

    python benchmarks/asynchrony.py CONFIG [--staleness 0 1 2] [--steps 8] [--rounds 3] [--pools shared] [key=value ...]

Every run is `megasync train` with real ranks, servers and weight syncs, without evaluations. Runs with different
values alternate. The first steps of a run are excluded, because until the buffer reaches its steady state they consume
groups that were generated in advance. Times are means with their standard deviation over the steps of all runs.

`--pools apart` pins the trainer's processes to one half of the cores and the servers to the other, as on separate GPUs.
With `shared` both use all cores, so `max_staleness: 0` corresponds to a colocated synchronous run, in which each phase
has the whole machine. With `apart` the last line gives the speedup from overlap alone: the time of both sides in the
synchronous run, divided by the time of the busier side.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

# Excluded steps, in addition to those that consume groups generated in advance.
WARM_UP = 2
OFF = (
    "eval.every_steps=0",
    "eval.samples=1",
    "eval.temperatures=[0.0]",
    "checkpoint.every_steps=0",
    "checkpoint.export=false",
)
# Maximum time between two steps, in seconds; a run that exceeds it has failed.
PATIENCE = 600.0
# Time that a terminated run gets to save and exit, in seconds.
END_SECONDS = 120.0


def pin(root: psutil.Process) -> None:
    """Pins servers to the upper half of the cores, and all other processes of the run to the lower half."""
    cores = sorted(os.sched_getaffinity(0))
    lower, upper = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    servers = [child for child in root.children(recursive=True) if "sglang" in " ".join(child.cmdline())]
    inside = {process.pid for server in servers for process in (server, *server.children(recursive=True))}
    for process in (root, *root.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, upper if process.pid in inside else lower)


def steps_of(run_root: Path) -> list[dict]:
    """The metrics of each finished training step, oldest first."""
    found = list(run_root.glob("*/metrics.jsonl"))
    if not found:
        return []
    lines = [json.loads(line) for line in found[0].read_text().splitlines()]
    return [line for line in lines if "time/step" in line]


def _watch(process: psutil.Popen, folder: Path, log: Path, apart: bool) -> None:
    """Waits until the run exits. Ends the benchmark if no step finishes within `PATIENCE` seconds."""
    pinned, deadline, seen = not apart, time.monotonic() + PATIENCE, 0
    while process.poll() is None:
        done = len(steps_of(folder))
        if done > seen:
            seen, deadline = done, time.monotonic() + PATIENCE
        if done and not pinned:
            pin(process)
            pinned = True
        if time.monotonic() > deadline:
            raise SystemExit(f"no step in {PATIENCE:g} s:\n{log.read_text()[-2000:]}")
        time.sleep(0.5)


def _end(process: psutil.Popen) -> None:
    """Terminates the run if it is still alive. The processes of a killed driver end with it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)


TIMES = ("step", "wait_for_groups", "train", "sync")


def run(config: str, staleness: int, steps: int, apart: bool, overrides: list[str]) -> list[dict]:
    """The metrics of the counted steps."""
    skipped = WARM_UP + staleness
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megasync", "train", config, *OFF, f"run_root={folder}"]
        command += [f"schedule.max_staleness={staleness}", f"schedule.total_steps={skipped + steps}", *overrides]
        log = Path(folder) / "output"
        with log.open("w") as output:
            process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _watch(process, Path(folder), log, apart)
        finally:
            _end(process)
        if process.returncode:
            raise SystemExit(log.read_text()[-2000:])
        rows = steps_of(Path(folder))
    return rows[skipped:]


def mean(rows: list[dict], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


def with_spread(rows: list[dict], key: str) -> str:
    return f"{mean(rows, key):.2f} ± {statistics.stdev(row[key] for row in rows):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a run, at least 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pools", choices=("apart", "shared"), default="shared")
    given = parser.parse_intermixed_args()
    if given.steps < 2:
        parser.error(f"--steps {given.steps}: a spread needs at least 2")
    # Without this handler, SIGTERM would end the benchmark but not its run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if given.pools == "apart" and given.staleness[0] != 0:
        parser.error("with --pools apart, --staleness begins with 0, whose times the last line needs")
    found: dict[int, list[list[dict]]] = {staleness: [] for staleness in given.staleness}
    for _ in range(given.rounds):
        for staleness, results in found.items():
            results.append(run(given.config, staleness, given.steps, given.pools == "apart", given.overrides))
            print(
                f"max_staleness {staleness}: {with_spread(results[-1], 'time/step')} s a step",
                file=sys.stderr,
                flush=True,
            )
    print(
        "| max_staleness | s a step | waits for groups | trains | syncs | tokens/s | age, mean (most) | × the first |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for staleness, results in found.items():
        pairs = zip(found[given.staleness[0]], results, strict=True)
        ratios = [mean(base, "time/step") / mean(result, "time/step") for base, result in pairs]
        rows = [row for result in results for row in result]
        tokens = mean(rows, "train/tokens") / mean(rows, "time/step")
        age = f"{mean(rows, 'train/staleness_mean'):.2f} ({max(row['train/staleness_max'] for row in rows):.0f})"
        print(
            f"| {staleness} | {' | '.join(with_spread(rows, f'time/{key}') for key in TIMES)} | {tokens:.0f} | {age} | "
            f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    if given.pools == "apart":
        rows = [row for result in found[0] for row in result]
        waits, works = mean(rows, "time/wait_for_groups"), mean(rows, "time/train") + mean(rows, "time/sync")
        print(f"\noverlap alone would give: {(waits + works) / max(waits, works):.2f}")


if __name__ == "__main__":
    main()
