"""Whether every estimator and every loss learns: the quickstart's task with each of them, one table and one plot.

    python benchmarks/algorithms.py OUT                       # all of them, two seeds; hours on two cores
    python benchmarks/algorithms.py OUT --only gae rloo --seeds 0

Each run is `megasync train` with the real trainer, servers and router. A finished run is kept in OUT and not repeated,
so an interrupted benchmark goes on where it was. The table says after how many steps half of the sampled digits were
right, after how many 90 % of the held-out numbers were, which ends a run, and its best held-out score. Hyperparameters
are the quickstart's, except where `OVERRIDES` names others: they show that a method learns here, not which is best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.observe.metrics import STEP, read_metrics
from megasync.observe.names import REWARD, SCORE

ROOT = Path(__file__).parents[1]
CRITIC = ["critic.enabled=true", "critic.optimizer.lr=3e-3", "critic.optimizer.betas=[0.8,0.99]"]
# The quickstart's step is a single optimizer step, in which nothing is clipped and most losses are the same.
SEVERAL_STEPS = ["trainer.minibatches=4", "trainer.optimizer.lr=6e-4"]
# Of estimators and losses that need other keys than the quickstart's, and of losses whose papers take other bounds.
OVERRIDES = {
    # As configs/quickstart_critic.yaml.
    "gae": [*CRITIC, *SEVERAL_STEPS, "algorithm.normalize_std=true"],
    "gspo": ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"],
    "geo_mean": ["algorithm.clip_low=0.4", "algorithm.clip_high=0.4", "algorithm.correction=sequence"],
    # Both responses of a pair weigh the same.
    "dpo": ["algorithm.correction=none"],
}
HALF, SOLVED = 0.5, 0.9


def kinds() -> Iterator[tuple[str, list[str]]]:
    """A name and the overrides of each method."""
    for name, item in ADVANTAGES.items():
        plain = [] if "normalize_std" in item.keys else ["algorithm.normalize_std=true"]
        yield name, [f"algorithm.advantage={name}", *plain, *OVERRIDES.get(name, [])]
    for name in LOSSES:
        yield f"loss {name}", [f"algorithm.loss={name}", *SEVERAL_STEPS, *OVERRIDES.get(name, [])]


def train(out: Path, name: str, overrides: list[str], seed: int, common: list[str]) -> Path | None:
    """The folder of the finished run, which is made if there is none; None if it failed."""
    label = f"{name.replace(' ', '-')}-{seed}"
    done = out / f"{label}.json"
    if done.is_file():
        return Path(json.loads(done.read_text()))
    command = [sys.executable, "-m", "megasync", "train", str(ROOT / "configs" / "quickstart.yaml")]
    command += [f"name={label}", f"run_root={out}", f"seed={seed}", "checkpoint.export=false", "observe.live=false"]
    with (out / f"{label}.log").open("w") as log:
        code = subprocess.run(
            [*command, *common, *overrides], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        ).returncode
    if code:
        print(f"{label} failed with {code}; see {log.name}", flush=True)
        return None
    run = max(out.glob(f"{label}-*/"), key=lambda path: path.stat().st_mtime)
    done.write_text(json.dumps(str(run)))
    return run


def row(run: Path) -> dict[str, float | None]:
    """Steps until the mean reward of five steps reached `HALF` and a held-out score `SOLVED`, and the best score."""
    columns = read_metrics(run)
    # A model that has the score already takes no step.
    given = columns.get(REWARD, [None] * len(columns[STEP]))
    rewards = [(step, value) for step, value in zip(columns[STEP], given, strict=True) if value is not None]
    windows = (rewards[end - 5 : end] for end in range(5, len(rewards) + 1))
    scores = [(step, value) for step, value in zip(columns[STEP], columns[SCORE], strict=True) if value is not None]
    return {
        "half": next((window[-1][0] for window in windows if statistics.fmean(v for _, v in window) >= HALF), None),
        "solved": next((step for step, score in scores if score >= SOLVED), None),
        "best": max((score for _, score in scores), default=None),
    }


def heading(first: str) -> str:
    """The first lines of a table of rows."""
    return f"| {first} | half of the digits | {SOLVED:.0%} held-out | best held-out |\n|---|---|---|---|"


def line(name: str, run: Path) -> str:
    cells = ("-" if value is None else f"{value:.3g}" for value in row(run).values())
    return f"| {name} | {' | '.join(cells)} |"


def plot(out: Path, runs: dict[str, list[Path]]) -> None:
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    palette = colormaps["tab20"]

    figure = Figure(figsize=(12, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, losses in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        for number, name in enumerate(name for name in runs if name.startswith("loss ") == losses):
            for at, run in enumerate(runs[name]):
                columns = read_metrics(run)
                # Rows of evaluations have no reward.
                known = [pair for pair in zip(columns[STEP], columns[REWARD], strict=True) if pair[1] is not None]
                label = name.removeprefix("loss ") if at == 0 else None
                axes.plot(*zip(*known, strict=True), color=palette(number), label=label, linewidth=1)
        axes.set_title("losses, four optimizer steps a batch" if losses else "advantage estimators")
        axes.set_xlabel("training step")
        axes.legend(fontsize="small")
    figure.supylabel("share of correct digits")
    figure.savefig(out / "algorithms.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for runs, table and plot")
    parser.add_argument("--only", nargs="*", help="names of estimators, or 'loss NAME'")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument(
        "--set", nargs="*", default=[], help="overrides for every run, such as schedule.total_steps=100"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: overrides for name, overrides in kinds() if not arguments.only or name in arguments.only}
    if unknown := set(arguments.only or ()) - set(chosen):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(name for name, _ in kinds())}")
    runs: dict[str, list[Path]] = {}
    print(heading("method, seed"))
    for name, overrides in chosen.items():
        for seed in arguments.seeds:
            run = train(arguments.out.resolve(), name, overrides, seed, arguments.set)
            if run is None:
                continue
            runs.setdefault(name, []).append(run)
            print(line(f"`{name}`, {seed}", run), flush=True)
    if runs:
        plot(arguments.out, runs)


if __name__ == "__main__":
    main()
