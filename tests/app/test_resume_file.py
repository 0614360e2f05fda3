"""`--continue FILE`: resumes the run that FILE names, or starts a new one if there is none."""

from dataclasses import replace
from pathlib import Path

import pytest
from killed import cut_short

from megasync.app.async_trainer import AsyncTrainer
from megasync.app.resume_file import resolve_config, write_resume_file
from megasync.buffer.beginning import begin_ledger
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.config import CONFIG_FILE, CUSTOM_FILE, Config, load_config, remember, save_config
from megasync.errors import CheckpointError, ConfigError
from megasync.trainer.checkpoint import MARKER, step_path


@pytest.fixture
def config(config_file: Path) -> Config:
    return load_config(config_file)


@pytest.fixture
def name(config: Config, tmp_path: Path) -> Path:
    """Names a run that has begun."""
    run_dir, name = tmp_path / "mini", tmp_path / "this.run"
    run_dir.mkdir()
    save_config(config, run_dir / CONFIG_FILE)
    begin_ledger(run_dir / LEDGER_FILE, 0, 0, {}, {})
    name.write_text(f"{run_dir}\n")
    return name


def test_without_the_file_a_new_run_begins(config: Config, config_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "this.run"
    assert resolve_config(config_file, ["seed=3"], file) == resolve_config(config_file, ["seed=3"], None)
    assert resolve_config(config_file, ["seed=3"], file) == (config_file, ["seed=3"])
    trainer = AsyncTrainer.begin_or_resume(config, file)
    assert trainer._run_dir is None and trainer._resume_file == file


def test_a_named_run_with_a_ledger_is_resumed(config: Config, name: Path, tmp_path: Path) -> None:
    trainer = AsyncTrainer.begin_or_resume(config, name)
    assert trainer._run_dir == tmp_path / "mini" and trainer._checkpoint is None


@pytest.mark.parametrize("empty", [False, True])
def test_a_named_run_that_never_began_is_replaced_with_a_warning(
    config: Config, name: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, empty: bool
) -> None:
    (tmp_path / "mini" / LEDGER_FILE).unlink()
    if empty:
        (tmp_path / "mini" / LEDGER_FILE).touch()
    assert AsyncTrainer.begin_or_resume(config, name)._run_dir is None
    assert "Starting a new run" in caplog.text and f"names {tmp_path / 'mini'}, which ended before" in caplog.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty and names no run"),
        (b" \n", "is empty and names no run"),
        (b"\xff\xfe", "cannot be read"),
        (b"/nowhere/mini\n", "names '/nowhere/mini', which is not a run directory"),
        (b"/now\x00here", "which is not a run directory"),
        (b"/" + b"x" * 5000, "which is not a run directory"),
    ],
)
def test_a_file_that_names_no_run_is_an_error_and_never_a_new_run(
    config: Config, config_file: Path, name: Path, content: bytes, why: str
) -> None:
    name.write_bytes(content)
    for start in (lambda: resolve_config(config_file, [], name), lambda: AsyncTrainer.begin_or_resume(config, name)):
        with pytest.raises(ConfigError, match=f"--continue .*{why}.*remove .* to start a new run"):
            start()


def test_a_run_whose_folder_is_gone_is_an_error(config: Config, name: Path, tmp_path: Path) -> None:
    (tmp_path / "mini").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="has no config.yaml; put the run back there"):
        AsyncTrainer.begin_or_resume(config, name)


@pytest.mark.processes
def test_a_full_disk_leaves_the_file_unchanged(tmp_path: Path, name: Path) -> None:
    setup = """
from pathlib import Path
from megasync.app.resume_file import write_resume_file

def begin(folder):
    (folder / "name").write_text("/runs/one\\n")

def work(folder):
    write_resume_file(folder / "name", Path("/runs/another"))
"""
    (tmp_path / "cases").mkdir()
    for case in cut_short(setup, tmp_path / "cases", ("megasync/app/resume_file.py", "megasync/base/files.py"), (0, 5)):
        assert (case.folder / "name").read_text() in ("/runs/one\n", "/runs/another\n")
        if case.ended == "failed":
            assert "ConfigError: --continue" in case.error and "free some space" in case.error
    before = name.stat().st_ino
    write_resume_file(name, tmp_path / "mini")
    assert name.stat().st_ino == before, "a file that names the run already is left alone"


def test_resuming_a_run_that_never_began_is_refused(tmp_path: Path, config_file: Path) -> None:
    run_dir = tmp_path / "half"
    run_dir.mkdir()
    (run_dir / CONFIG_FILE).write_bytes(config_file.read_bytes())
    with pytest.raises(CheckpointError, match="no complete checkpoint and no ledger"):
        AsyncTrainer.resume(run_dir)


def test_overrides_that_a_run_cannot_change_are_refused_before_anything_starts(
    config: Config, name: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "mini"
    with pytest.raises(ConfigError, match=r"custom.json cannot be read: .*write \[\] into it"):
        AsyncTrainer.resume(run_dir)
    (run_dir / CUSTOM_FILE).write_text("[]")
    with pytest.raises(ConfigError, match="seed=3 cannot replace 0 when a run is resumed: the uid of every prompt"):
        AsyncTrainer.resume(run_dir, ["seed=3"])
    with pytest.raises(ConfigError, match="seed=3 cannot replace 0"):
        AsyncTrainer.begin_or_resume(replace(config, seed=3), name)
    changed = AsyncTrainer.resume(run_dir, ["schedule.groups_per_step=8", "schedule.max_staleness=0"])
    assert changed.config.schedule.groups_per_step == 8 and changed._run_dir == run_dir
    checkpoint = step_path(run_dir, 7)
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).touch()
    with pytest.raises(ConfigError, match="schedule.total_steps=5 is less than the 7 trained steps"):
        AsyncTrainer.resume(run_dir, ["schedule.total_steps=5"])


def test_a_folder_as_the_continue_file_is_refused(config: Config, config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--continue .* is a folder"):
        resolve_config(config_file, [], tmp_path)
    with pytest.raises(ConfigError, match="--continue .* is a folder"):
        AsyncTrainer.begin_or_resume(config, tmp_path)


def test_a_resumed_run_keeps_its_configuration_except_the_cluster(
    config_file: Path, name: Path, tmp_path: Path
) -> None:
    remember(tmp_path / "mini", "rollout.servers", 5)
    edited = tmp_path / "edited.yaml"
    edited.write_text(f"base: {config_file}\nrollout: {{servers: 3}}\ncluster: {{devices_per_node: 2}}\n")
    source, changes = resolve_config(edited, ["rollout.servers=4", "cluster.address=10.0.0.1:7000"], name)
    loaded = load_config(source, changes)
    assert source == tmp_path / "mini" / CONFIG_FILE
    assert loaded.rollout.servers == 5
    assert (loaded.cluster.address, loaded.cluster.devices_per_node) == ("10.0.0.1:7000", 2)
    assert resolve_config(source, changes, name) == (source, changes), "the driver of a launch asks once more"
