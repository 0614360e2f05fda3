"""Trainer ranks that hold shards of a model, as processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hf_models import make_model, models, save_model
from real_servers import SharedServers

# The benchmark of the same room starts its ranks the same way.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from local_ranks import LocalRanks

__all__ = ["local_ranks", "make_model", "models", "save_model"]


SHARED = pytest.StashKey[SharedServers]()


@pytest.fixture
def dense_servers(models, request, tmp_path_factory) -> list[str]:
    """URLs of running servers of the first model: two of one rank and one of two ranks."""
    if SHARED not in request.config.stash:
        request.config.stash[SHARED] = SharedServers(models[0][0][0], tmp_path_factory.mktemp("logs"))
    return request.config.stash[SHARED].urls()


# After the test's own fixtures, which may use the servers.
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if shared := item.config.stash.get(SHARED, None):
        shared.after(nextitem)


@pytest.fixture
async def local_ranks():
    """Starts trainer ranks as processes; ends them with the test."""
    started = []

    async def start(*args) -> LocalRanks:
        started.append(await LocalRanks.start(*args))
        return started[-1]

    yield start
    for ranks in started:
        await ranks.stop()
