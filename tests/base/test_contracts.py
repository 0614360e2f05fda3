"""Packages import in one direction: the contracts of `[tool.importlinter]` in pyproject.toml hold."""

import sys
from pathlib import Path

import pytest

linter = pytest.importorskip(
    "importlinter.application.use_cases", reason="import-linter is not installed; run `bash launch/setup.sh`"
)

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_packages_import_in_one_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    # The linter reads settings that its `configuration` registers, and adds the working directory to the path. Its
    # command line would also disable all loggers of this process.
    from importlinter import configuration

    configuration.configure()
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert linter.lint_imports(config_filename=str(PYPROJECT), cache_dir=str(tmp_path)), capsys.readouterr().out
