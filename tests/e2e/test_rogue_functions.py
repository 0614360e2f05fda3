"""A whole run whose reward and workflow raise, block, exit and refuse to end at random, while processes are killed."""

import signal
from pathlib import Path

import pytest
import rogue_functions

from megasync.config import load_config
from megasync.lab.chaos.report import make_report

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_nothing_is_lost_and_the_end_is_clean(miniature, launch, the_run_dir, monkeypatch) -> None:
    config = miniature(
        schedule={"total_steps": 100_000},
        rollout={
            "servers": 1,
            "workflow": "rogue_functions:rollout",
            "reward": "rogue_functions:reward",
            "max_attempts": 2,
            "max_drop_share": 0.95,
        },
        trainer={"tensor_parallel": 1},
        checkpoint={"every_steps": 5},
        timeouts={"reward": 1.0},
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(rogue_functions.__file__).parent))
    run = launch("train", config)
    run.wait_for("step 12/")
    run.ends_cleanly(signal.SIGTERM, the_run_dir())
    report = make_report(the_run_dir(), load_config(config), [], run.process.returncode)
    # No fault was injected from outside.
    assert [problem for problem in report.problems if "no fault was injected" not in problem] == []
    logged = (the_run_dir() / "logs" / "controller.log").read_text()
    assert "SystemExit: 0" in logged and "rogue_functions" in logged
