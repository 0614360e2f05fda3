"""Whether a warm start and a teacher help: the quickstart's task from random weights, with and without them.

    python benchmarks/warm_start.py OUT [--seeds 0 1] [--set schedule.total_steps=150]

Each line of the table is a run of `megasync train` in as many steps of reinforcement learning as it needed. The warm
start is a few steps of `megasync sft`; the teacher is the export of a run that has learned the task. Finished runs are
kept in OUT, as by `algorithms.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from algorithms import ROOT, heading, line, train

# Rounds of the warm start: 256 solved examples, 64 to a step.
EPOCHS = 2
TEACHER = ["teachers.one.servers=1", "teachers.one.max_total_tokens=4096", "teachers.one.mem_fraction=0.2"]
TEACHER += ["teachers.one.max_running_requests=64", "rollout.mem_fraction=0.2"]


def supervised(out: Path, seed: int) -> Path:
    """The export of a supervised run."""
    name = f"sft-{seed}"
    if not (done := sorted(out.glob(f"{name}-*/export"))):
        command = [sys.executable, "-m", "megasync", "sft", str(ROOT / "configs" / "quickstart_sft.yaml")]
        command += [f"name={name}", f"run_root={out}", f"seed={seed}", f"sft.epochs={EPOCHS}", "observe.live=false"]
        with (out / f"{name}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, check=True)
        done = sorted(out.glob(f"{name}-*/export"))
    return done[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for runs")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every run")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(heading("run, seed"))
    for seed in arguments.seeds:
        alone = train(out, "alone", ["checkpoint.export=true"], seed, arguments.set)
        if alone is None:
            continue
        print(line(f"reinforcement learning alone, {seed}", alone), flush=True)
        taught = [f"teachers.one.path={alone / 'export'}", *TEACHER]
        methods = {
            "after a warm start": [f"model.path={supervised(out, seed)}"],
            "teacher alone": [*taught, "algorithm.reward_coef=0", "algorithm.teacher_coef=1.0"],
            "teacher beside the reward": [*taught, "algorithm.teacher_coef=0.1"],
        }
        for name, overrides in methods.items():
            if run := train(out, name, overrides, seed, arguments.set):
                print(line(f"{name}, {seed}", run), flush=True)


if __name__ == "__main__":
    main()
