"""Groups of tests stay together, each test runs once, and neither a dead worker nor a stuck one holds up the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scheduling import GroupScheduling, Planned

SUPPORT = Path(__file__).parents[1] / "support"


class Node:
    """Runs what a worker process of xdist would: a test only once it knows whether another one follows."""

    def __init__(self, collection: list[str]) -> None:
        self.collection = collection
        self.shutting_down = False
        self.queue: list[int] = []
        self.ran: list[str] = []

    def send_runtest_some(self, places: list[int]) -> None:
        self.queue += places

    def shutdown(self) -> None:
        self.shutting_down = True

    def run_one(self) -> int | None:
        """The place of the test that it has run, if it can."""
        if not self.queue or (len(self.queue) == 1 and not self.shutting_down):
            return None
        place = self.queue.pop(0)
        self.ran.append(self.collection[place])
        return place


def plan(**groups: int) -> list[Planned]:
    return [
        Planned(f"{group}.{n}", group, group.startswith("added")) for group, size in groups.items() for n in range(size)
    ]


def start(tests: list[Planned], count: int = 2, over: bool = False) -> tuple[GroupScheduling, list[Node]]:
    scheduling = GroupScheduling(count, lambda: tests, lambda: over)
    return scheduling, [join(scheduling, tests) for _ in range(count)]


def join(scheduling: GroupScheduling, tests: list[Planned]) -> Node:
    node = Node([test.name for test in reversed(tests)])
    scheduling.add_node(node)
    scheduling.add_node_collection(node, node.collection)
    if scheduling.collection_is_completed:
        scheduling.schedule()
    return node


def run(scheduling: GroupScheduling, nodes: list[Node]) -> list[str]:
    """Lets each node run a test in turn until none can; the tests in the order in which they ran."""
    ran = []
    while True:
        places = [(node, node.run_one()) for node in nodes]
        if all(place is None for _, place in places):
            return ran
        for node, place in places:
            if place is not None:
                ran.append(node.collection[place])
                scheduling.mark_test_complete(node, place)


@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 5, "b": 1, "c": 3, "d": 1, "e": 2}, {}])
def test_each_test_runs_once_and_each_group_on_one_node_in_its_order(sizes):
    tests = plan(**sizes)
    scheduling, nodes = start(tests)
    assert sorted(run(scheduling, nodes)) == sorted(test.name for test in tests)
    for node in nodes:
        assert node.shutting_down
        assert node.ran == sorted(node.ran, key=[test.name for test in tests].index)
    for group in sizes:
        assert sum(any(name.startswith(f"{group}.") for name in node.ran) for node in nodes) == 1
    assert scheduling.tests_finished and not scheduling.has_pending


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize(
    "sizes", [{"a": 3, "b": 3, "c": 1}, {"a": 2, "b": 6}, {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4}]
)
def test_a_test_that_kills_its_node_is_named_and_not_repeated_and_all_others_run(sizes, before):
    tests = plan(**sizes)
    scheduling, (first, second) = start(tests)
    for _ in range(before):
        for node in (first, second):
            if (place := node.run_one()) is not None:
                scheduling.mark_test_complete(node, place)
    dies = first.collection[first.queue[0]] if first.queue else None
    assert scheduling.remove_node(first) == dies
    ran = [*first.ran, *second.ran]
    third = join(scheduling, tests)
    ran += run(scheduling, [second, third])
    assert sorted([*ran, *([dies] if dies else [])]) == sorted(test.name for test in tests)
    assert scheduling.tests_finished and not scheduling.has_pending


def test_after_the_time_only_tests_that_were_added_are_dropped():
    scheduling, nodes = start(plan(a=2, b=2, added=3), over=True)
    assert sorted(run(scheduling, nodes)) == ["a.0", "a.1", "b.0", "b.1"]
    assert scheduling.dropped == ["added.0", "added.1", "added.2"]
    assert scheduling.tests_finished


def test_workers_that_collect_different_tests_end_the_run():
    scheduling, _ = start(plan(a=2), count=2)
    with pytest.raises(RuntimeError, match=r"collects a\.1 and another one does not"):
        scheduling.add_node_collection(object(), ["a.0"])


CONFTEST = """
import sys, threading, time
sys.path.insert(0, {support!r})
from pathlib import Path
import pytest
from scheduling import Distribution, Planned, add_options as pytest_addoption, write_plan

def pytest_configure(config):
    if config.getoption("tx") and not hasattr(config, "workerinput"):
        distribution = Distribution(config, 60)
        config.pluginmanager.register(distribution)
        threading.Thread(target=end_once_stuck, args=(distribution,), daemon=True).start()

def end_once_stuck(distribution):
    while not Path("stuck").exists():
        time.sleep(0.01)
    distribution.end()

def pytest_collection_modifyitems(config, items):
    write_plan(config.workerinput["plan"], [Planned(item.nodeid, item.path.name, False) for item in items])
"""


def run_tree(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(support=str(SUPPORT)))
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-rf"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.matrix
@pytest.mark.processes
def test_a_worker_that_dies_of_a_segmentation_fault_fails_its_test_and_nothing_else(tmp_path):
    tree = {f"test_{n}": "def test_one(): pass\ndef test_two(): pass\n" for n in range(6)}
    tree["test_3"] = "import os, signal\ndef test_one(): pass\ndef test_dies(): os.kill(os.getpid(), signal.SIGSEGV)\n"
    tree["test_3"] += "def test_two(): pass\n"
    ran = run_tree(tmp_path, **tree)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "crashed while running 'test_3.py::test_dies'" in ran.stdout
    assert "1 failed, 12 passed" in ran.stdout


@pytest.mark.matrix
@pytest.mark.processes
def test_a_run_at_its_bound_fails_and_names_the_test_and_where_it_stands(tmp_path):
    stuck = """
import threading
from pathlib import Path

def stands_here():
    Path("stuck").touch()
    threading.Event().wait()

def test_never_ends():
    stands_here()
"""
    ran = run_tree(tmp_path, test_stuck=stuck, test_other="def test_passes(): pass\n")
    assert ran.returncode != 0
    assert "test_stuck.py::test_never_ends, for " in ran.stdout
    assert "in stands_here" in ran.stderr
    assert "longer than its bound of 60 minutes" in ran.stdout
