"""Adapters against all weights on a second task: what they learn, and what a weight sync costs.

    python benchmarks/adapters.py OUT MODEL [--steps 150] [--seeds 0] [--rank 16] [--lr 3e-3]

MODEL is a folder that has learned the quickstart's task (`RUN/export` of one); the second task is to copy a number.
The runs train all weights, adapters that are merged for the servers, and adapters that servers get alone. Beside what
`algorithms.py` reports, each line has medians over the syncs: bytes, seconds, and the seconds that generation was
paused. Finished runs are kept in OUT.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from algorithms import heading, line, train

from megasync.observe.metrics import read_metrics

COPY = ["data.train.source=copy", "data.eval.source=copy"]
MEDIANS = {"bytes": "sync/bytes", "seconds": "time/sync", "paused": "sync/pause_seconds"}


def medians(run: Path) -> str:
    columns = read_metrics(run)
    cells = []
    for column in MEDIANS.values():
        values = [value for value in columns.get(column, []) if value is not None]
        cells.append(f"{statistics.median(values):.3g}" if values else "-")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for runs")
    parser.add_argument("model", type=Path, help="folder of the model to start from")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    common = [f"model.path={arguments.model.resolve()}", f"schedule.total_steps={arguments.steps}", *COPY]
    adapters = [f"trainer.lora.rank={arguments.rank}", f"trainer.optimizer.lr={arguments.lr}"]
    methods = {
        "all weights": [],
        "merged adapters": adapters,
        "adapters alone": [*adapters, "sync.transport=adapters"],
    }
    first, rule = heading("run, seed").splitlines()
    print(f"{first} {' | '.join(MEDIANS)} |\n{rule}{'---|' * len(MEDIANS)}")
    for seed in arguments.seeds:
        for name, overrides in methods.items():
            if run := train(out, name, overrides, seed, common):
                print(f"{line(f'{name}, {seed}', run)} {medians(run)} |", flush=True)


if __name__ == "__main__":
    main()
