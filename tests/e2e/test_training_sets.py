"""A run on two training sets with a curriculum: its driver is killed, and the shares hold over all of its prompts."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing

import pytest
from run_metrics import rows_of

pytestmark = pytest.mark.real

# Numbers of rows; those of the second set come after those of the first.
COPY, INCREMENT = 6, 4


def digits(source: str, size: int) -> dict:
    return {"data": {"kind": "digits", "source": source, "size": size, "options": {"length": 3}}}


@pytest.mark.matrix
def test_shares_and_the_curriculum_hold_over_a_kill(miniature, launch, the_run_dir) -> None:
    config = miniature(
        data={
            "train": None,
            "eval": None,
            "sets": {"copy": digits("copy", COPY) | {"weight": 3}, "increment": digits("increment", INCREMENT)},
            "curriculum": "by_success",
            # An untrained model gets few digits right: many rows are postponed for the next rounds.
            "curriculum_options": {"hopeless": 0.1, "postpone": 1},
        },
        eval=None,
        schedule={"total_steps": 14, "groups_per_step": 4, "samples_per_group": 2},
        trainer={"tensor_parallel": 1},
        rollout={"servers": 1},
        checkpoint={"every_steps": 2, "export": False},
    )
    run = launch("train", config)
    run.wait_for("step 7/")
    run.die()
    resumed = launch("resume", the_run_dir())
    assert resumed.wait() == 0, resumed.output
    rows = rows_of(the_run_dir())
    last = [row for row in rows if "time/step" in row][-1]
    assert last["step"] == 14 and last["rollout/dropped_left_out"] > 0
    assert {"rollout/reward@copy", "rollout/reward@increment"} <= last.keys()
    with closing(sqlite3.connect(the_run_dir() / "ledger.db")) as database:
        uids = [uid for (uid,) in database.execute("SELECT uid FROM groups")]
    # No prompt was drawn twice, and each set has its share of all that were, trained or left out.
    assert len(set(uids)) == len(uids) >= 14 * 4
    drawn = Counter("copy" if int(uid.partition(":")[2]) < COPY else "increment" for uid in uids)
    assert abs(drawn["copy"] - 0.75 * len(uids)) <= 1
