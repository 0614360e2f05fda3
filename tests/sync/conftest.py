"""Trainer ranks that hold shards of a model, as processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hf_models import make_model, models, save_model

# The benchmark of the same room starts its ranks the same way.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from local_ranks import LocalRanks

__all__ = ["local_ranks", "make_model", "models", "save_model"]


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
