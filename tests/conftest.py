"""`--tier fast|standard|full` chooses what runs: a test runs in the tier of its markers and all above."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("megasync", deadline=None)
settings.load_profile("megasync")

TIERS = ("fast", "standard", "full")
# The lowest tier that runs a test with the marker; a test without any of them runs in every tier.
LOWEST_TIER = {"real": "standard", "processes": "standard", "matrix": "full", "hosts": "full", "soak": "full"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="standard",
        help="fast: starts no Python processes. standard (default): what CI runs. full: matrices, long faults and soak",
    )


def lowest_tier(markers: set[str]) -> int:
    return max((TIERS.index(tier) for marker, tier in LOWEST_TIER.items() if marker in markers), default=0)


# After `-m` has made its choice, so that `-m` narrows a tier and never widens it.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = TIERS.index(config.getoption("--tier"))
    above = [item for item in items if lowest_tier({mark.name for mark in item.iter_markers()}) > tier]
    if above:
        config.hook.pytest_deselected(items=above)
        items[:] = [item for item in items if item not in set(above)]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tier") == "fast":
        sys.addaudithook(refuse_python_processes)


def refuse_python_processes(event: str, arguments: tuple) -> None:
    """Keeps interpreters, and thus ranks and servers, out of the fast tier. Short programs of the system may run."""
    if event != "subprocess.Popen" or "PYTEST_CURRENT_TEST" not in os.environ:
        return
    program = Path(os.fsdecode(arguments[0])).name
    if program.startswith("python") or program in ("megasync", "ray", "uv"):
        raise AssertionError(f"a test of the fast tier starts {program}: mark it with pytest.mark.processes")


def pytest_report_header(config: pytest.Config) -> str:
    return f"tier: {config.getoption('--tier')} (of {', '.join(TIERS)})"


def logging_state() -> tuple:
    logger = logging.getLogger("megasync")
    return logger.level, logger.propagate, logger.disabled, list(logger.handlers), logging.root.manager.disable


@pytest.fixture(autouse=True)
def logging_unchanged() -> Iterator[None]:
    """A test that leaves logging disabled would make later tests of log messages fail."""
    before = logging_state()
    yield
    assert logging_state() == before, "this test leaves the loggers of megasync changed"
