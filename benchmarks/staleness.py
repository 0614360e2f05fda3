"""How much staleness learning tolerates, with and without the off-policy correction, as a figure and a table.

    python benchmarks/staleness.py OUT_FOLDER [--config configs/quickstart.yaml] [--steps 120] [--lags 0 1 4] \
        [--seeds 0 1]

Every run is `plain_loop.py` with the real trainer and a real server. Each batch is trained exactly `lag` versions after
it was sampled. Results of finished runs are kept in OUT_FOLDER and reused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PLAIN_LOOP = Path(__file__).with_name("plain_loop.py")
CORRECTIONS = ("none", "token")
LABELS = {"none": "no correction", "token": "truncated importance sampling"}


def run_one(out: Path, config: str, lag: int, correction: str, seed: int, steps: int, every: int) -> list[list[float]]:
    """Runs one configuration unless its result exists. Returns [step, held-out exact match] of each evaluation."""
    path = out / f"lag{lag}-{correction}-seed{seed}.json"
    if not path.is_file():
        overrides = {
            "seed": seed,
            "schedule.total_steps": steps,
            "schedule.max_staleness": lag,
            "algorithm.correction": correction,
            "trainer.tensor_parallel": 1,
            "eval.every_steps": every,
        }
        command = [sys.executable, str(PLAIN_LOOP), config, str(path), "--lag", str(lag)]
        subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=True)
    return json.loads(path.read_text())["scores"]


def plot(found: dict[tuple[int, str, int], list[list[float]]], lags: list[int], path: Path) -> None:
    figure = Figure(figsize=(4.2 * len(lags), 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(lags), sharey=True, squeeze=False)[0]
    for axis, lag in zip(axes, lags, strict=True):
        for (at, correction, seed), scores in found.items():
            if at == lag:
                colour = {"none": "tab:red", "token": "tab:blue"}[correction]
                label = LABELS[correction] if seed == min(s for _, _, s in found) else None
                axis.plot(*zip(*scores, strict=True), color=colour, marker="o", markersize=3, alpha=0.8, label=label)
        axis.set_title(f"batches {lag} versions old", fontsize=10)
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
        axis.set_ylim(-0.03, 1.03)
    axes[0].set_ylabel("held-out exact match (greedy)")
    axes[-1].legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found = {}
    print("| versions old | correction | seed | best exact match | final exact match |\n|---|---|---|---|---|")
    for lag, seed, correction in product(given.lags, given.seeds, CORRECTIONS):
        scores = run_one(given.out, given.config, lag, correction, seed, given.steps, given.every)
        found[lag, correction, seed] = scores
        best, final = max(score for _, score in scores), scores[-1][1]
        print(f"| {lag} | {LABELS[correction]} | {seed} | {best:.2f} | {final:.2f} |", flush=True)
    plot(found, given.lags, given.out / "staleness.png")


if __name__ == "__main__":
    main()
