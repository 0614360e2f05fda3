"""One real run in which one process of each kind is killed: it loses nothing and continues."""

from __future__ import annotations

import pytest
from run_metrics import rows_of

pytestmark = [pytest.mark.real, pytest.mark.standard]

# A hanging collective or sync must be noticed within the test.
WHOLE_RUN = 840.0
DEADLINES = {"train_step": 60.0, "weight_sync": 60.0, "sync_stall": 10.0}


@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_each_of_its_processes(miniature, launch, the_run_dir) -> None:
    config = miniature(
        schedule={"total_steps": 100_000},
        rollout={"workers": 2},
        checkpoint={"every_steps": 5},
        timeouts=DEADLINES,
    )
    chaos = launch(
        "chaos",
        config,
        "--kill",
        "server,router,rank,worker,controller",
        "--rounds",
        "1",
        "--pause",
        "2",
        "--minutes",
        "30",
    )
    status = chaos.wait(WHOLE_RUN)
    assert status == 0, chaos.output
    for kind in ("server", "router", "rank", "worker", "controller"):
        assert f"SIGKILL to a {kind}" in chaos.output
    assert "nothing was lost" in chaos.output
    rows = rows_of(the_run_dir())
    steps = [row["step"] for row in rows if "time/step" in row]
    assert steps == list(range(1, len(steps) + 1)), "a step that was trained again is measured once"
    assert chaos.survivors() == []
