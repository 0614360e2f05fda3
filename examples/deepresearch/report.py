"""The table at the end of a run: what the agent did, step by step."""

from __future__ import annotations

import json
from pathlib import Path

# Heading: key of the run's metrics. Those of `rollout/` are means over the samples of the last groups.
COLUMNS = {
    "reward": "train/reward",
    "held out": "eval/score",
    "answered": "rollout/agent/answered",
    "EM": "rollout/agent/em",
    "F1": "rollout/agent/f1",
    "searches": "rollout/agent/searches",
    "duplicates": "rollout/agent/duplicates",
    "malformed": "rollout/agent/malformed",
}


def results_table(run_dir: Path) -> str:
    """One line for each step that was logged, in Markdown; a dash where the step has no such number."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step: dict[int, dict] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    lines = [f"| step | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for step, row in sorted(by_step.items()):
        cells = [f"{row[key]:.3g}" if key in row else "-" for key in COLUMNS.values()]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)
