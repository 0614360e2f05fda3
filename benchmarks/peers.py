"""One task trained by megasync and by TRL's GRPOTrainer on the same machine: step times, and time to a held-out score.

    megasync fetch smollm2
    python benchmarks/peers.py --setup                      # makes .venv-peers, once
    python benchmarks/peers.py [configs/smollm2_reasoning.yaml] [--steps 30] [--only megasync trl] [KEY=VALUE ...]

Both train the model of the configuration on its prompts, in its order, with its reward, groups, learning rate, token
budget and temperature. TRL generates with transformers on one process with all cores; megasync as its configuration
says. Held-out prompts are answered greedily every `eval.every_steps` steps; the time of evaluations is not counted,
nor that of the first two steps, in which both still start. `step` is a mean with its standard deviation; `to 60 %` is
the training time up to the first evaluation with that score.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent / ".venv-peers"
# TRL and what it needs beside the packages that megasync needs too.
PACKAGES = ("trl==1.16.0", "accelerate==1.15.0")
WARM_UP = 2
TARGET = 0.6


@dataclass(frozen=True)
class Curve:
    """Seconds of each step, and held-out scores by step; step 0 is before training."""

    steps: list[float]
    scores: dict[int, float]

    def seconds_to(self, score: float) -> float | None:
        reached = (step for step in sorted(self.scores) if self.scores[step] >= score)
        return next((sum(self.steps[:step]) for step in reached), None)


def set_up() -> None:
    """An environment that sees the packages of this one, with TRL beside them."""
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    own = ENVIRONMENT / Path(sysconfig.get_path("purelib", vars={"base": "", "platbase": ""}).lstrip("/"))
    # Unlike a mere path, this also reads the path files there.
    (own / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    subprocess.run([ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--no-deps", *PACKAGES], check=True)


def run_megasync(config: str, steps: int, overrides: list[str], folder: Path) -> Curve:
    own = [f"schedule.total_steps={steps}", f"run_root={folder}", "checkpoint.every_steps=0", "checkpoint.export=false"]
    subprocess.run([sys.executable, "-m", "megasync", "train", config, *own, *overrides], check=True)
    (metrics,) = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Curve(
        [row["time/step"] for row in rows if "time/step" in row],
        {row["step"]: row["eval/score"] for row in rows if "eval/score" in row},
    )


def run_trl(config: str, steps: int, overrides: list[str], folder: Path) -> Curve:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} is missing: run `python {Path(__file__).name} --setup` first")
    out = folder / "trl.json"
    command = [python, HERE / "peer_trl.py", config, str(steps), out, *overrides]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    found = json.loads(out.read_text())
    return Curve(found["steps"], {int(step): score for step, score in found["scores"].items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/smollm2_reasoning.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=["megasync", "trl"], default=["megasync", "trl"])
    parser.add_argument("--setup", action="store_true", help="make the environment with TRL, and nothing else")
    given = parser.parse_args()
    if given.setup:
        set_up()
        return
    runs = {"megasync": run_megasync, "trl": run_trl}
    curves: dict[str, Curve] = {}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = runs[name](given.config, given.steps, given.overrides, Path(folder))
    print(f"| | step, s | to {TARGET:.0%}, s | held-out by step |\n|---|---|---|---|")
    for name, curve in curves.items():
        counted = curve.steps[WARM_UP:]
        reached = curve.seconds_to(TARGET)
        scores = ", ".join(f"{step}: {score:.2f}" for step, score in sorted(curve.scores.items()))
        spread = statistics.stdev(counted) if len(counted) > 1 else 0.0
        print(
            f"| {name} | {statistics.mean(counted):.1f} ± {spread:.1f} | "
            f"{'not reached' if reached is None else f'{reached:.0f}'} | {scores} |"
        )
    if len(curves) == 2:
        ours, theirs = (statistics.mean(curves[name].steps[WARM_UP:]) for name in ("megasync", "trl"))
        print(f"\nmegasync's mean step takes {ours / theirs:.3f} of TRL's.")


if __name__ == "__main__":
    main()
