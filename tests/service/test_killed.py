"""A real process is killed again and again, and what it gave out stays true."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import service_process

pytestmark = pytest.mark.processes

SUPPORT = Path(service_process.__file__).parent


def outcomes(folder: Path, kill_after: int | None) -> dict[int, str]:
    """What a process printed until it ended, or was killed after so many outcomes."""
    found: dict[int, str] = {}
    command = [sys.executable, service_process.__file__, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            number, text = json.loads(line)
            found[number] = text
            if len(found) == kill_after:
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.read()
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return found


def test_outcomes_of_a_killed_process_are_those_of_one_that_lives(tmp_path):
    expected = outcomes(tmp_path / "quiet", None)
    assert len(expected) == 1 + 5 * service_process.STEPS
    for kill_after in (1, 4, 15, 33):
        for number, text in outcomes(tmp_path / "killed", kill_after).items():
            assert text == expected[number]
    assert outcomes(tmp_path / "killed", None) == expected
