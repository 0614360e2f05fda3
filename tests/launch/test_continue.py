"""`--continue FILE`: the run that FILE names goes on, and where there is none a new one begins."""

from pathlib import Path

import pytest

from megasync.async_trainer import AsyncTrainer
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.config import CONFIG_FILE, Config, load_config, remember, save_config
from megasync.continuing import settings
from megasync.errors import CheckpointError, ConfigError


@pytest.fixture
def config(config_file: Path) -> Config:
    return load_config(config_file)


@pytest.fixture
def name(config: Config, tmp_path: Path) -> Path:
    """Names a run that has begun."""
    run_dir, name = tmp_path / "mini", tmp_path / "this.run"
    run_dir.mkdir()
    save_config(config, run_dir / CONFIG_FILE)
    (run_dir / LEDGER_FILE).touch()
    name.write_text(f"{run_dir}\n")
    return name


def test_without_the_file_a_new_run_begins(config: Config, config_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "this.run"
    assert settings(config_file, ["seed=3"], file) == settings(config_file, ["seed=3"], None)
    assert settings(config_file, ["seed=3"], file) == (config_file, ["seed=3"])
    trainer = AsyncTrainer.begin_or_resume(config, file)
    assert trainer._run_dir is None and trainer._name_file == file


def test_a_named_run_with_a_ledger_goes_on(config: Config, name: Path, tmp_path: Path) -> None:
    trainer = AsyncTrainer.begin_or_resume(config, name)
    assert trainer._run_dir == tmp_path / "mini" and trainer._checkpoint is None
    (tmp_path / "mini" / LEDGER_FILE).unlink()
    assert AsyncTrainer.begin_or_resume(config, name)._run_dir is None, "it had not begun"


def test_a_run_that_ended_before_it_began_is_told_so(tmp_path: Path, config_file: Path) -> None:
    run_dir = tmp_path / "half"
    run_dir.mkdir()
    (run_dir / CONFIG_FILE).write_bytes(config_file.read_bytes())
    with pytest.raises(CheckpointError, match="nor a ledger to resume from"):
        AsyncTrainer.resume(run_dir)


def test_a_folder_names_no_run(config: Config, config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--continue .* is a folder"):
        settings(config_file, [], tmp_path)
    with pytest.raises(ConfigError, match="--continue .* is a folder"):
        AsyncTrainer.begin_or_resume(config, tmp_path)


def test_a_run_goes_on_as_it_was_last_and_only_its_place_is_new(config_file: Path, name: Path, tmp_path: Path) -> None:
    remember(tmp_path / "mini", "rollout.servers", 5)
    edited = tmp_path / "edited.yaml"
    edited.write_text(f"base: {config_file}\nrollout: {{servers: 3}}\ncluster: {{devices_per_node: 2}}\n")
    source, changes = settings(edited, ["rollout.servers=4", "cluster.address=10.0.0.1:7000"], name)
    loaded = load_config(source, changes)
    assert source == tmp_path / "mini" / CONFIG_FILE
    assert loaded.rollout.servers == 5
    assert (loaded.cluster.address, loaded.cluster.devices_per_node) == ("10.0.0.1:7000", 2)
    assert settings(source, changes, name) == (source, changes), "the driver of a launch asks once more"
