"""A complete configuration: the quickstart's, with a separate model."""

from pathlib import Path

import pytest

from megasync.config import load_config, save_config
from megasync.starters.fetch import fetch

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    model = fetch("digits", folder / "digits")
    save_config(load_config(QUICKSTART, [f"model.path={model}", "cluster.device=cpu"]), folder / "run.yaml")
    return folder / "run.yaml"
