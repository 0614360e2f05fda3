"""What routing replay does to the gap between trainer and server: a small model with experts, with and without it.

    python benchmarks/routing_replay.py OUT [--steps 60] [--seeds 0 1]

Runs of `megasync train` on the quickstart's task, in float32 and bfloat16, with fresh and with stale samples. Each line
has means over the steps of a run: `gap` is the mean absolute difference of a trained token's log-probs in nats (trainer
before the step, server at sampling), `KL` is KL(server || trainer) of tokens of the current version, `outside` the
share of tokens whose importance ratio is outside of its bounds, `reward` the share of correct digits in the last ten
steps. Finished runs are kept in OUT, as by `algorithms.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from algorithms import train

from megasync.observe.metrics import STEP, read_metrics
from megasync.observe.names import REWARD
from megasync.starters.fetch import fetch

LAYOUT = ["trainer.sequence_parallel=true", "trainer.expert_parallel=2", "trainer.expert_tensor_parallel=1"]
# Synchronous runs have fresh samples only.
AGES = {"fresh": "schedule.max_staleness=0", "stale": "schedule.max_staleness=2"}
COLUMNS = {"gap": "train/logprob_diff", "KL": "train/server_kl@0", "outside": "train/is_outside_fraction"}


def means(run: Path) -> dict[str, float]:
    columns = read_metrics(run)
    steps = [at for at, step in enumerate(columns[STEP]) if step is not None]
    found = {}
    for name, column in COLUMNS.items():
        values = [value for at in steps if (value := columns.get(column, [])[at]) is not None]
        found[name] = statistics.fmean(values) if values else float("nan")
    rewards = [value for value in columns[REWARD] if value is not None]
    return {**found, "reward": statistics.fmean(rewards[-10:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the model and the runs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = fetch("digits_moe", out / "digits_moe")
    common = [f"model.path={model}", f"schedule.total_steps={arguments.steps}", *LAYOUT]
    print("| run, seed | gap | KL | outside | reward |\n|---|---|---|---|---|")
    for seed in arguments.seeds:
        for dtype in ("float32", "bfloat16"):
            for age, staleness in AGES.items():
                for replay in (False, True):
                    name = f"{dtype} {age}{' replayed' * replay}"
                    given = [f"model.dtype={dtype}", staleness, f"rollout.routing_replay={str(replay).lower()}"]
                    if run := train(out, name, given, seed, common):
                        cells = " | ".join(f"{value:.2g}" for value in means(run).values())
                        print(f"| {name}, {seed} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
