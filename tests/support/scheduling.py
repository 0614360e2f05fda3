"""Distributes tests over worker processes group by group, and ends the run whatever a worker does.

A group is a file, or all files that name the same thing with `pytest.mark.shares`: its tests run in one process, one
after the other, and share what its fixtures start. Groups are handed out in the order of the plan, which workers write.

- The test in which a worker process dies is a failure and is not repeated. What the worker had not begun goes to the
  other worker, or to the one that replaces it. (xdist's own schedulers repeat it, and hand over groups without a test
  left to run, after which a worker waits for ever.)
- After `--minutes` no further test begins that only `--affected` added; they are listed at the end.
- After `--bound` minutes the run fails: the stacks of its workers are printed, and the tests under way are named.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

# The entry of pytest's cache.
MEASURED = "megasync/seconds"


class Planned(NamedTuple):
    """What the controller must know of a test."""

    name: str
    group: str
    # Whether only `--affected` chose it.
    added: bool


class GroupScheduling:
    """xdist's scheduler: see the module. A node is a worker process as xdist's controller sees it."""

    def __init__(self, nodes: int, plan: Callable[[], Sequence[Planned]], over: Callable[[], bool]) -> None:
        self._expected = nodes
        self._plan = plan
        self._over = over
        self._waiting: deque[list[Planned]] = deque()
        self._assigned: dict[object, deque[Planned]] = {}
        # Per node: the place of each test in the node's own collection.
        self._places: dict[object, dict[str, int]] = {}
        self._started = False
        self.dropped: list[str] = []

    @property
    def nodes(self) -> list:
        return list(self._assigned)

    @property
    def collection_is_completed(self) -> bool:
        return self._started or len(self._places) >= self._expected

    @property
    def tests_finished(self) -> bool:
        """Whether only the last test of each node is left: a node begins it when it gets the order to shut down."""
        return self._started and not self._waiting and all(len(tests) < 2 for tests in self._assigned.values())

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting) or any(self._assigned.values())

    def add_node(self, node) -> None:
        self._assigned[node] = deque()

    def add_node_collection(self, node, collection: Sequence[str]) -> None:
        self._places[node] = {name: place for place, name in enumerate(collection)}
        for name in self._places[node].keys() ^ next(iter(self._places.values())).keys():
            raise RuntimeError(f"one worker process collects {name} and another one does not: make its name the same")

    def schedule(self) -> None:
        if not self._started:
            self._started = True
            self._waiting.extend(list(tests) for _, tests in groupby(self._plan(), key=lambda test: test.group))
        # In turn, so that the longest groups go to different nodes.
        for node in [*self.nodes, *self.nodes]:
            self._feed(node)

    def mark_test_complete(self, node, item_index: int, duration: float = 0) -> None:
        self._assigned[node].popleft()
        self._feed(node)

    def remove_node(self, node) -> str | None:
        """Returns the test in which the node died; None if it had nothing to do."""
        left = self._assigned.pop(node)
        if not left:
            return None
        died, *rest = left
        if rest:
            self._waiting.appendleft(rest)
        for other in self.nodes:
            self._feed(other)
        return died.name

    def _feed(self, node) -> None:
        """A node begins a test once it has another one, or knows that there is none: it needs two."""
        if node.shutting_down or node not in self._places:
            return
        while self._waiting and len(self._assigned[node]) < 2:
            tests = self._waiting.popleft()
            if self._over():
                self.dropped += [test.name for test in tests if test.added]
                tests = [test for test in tests if not test.added]
            if tests:
                self._assigned[node].extend(tests)
                node.send_runtest_some([self._places[node][test.name] for test in tests])
        if not self._waiting:
            node.shutdown()


class Distribution:
    """The plugin of the process that controls the workers."""

    def __init__(self, config: pytest.Config, bound: float) -> None:
        self._config = config
        self._bound = bound
        self._begin = time.monotonic()
        self._minutes = config.getoption("--minutes")
        self._folder = tempfile.TemporaryDirectory(prefix="tests-")
        self._plan = Path(self._folder.name) / "plan.json"
        self._running: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._ended: float | None = None
        self._alarm = threading.Timer(bound * 60, self.end)
        self._alarm.daemon = True
        self.scheduling: GroupScheduling | None = None

    def pytest_configure_node(self, node) -> None:
        node.workerinput["plan"] = str(self._plan)

    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> GroupScheduling:
        self._alarm.start()
        self.scheduling = GroupScheduling(len(config.getoption("tx")), self._read_plan, self._over)
        return self.scheduling

    def _read_plan(self) -> list[Planned]:
        return [Planned(*entry) for entry in json.loads(self._plan.read_text())]

    def _over(self) -> bool:
        return self._minutes is not None and time.monotonic() - self._begin > self._minutes * 60

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def end(self) -> None:
        """Workers print their stacks when they are aborted; each is then a failure of the test that it ran."""
        self._ended = time.monotonic()
        self._config.option.maxworkerrestart = "0"
        session = self._config.pluginmanager.getplugin("dsession")
        session._max_worker_restart = 0
        session.shouldstop = f"the run took longer than its bound of {self._bound:g} minutes"
        workers = psutil.Process().children()
        below = [process for worker in workers for process in worker.children(recursive=True)]
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGABRT)
            # One after the other: they print to the same place, piece by piece.
            psutil.wait_procs([worker], timeout=20)
        for process in [*workers, *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if cache := getattr(self._config, "cache", None):
            longer = {name: round(seconds, 1) for name, seconds in self._seconds.items() if seconds > 1.0}
            cache.set(MEASURED, measured_seconds(self._config) | longer)

    def pytest_unconfigure(self) -> None:
        self._alarm.cancel()
        self._folder.cleanup()

    def pytest_terminal_summary(self, terminalreporter) -> None:
        # Workers that were ended have not finished their last tests.
        overdue = [
            f"{test}, for {max(0.0, self._ended - begin):.0f} s" for test, begin in self._running.items() if self._ended
        ]
        for title, lines in (
            (f"running at the bound of {self._bound:g} minutes", overdue),
            (f"not run: affected tests beyond {self._minutes} minutes", self._files(self.dropped)),
        ):
            if lines:
                terminalreporter.section(title)
                for line in lines:
                    terminalreporter.line(line)

    @property
    def dropped(self) -> list[str]:
        return self.scheduling.dropped if self.scheduling else []

    @staticmethod
    def _files(names: Iterable[str]) -> list[str]:
        files = groupby(names, key=lambda name: name.partition("::")[0])
        return [f"{file}: {len(list(tests))}" for file, tests in files]


def measured_seconds(config: pytest.Config) -> dict[str, float]:
    """What the tests that take more than a second took when they last ran here, by name."""
    cache = getattr(config, "cache", None)
    return cache.get(MEASURED, {}) if cache else {}


def write_plan(path: str, plan: Iterable[Planned]) -> None:
    """Each worker writes the same plan; the last complete file counts."""
    part = Path(f"{path}.{psutil.Process().pid}")
    part.write_text(json.dumps(list(plan)))
    part.replace(path)


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="after this time, begin no more tests that only --affected added")
    parser.addoption("--bound", type=float, help="fail a run that takes longer than this many minutes")
