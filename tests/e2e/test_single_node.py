"""`launch/single_node.sh`: the miniature run to its end, in two starts, beside unrelated processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import listening, lives

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "single_node.sh"
STEPS = 16

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "megasync").exists(), reason="needs what launch/setup.sh makes"),
]


@pytest.fixture
def strangers() -> Iterator[list[subprocess.Popen]]:
    """Other people's processes, with names like those of a run."""
    sleep = "import time; time.sleep(3600)"
    names = ("raylet", "sglang::scheduler", "megasync train")
    started = [subprocess.Popen([name, "-c", sleep], executable=sys.executable) for name in names]
    yield started
    for stranger in started:
        stranger.kill()
        stranger.wait()


def test_a_run_stops_resumes_and_ends_without_touching_other_processes(
    strangers: list[subprocess.Popen], miniature, execute, the_run_dir, tmp_path: Path
) -> None:
    schedule = {"total_steps": STEPS}
    config = miniature(schedule=schedule, rollout={"servers": 1}, trainer={"tensor_parallel": 1})
    command = ("bash", SCRIPT, config, "--continue", tmp_path / "this.run")
    first = execute(*command)
    first.wait_for("step 2/")
    assert {address for address, _ in listening(first.family())} == {"127.0.0.1"}, listening(first.family())
    assert psutil.Process(first.process.pid).cmdline()[-1] == str(tmp_path / "this.run"), "signals reach the run itself"
    # It must not come to its end meanwhile.
    first.signal(signal.SIGSTOP)
    second = execute(*command)
    assert second.wait() == 2
    first.signal(signal.SIGCONT)
    assert f"is being run by process {first.process.pid} on " in " ".join(second.output.split())
    assert first.process.poll() is None, first.output
    first.signal(signal.SIGINT)
    assert first.wait() == 0, first.output
    assert first.survivors() == []

    third = execute(*command)
    assert third.wait() == 0, third.output
    assert f"step {STEPS}/" in third.output and "step 2/" not in third.output
    assert (the_run_dir() / "export" / "model.safetensors").is_file()
    assert third.survivors() == []

    again = execute(*command)
    assert again.wait() == 0, again.output
    assert "nothing was started" in again.output.replace("\n", " ")
    assert not re.search(r"step \d+/", again.output), "nothing was left to do"
    assert again.survivors() == []
    assert all(lives(stranger.pid) for stranger in strangers)
