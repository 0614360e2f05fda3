"""`megasync scale` on a live run, which SIGTERM then ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.config import CONFIG_FILE, load_config

pytestmark = pytest.mark.real


def scale(run_dir: Path, servers: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megasync", "scale", str(run_dir), f"rollout={servers}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_servers_are_added_and_removed_during_a_run(miniature, launch, the_run_dir) -> None:
    schedule = {"total_steps": 100_000}
    run = launch("train", miniature(schedule=schedule, rollout={"servers": 1}, trainer={"tensor_parallel": 1}))
    run.wait_for("step 2/")
    run_dir = the_run_dir()

    grown = scale(run_dir, 2)
    assert (grown.returncode, grown.stdout.strip()) == (
        0,
        "1 -> 2 servers; the new ones serve after the next weight sync",
    ), grown.stderr
    run.wait_for("joined at version")
    assert load_config(run_dir / CONFIG_FILE).rollout.servers == 2
    shrunk = scale(run_dir, 1)
    assert (shrunk.returncode, shrunk.stdout.strip()) == (0, "2 -> 1 servers"), shrunk.stderr
    refused = scale(run_dir, 0)
    assert refused.returncode == 2 and "rollout.min_servers=1" in refused.stderr

    run.ends_cleanly(signal.SIGTERM, run_dir)
    assert load_config(run_dir / CONFIG_FILE).rollout.servers == 1
    ended = scale(run_dir, 2)
    assert ended.returncode == 2 and "is not live" in ended.stderr
