"""A slow evaluation beside the training of a real run: every held-out token has the evaluated version."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import recorded_workflow
from run_metrics import rows_of

pytestmark = pytest.mark.real

SUPPORT = Path(recorded_workflow.__file__).parent
# Responses of an evaluation: 16 greedy ones, and four times as many at temperature 1.
ANSWERS = 80


@pytest.mark.parametrize(
    ("transport", "workers", "engines"),
    [
        ("auto", 1, {}),
        pytest.param("adapters", 0, {}, marks=pytest.mark.matrix),
        pytest.param("p2p", 1, {"prefill_engines": 1, "decode_engines": 1}, marks=pytest.mark.matrix),
    ],
)
def test_held_out_tokens_are_of_the_evaluated_version_while_newer_ones_are_published(
    miniature, launch, the_run_dir, tmp_path, monkeypatch, transport, workers, engines
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    record = tmp_path / "responses.jsonl"
    monkeypatch.setenv(recorded_workflow.FILE, str(record))
    lora = {"rank": 4, "alpha": 8.0} if transport == "adapters" else {}
    config = miniature(
        schedule={"total_steps": 12, "groups_per_step": 2, "samples_per_group": 2, "max_staleness": 2},
        rollout={"servers": 2, "workers": workers, "workflow": "recorded_workflow:rollout", **engines},
        trainer={"tensor_parallel": 1, "lora": lora},
        sync={"transport": transport, **({"pause_mode": "abort"} if engines else {})},
        eval={
            "every_steps": 3,
            "samples": 16,
            "temperatures": [0.0, 1.0],
            "repeats": 4,
            "max_inflight": 1,
            "exact": True,
        },
        checkpoint={"export": False},
    )
    run = launch("train", config)
    assert run.wait() == 0, run.output
    rows = rows_of(the_run_dir())
    evaluations = [row for row in rows if "eval/score" in row]
    assert {(row["step"], row["eval/version"]) for row in evaluations} >= {(0, 0), (12, 12)}
    assert all(row["eval/exact_share"] == 1.0 and row["eval/failed"] == 0 for row in evaluations)
    steps = [row for row in rows if "time/step" in row]
    assert {row["step"] for row in steps} == set(range(1, 13))
    assert all(row["faults/abandoned_evaluations"] == 0 for row in steps)

    responses = [json.loads(line) for line in record.read_text().splitlines()]
    assert all(len(response["versions"]) == 1 for response in responses if response["held_out"])
    answered = Counter(response["versions"][0] for response in responses if response["held_out"])
    assert answered == {int(row["eval/version"]): ANSWERS for row in evaluations}
    newest, late = 0, 0
    for response in responses:
        late += response["held_out"] and response["versions"][0] < newest
        newest = max(newest, *response["versions"])
    assert late > 0, "the evaluations ended before a newer version was published"
    if transport != "adapters":
        assert any(row["fleet/pinned"] == 1 for row in steps)
