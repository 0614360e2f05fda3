import pytest
from random_models import MODELS, MORE_MODELS
from trainer_ranks import models, rows, run_ranks  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def model_configs() -> dict[str, dict]:
    """config.json of a tiny model of every family."""
    return {**MODELS, **MORE_MODELS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "run_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
