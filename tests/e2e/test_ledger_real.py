"""The whole run is killed on the real stack, and resumes from its ledger.

In the standard tier, `test_chaos.py` kills a driver and compares the books, `tests/buffer/test_commit_order.py` dies at
each point of a commit, and `test_adapter_run.py` sees that nothing outlives a killed driver.
"""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.matrix]

STEPS = 20


def books(run_dir: Path) -> dict[str, int]:
    with closing(sqlite3.connect(run_dir / "ledger.db")) as ledger:
        return dict(ledger.execute("SELECT state, count(*) FROM groups GROUP BY state"))


def test_a_run_survives_the_death_of_its_driver(miniature, launch, the_run_dir) -> None:
    schedule = {"total_steps": STEPS, "groups_per_step": 4, "samples_per_group": 4}
    config = miniature(
        schedule=schedule,
        checkpoint={"every_steps": 4, "export": False},
        rollout={"servers": 1},
        trainer={"tensor_parallel": 1},
    )
    run = launch("train", config)
    run.wait_for("step 9/")
    run.signal(signal.SIGKILL)
    run.wait()
    assert run.survivors() == [], "a killed controller takes everything with it"
    more = launch("resume", the_run_dir())
    assert more.wait() == 0, more.output
    assert f"step {STEPS}/{STEPS}" in more.output
    rows = books(the_run_dir())
    assert rows.pop("unpublished", 0) + rows.pop("published") == STEPS * 4
    assert set(rows) <= {"dropped"}, "whole batches to the end"
    assert more.survivors() == []
