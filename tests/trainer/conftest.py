import pytest
from trainer_ranks import models, rows, run_ranks  # noqa: F401 - fixtures

# Of tests that ask ranks, the standard tier runs those of the step and of checkpoints, and some of layouts.
STANDARD = ("test_policy.py", "test_checkpoint.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "run_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
            if item.path.name in STANDARD:
                item.add_marker(pytest.mark.standard)
            if item.get_closest_marker("standard") and not item.get_closest_marker("matrix"):
                # One process has them all, and keeps the ranks.
                item.add_marker(pytest.mark.shares("trainer ranks"))
