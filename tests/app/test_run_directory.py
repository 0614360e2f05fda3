"""What every kind of run does with its directory and its signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waits import PATIENCE

from megasync.app.run_directory import export_newest, export_step
from megasync.config import Config
from megasync.layout import shards
from megasync.trainer import checkpoint

RUN = """
import asyncio, sys, threading
from pathlib import Path
from megasync.app.run_directory import EXPORTS, run_stoppable
from megasync.config import Config

class Run:
    def request_stop(self, reason):
        print("finishes", flush=True)
        return True

def export():
    print("exports", flush=True)
    threading.Event().wait()

asyncio.run(run_stoppable(EXPORTS.call(export, "export"), Path(sys.argv[1]), Config(), Run()))
"""


@pytest.mark.processes
def test_a_second_interrupt_ends_a_process_that_exports_and_says_how_to_resume(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-00000007"
    saved.mkdir(parents=True)
    (saved / "COMPLETE").touch()
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "exports\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "finishes\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert "KeyboardInterrupt: stopped by SIGINT before the run could finish cleanly" in error
    assert f"to resume: megasync resume {tmp_path}" in error


@pytest.mark.parametrize("last", [True, False])
def test_an_export_that_fails_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    saved = checkpoint.step_path(tmp_path, 3)
    saved.mkdir(parents=True)
    (saved / checkpoint.MARKER).touch()
    out = tmp_path / "export" if last else tmp_path / "exports" / saved.name
    out.mkdir(parents=True)
    (out / "model.safetensors").touch()

    class Full(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise Full

    monkeypatch.setattr(shards, "write_folder", fail)
    monkeypatch.setattr(shards, "read_layout", lambda path: (None, "float32"))
    config = Config()
    config.model.path = str(tmp_path / "model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(Full):
        if last:
            export_newest(config, tmp_path, print)
        else:
            export_step(config, tmp_path, saved, print)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
