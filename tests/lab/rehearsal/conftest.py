from pathlib import Path

import pytest
from random_models import MODELS, MORE_MODELS
from trainer_ranks import models, rows, run_ranks  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def model_configs() -> dict[str, dict]:
    """config.json of a tiny model of every family."""
    return {**MODELS, **MORE_MODELS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes of the rehearsal load packages of its own."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        ranks = "run_ranks" in getattr(item, "fixturenames", ())
        if item.path.is_relative_to(Path(__file__).parent) and (ranks or marks & {"processes", "real"}):
            item.add_marker(pytest.mark.extra)
