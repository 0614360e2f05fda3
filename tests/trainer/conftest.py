import pytest
from trainer_ranks import models, rows, run_ranks  # noqa: F401 - fixtures


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "run_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
