"""`--tier fast|standard|full` chooses what runs: a test runs in the tier of its markers and all above.

`--affected` adds the tests of higher tiers that changed files reach.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import affected
import pytest
from hypothesis import settings
from scheduling import Distribution, Planned, add_options, measured_seconds, write_plan

# How long an example takes depends on what else the machine does. The full tier looks for new examples each time; the
# others try the same ones, so that what passed before fails for a change alone.
settings.register_profile("full", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)

REACHED = pytest.StashKey[dict[str, int]]()
MEASURED = pytest.StashKey[dict[str, float]]()
CASES = pytest.StashKey[Counter[str]]()
SENTENCE = pytest.StashKey[str]()
ROOT = Path(__file__).parents[1]
TIERS = ("fast", "standard", "full")
# The lowest tier that runs a test with the marker; a test without any of them runs in every tier. `standard` brings
# some that start real servers or ranks down into that tier, which thus becomes longer only where somebody asks for it.
LOWEST_TIER = {"processes": "standard"} | dict.fromkeys(("real", "ranks", "matrix", "extra", "hosts", "soak"), "full")
# Minutes after which a run of the tier fails, also on a slow machine; `--bound` sets another one.
BOUNDS = {"fast": 45, "standard": 90, "full": 720}
# What a test is taken to last, in seconds, until a run here has measured it. Only the order of a run follows from it.
SECONDS = {"real": 60.0, "ranks": 1.0, "processes": 1.0}

# Seconds for a test that starts the whole stack, of which a busy machine takes minutes for each start.
REAL_TIMEOUT = 1200


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="standard",
        help="fast: starts no Python processes. standard (default): also one of each real thing. full: everything",
    )
    parser.addoption(
        "--affected",
        nargs="?",
        const="",
        metavar="REF",
        help="add the tests of every tier that the changes since the merge base with REF (default: main) reach",
    )


def lowest_tier(markers: set[str]) -> int:
    if "standard" in markers:
        markers = {"processes" if marker in ("real", "ranks") else marker for marker in markers}
    return max((TIERS.index(tier) for marker, tier in LOWEST_TIER.items() if marker in markers), default=0)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leaves all cases of a test marked `every(n)` but each n-th one to the full tier."""
    if every := item.get_closest_marker("every"):
        name = item.nodeid.partition("[")[0]
        cases = item.session.stash.setdefault(CASES, Counter())
        if cases[name] % every.args[0]:
            item.add_marker(pytest.mark.matrix)
        cases[name] += 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # A garbage collection would look at a million of pytest's objects, a second each time; later ones leave them out.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


# After `-m` has made its choice, so that `-m` narrows a tier and never widens it.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the tests of the tier, then those that changes reach, nearest first; of each the longest group first."""
    tier = TIERS.index(config.getoption("--tier"))
    reached = config.stash[REACHED]
    measured = config.stash[MEASURED]
    chosen: dict[pytest.Item, Planned] = {}
    order: dict[tuple[bool, str], list[float]] = {}
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        markers = {mark.name for mark in item.iter_markers()}
        if "real" in markers and "timeout" not in markers:
            item.add_marker(pytest.mark.timeout(REAL_TIMEOUT))
        added = lowest_tier(markers) > tier
        if added and file not in reached:
            continue
        share = item.get_closest_marker("shares")
        test = chosen[item] = Planned(item.nodeid, share.args[0] if share else file, added)
        # Distance of the nearest file, and seconds of all.
        place = order.setdefault((added, test.group), [reached.get(file, 0) if added else 0, 0.0])
        place[0] = min(place[0], reached.get(file, 0) if added else 0)
        guess = max((SECONDS[marker] for marker in markers & SECONDS.keys()), default=0.0)
        place[1] -= measured.get(test.name, guess)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])

    def position(item: pytest.Item) -> tuple:
        test = chosen[item]
        return (test.added, *order[test.added, test.group], test.group)

    items[:] = sorted(chosen, key=position)
    if hasattr(config, "workerinput"):
        write_plan(config.workerinput["plan"], [chosen[item] for item in items])


def reached_files(config: pytest.Config) -> tuple[dict[str, int], str]:
    """The test files that `--affected` adds, with their distance from the change, and a sentence about them."""
    ref = config.getoption("--affected")
    if ref is None:
        return {}, ""
    try:
        base, changed = affected.changed_files(ROOT, ref)
    except affected.NoBase as error:
        if ref:
            raise pytest.UsageError(f"--affected={ref}: {error}") from error
        return {}, f"affected: not known, so only the tier runs: {error}"
    reached = affected.distances(ROOT, changed)
    return reached, f"affected: {len(changed)} changed files since {base[:10]} reach {len(reached)} test files"


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--tier") == "full" else "repeatable")
    if hasattr(config, "workerinput"):
        config.stash[REACHED], config.stash[MEASURED] = config.workerinput["reached"], config.workerinput["measured"]
    else:
        config.stash[REACHED], config.stash[SENTENCE] = reached_files(config)
        config.stash[MEASURED] = measured_seconds(config)
        if config.getoption("tx"):
            bound = config.getoption("--bound") or BOUNDS[config.getoption("--tier")]
            config.pluginmanager.register(Distribution(config, bound))
    if config.getoption("--tier") == "fast":
        sys.addaudithook(refuse_python_processes)


def refuse_python_processes(event: str, arguments: tuple) -> None:
    """Keeps interpreters, and thus ranks and servers, out of the fast tier. Short programs of the system may run."""
    if event != "subprocess.Popen" or "PYTEST_CURRENT_TEST" not in os.environ:
        return
    program = Path(os.fsdecode(arguments[0])).name
    if program.startswith("python") or program in ("megasync", "ray", "uv"):
        raise AssertionError(f"a test of the fast tier starts {program}: mark it with pytest.mark.processes")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    node.workerinput |= {"reached": node.config.stash[REACHED], "measured": node.config.stash[MEASURED]}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.line(f"tier: {config.getoption('--tier')} (of {', '.join(TIERS)})")
    if config.stash[SENTENCE]:
        terminalreporter.line(config.stash[SENTENCE])


def logging_state() -> tuple:
    logger = logging.getLogger("megasync")
    return logger.level, logger.propagate, logger.disabled, list(logger.handlers), logging.root.manager.disable


@pytest.fixture(autouse=True)
def logging_unchanged() -> Iterator[None]:
    """A test that leaves logging disabled would make later tests of log messages fail."""
    before = logging_state()
    yield
    assert logging_state() == before, "this test leaves the loggers of megasync changed"
