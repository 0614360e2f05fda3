"""The whole stack in miniature: two Megatron ranks, two SGLang servers, the router, Ray and a model of 132k weights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml
from browser import browser, context, open_page
from processes import command_line, family, living
from waits import PATIENCE, wait_until

from megasync.starters.fetch import fetch

__all__ = ["browser", "context", "open_page"]


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch("digits", tmp_path_factory.mktemp("models") / "digits")


@pytest.fixture
def miniature(digits_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the configuration of a small run; keyword arguments are laid over its sections, None removes one."""

    def write(**sections: dict | None) -> Path:
        values: dict = {
            "name": "mini",
            "run_root": str(tmp_path / "runs"),
            "model": {"path": str(digits_model), "dtype": "float32"},
            "data": {
                "train": {"kind": "digits", "source": "copy", "size": 256, "options": {"length": 3}},
                "eval": {"kind": "digits", "source": "copy", "size": 16, "seed": 1, "options": {"length": 3}},
                "prompt": {"max_tokens": 16},
            },
            "schedule": {"total_steps": 4, "groups_per_step": 4, "samples_per_group": 4},
            "rollout": {
                "servers": 2,
                "sampling": {"max_new_tokens": 6},
                "context_length": 64,
                "max_total_tokens": 4096,
                "max_running_requests": 32,
                "mem_fraction": 0.3,
            },
            "trainer": {"tensor_parallel": 2, "optimizer": {"lr": 1.0e-3}},
            "sync": {"bucket_mb": 1},
            "eval": {"every_steps": 2, "samples": 16},
            "cluster": {"device": "cpu"},
            "observe": {"live": False},
        }
        for name, section in sections.items():
            if section is None:
                del values[name]
            else:
                values[name] = values.get(name, {}) | section
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


class Launched:
    """A command as a person starts it: a process of its own."""

    def __init__(self, command: list[str], output: Path) -> None:
        self._output = output
        with output.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self._family: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Every process seen below this one so far, by repeated looks."""
        for child in family(self.process.pid)[1:]:
            self._family.setdefault(child.pid, child)
        return list(self._family.values())

    def find(self, mark: str) -> list[psutil.Process]:
        """Live processes whose command line, which Ray and SGLang rewrite, contains the mark."""
        return [process for process in living(self.family()) if mark in command_line(process)]

    def wait_for(self, text: str, since: int = 0) -> None:
        """Ignores the first `since` characters of the output."""

        def printed() -> bool:
            self.family()
            ended = self.process.poll() is not None
            shown = text in self.output[since:]
            assert shown or not ended, f"ended before it printed {text!r}:\n{self.output}"
            return shown

        wait_until(printed, lambda: f"never printed {text!r}:\n{self.output}")

    def last_step(self) -> int:
        return max((int(step) for step in re.findall(r"step (\d+)/", self.output)), default=0)

    def signal(self, number: signal.Signals) -> None:
        self.family()
        self.process.send_signal(number)

    def wait(self, patience: float = PATIENCE) -> int:
        return self.process.wait(patience)

    def ends_cleanly(self, number: signal.Signals, run_dir: Path) -> None:
        """One signal: the step under way is finished and saved, and nothing is left running."""
        step = self.last_step()
        self.signal(number)
        assert self.wait() == 0, self.output
        assert f"stopping: {number.name}" in self.output
        assert "*** SIG" not in self.output
        *_, marker = sorted((run_dir / "checkpoints").glob("step-*/COMPLETE"))
        assert json.loads((marker.parent / "state.json").read_text())["step"] >= step > 0, self.output
        assert self.survivors() == []

    def die(self) -> None:
        """Kills the driver and, once it has ended, whatever is left of the run."""
        self.process.kill()
        self.process.wait()
        self.kill_everything()

    def survivors(self) -> list[str]:
        """Processes of the run that are still alive after a while, because Ray's agents poll for a dead parent."""
        _, alive = psutil.wait_procs(self.family(), timeout=90)
        return [command_line(p) for p in living(alive)]

    def kill_everything(self) -> None:
        for process in living(self.family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def execute(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a command; it and all below it are gone when the test ends."""
    started: list[Launched] = []

    def start(*command: str | os.PathLike) -> Launched:
        started.append(Launched([str(word) for word in command], tmp_path / f"output-{len(started)}.txt"))
        return started[-1]

    yield start
    for run in started:
        run.kill_everything()


@pytest.fixture
def launch(execute: Callable[..., Launched]) -> Callable[..., Launched]:
    """`megasync train` and the like."""
    return partial(execute, sys.executable, "-m", "megasync")


@pytest.fixture
def the_run_dir(tmp_path: Path) -> Callable[[], Path]:
    """The only run directory below this test's run root."""

    def find() -> Path:
        (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
        return run_dir

    return find
