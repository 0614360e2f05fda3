"""Packages import in one direction: the contracts of `[tool.importlinter]` in pyproject.toml hold."""

import sys
from pathlib import Path

import pytest

cli = pytest.importorskip("importlinter.cli", reason="import-linter is not installed; run `bash launch/setup.sh`")

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_packages_import_in_one_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    # The linter adds the working directory to the path.
    monkeypatch.setattr(sys, "path", [*sys.path])
    status = cli.lint_imports(config_filename=str(PYPROJECT), cache_dir=str(tmp_path))
    assert status == cli.EXIT_STATUS_SUCCESS, capsys.readouterr().out
