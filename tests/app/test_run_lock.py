"""One driver to a run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.app.run_lock import RunLock, holder
from megasync.errors import ConfigError

HOLD = """
import sys, time
from megasync.app.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.__enter__()
print('held', flush=True)
time.sleep(600)
"""


@pytest.mark.processes
def test_a_second_driver_is_refused_by_name_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"is being run by process {other.pid} on "), RunLock(tmp_path):
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    with RunLock(tmp_path):
        assert holder(tmp_path)["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"), RunLock(tmp_path):
            pass
    with RunLock(tmp_path):
        pass


def test_an_unused_directory_has_no_holder(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
