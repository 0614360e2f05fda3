"""A run that has reached its goal is not started again; one that ended early is."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasync.app import run as run_module
from megasync.app import run_directory
from megasync.app.async_trainer import AsyncTrainer
from megasync.app.run_lock import RunLock
from megasync.config import CONFIG_FILE, CUSTOM_FILE, Config, load_config, save_config
from megasync.errors import ConfigError
from megasync.observe.result import RunResult, resume_command
from megasync.observe.state_file import RunState, write_state
from megasync.offline.evaluate import load_target
from megasync.supervised import run as supervised_module
from megasync.trainer import checkpoint as checkpoint_module
from megasync.trainer.checkpoint import MARKER, step_path


@pytest.fixture
def config(config_file: Path) -> Config:
    return load_config(config_file)


def finished(run_dir: Path, config: Config, **state: Any) -> None:
    run_dir.mkdir(parents=True)
    save_config(config, run_dir / CONFIG_FILE)
    (run_dir / CUSTOM_FILE).write_text("{}")
    checkpoint = step_path(run_dir, config.schedule.total_steps)
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).touch()
    (run_dir / "export").mkdir()
    rows = [{"step": step, "time": 1.0 + step, "eval/score": score} for step, score in ((0, 0.25), (4, 0.75))]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_state(run_dir, RunState(**{"time": 1.0, "step": 4, "version": 5, "status": "finished"} | state))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[AsyncTrainer]:
    """The trainers that start processes."""
    trainers: list[AsyncTrainer] = []

    async def execute(trainer: AsyncTrainer) -> RunResult:
        trainers.append(trainer)
        return RunResult(run_dir=Path(), step=0)

    monkeypatch.setattr(AsyncTrainer, "_execute", execute)
    return trainers


def test_resuming_a_finished_run_starts_nothing_and_says_so(
    config: Config, tmp_path: Path, executed: list[AsyncTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    finished(run_dir, config)
    result = AsyncTrainer.resume(run_dir).train()
    assert (result.step, result.version, result.scores) == (4, 5, [(0, 0.25), (4, 0.75)])
    assert result.export_dir == run_dir / "export" and result.finished
    assert "nothing was started" in capsys.readouterr().out.replace("\n", " ")
    assert not executed


def test_a_finished_run_goes_on_when_its_goal_moves(
    config: Config, tmp_path: Path, executed: list[AsyncTrainer]
) -> None:
    run_dir = tmp_path / "run"
    finished(run_dir, config)
    AsyncTrainer.resume(run_dir, [f"schedule.total_steps={config.schedule.total_steps + 1}"]).train()
    assert len(executed) == 1


@pytest.mark.parametrize("resume", [AsyncTrainer.resume, supervised_module.resume_supervised])
def test_a_resume_looks_at_nothing_that_a_live_driver_may_change(
    config: Config, tmp_path: Path, resume: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    finished(run_dir, config)

    def look(run_dir: Path) -> None:
        raise AssertionError("it looked for a checkpoint")

    monkeypatch.setattr(checkpoint_module, "latest", look)
    monkeypatch.setattr(supervised_module, "latest", look)
    with RunLock(run_dir), pytest.raises(ConfigError, match=f"is being run by process {os.getpid()} on "):
        resume(run_dir)


def test_a_live_run_is_not_continued(config: Config, tmp_path: Path) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "continue.txt"
    finished(run_dir, config)
    file.write_text(str(run_dir))
    with RunLock(run_dir), pytest.raises(ConfigError, match=f"is being run by process {os.getpid()} on "):
        AsyncTrainer.begin_or_resume(config, file)


@pytest.mark.parametrize("content", ["3", "null", "[1]", '"reward"', "{", "[" * 100_000, b"\xff"], ids=range(7))
def test_what_a_run_got_from_python_is_refused_where_it_cannot_be_read(
    config: Config, tmp_path: Path, content: str | bytes
) -> None:
    run_dir = tmp_path / "run"
    finished(run_dir, config)
    (run_dir / CUSTOM_FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (AsyncTrainer.resume, lambda run_dir: load_target(run_dir, [])):
        with pytest.raises(ConfigError, match="custom.json cannot be read: .*write \\[\\] into it"):
            read(run_dir)
    assert resume_command(run_dir).startswith("megasync resume")


@pytest.mark.parametrize("status", ["stopped", "failed", "running", "starting"])
def test_a_run_that_ended_early_is_resumed(
    config: Config, tmp_path: Path, executed: list[AsyncTrainer], status: str
) -> None:
    run_dir = tmp_path / "run"
    finished(run_dir, config, status=status)
    AsyncTrainer.resume(run_dir).train()
    assert len(executed) == 1


async def test_train_inside_a_running_loop_names_what_works_there(
    config: Config, tmp_path: Path, executed: list[AsyncTrainer]
) -> None:
    trainer = AsyncTrainer(config)
    with pytest.raises(ConfigError, match=r"notebook.*await trainer\.run\(\)"):
        trainer.train()
    await trainer.run()
    assert executed == [trainer]


class Ended:
    """A controller whose loops have reached the goal."""

    stop_reason, finished = "", True

    async def run(self) -> SimpleNamespace:
        return SimpleNamespace(step=4, version=5, history=[])

    async def describe(self) -> str:
        return ""

    def request_stop(self, reason: str) -> None:
        self.stop_reason, self.finished = reason, False


@pytest.mark.parametrize("module", [run_module, supervised_module])
async def test_a_stop_during_the_last_export_leaves_the_run_finished(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    async def done(*_: object) -> Ended:
        return Ended()

    if module is run_module:
        monkeypatch.setattr(run_module.Run, "_build", done)
        run: Any = run_module.Run(config, tmp_path, SimpleNamespace())
    else:
        for step in ("_start", "_train"):
            monkeypatch.setattr(supervised_module.SupervisedRun, step, done)
        run = supervised_module.SupervisedRun(config, tmp_path, SimpleNamespace(write=lambda run_dir: None))

        async def exported(_: object) -> None:
            run.request_stop("SIGINT")

        monkeypatch.setattr(supervised_module.Checkpoints, "exported", exported)

    def export(*_: object) -> Path:
        assert run.request_stop("SIGINT")
        return tmp_path / "export"

    monkeypatch.setattr(run_directory, "export_newest", export)
    result = await run.execute()
    assert (result.stopped, result.finished, result.export_dir) == ("", True, tmp_path / "export")
