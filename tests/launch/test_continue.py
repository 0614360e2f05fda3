"""`--continue FILE`: the run that FILE names goes on, and where there is none a new one begins."""

from pathlib import Path

import pytest

from megasync.async_trainer import AsyncTrainer
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.config import Config, load_config


@pytest.fixture
def config(config_file: Path) -> Config:
    return load_config(config_file)


def test_without_the_file_a_new_run_begins(config: Config, tmp_path: Path) -> None:
    trainer = AsyncTrainer.begin_or_resume(config, tmp_path / "this.run")
    assert trainer._run_dir is None and trainer._name_file == tmp_path / "this.run"


def test_a_named_run_with_a_ledger_goes_on(config: Config, tmp_path: Path) -> None:
    run_dir, name = tmp_path / "mini", tmp_path / "this.run"
    run_dir.mkdir()
    name.write_text(f"{run_dir}\n")
    assert AsyncTrainer.begin_or_resume(config, name)._run_dir is None, "it had not begun"
    (run_dir / LEDGER_FILE).touch()
    trainer = AsyncTrainer.begin_or_resume(config, name)
    assert trainer._run_dir == run_dir and trainer._checkpoint is None
