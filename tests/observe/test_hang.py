"""A hang report has everything that was available in time, and never fails or delays its caller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megasync.observe import hang
from megasync.observe.hang import HangReporter, RunProcess
from megasync.observe.stacks import ProcessStacks
from megasync.observe.state_file import BufferState, ProcessState, RunState

STATE = RunState(
    time=100.0,
    status="running",
    step=7,
    total_steps=9,
    activities={"trainer": ("waiting for groups", 40.0)},
    servers=[ProcessState(name="server-0", state="suspect", reason="no answer\nmore", running=3, waiting=1)],
    buffer=BufferState(slots={"generating": 2}, capacity=4, admitted=9, trained=7, live=2),
)
PROCESSES = [RunProcess("rank 0", "a", 10), RunProcess("rank 1", "a", 11), RunProcess("server-0", "b", 12)]


def stacks(process: RunProcess, text: str = "thread MainThread\n    step") -> ProcessStacks:
    return ProcessStacks(process.name, process.pid, "ray::Trainer", "sleeping", "step(): in all_reduce", text)


class Nodes:
    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.asked: list[str] = []

    async def read(self, node: str, processes, seconds: float) -> list[ProcessStacks]:
        self.asked += [process.name for process in processes]
        if node in self.silent:
            await asyncio.Event().wait()
        return [stacks(process) for process in processes]


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def reporter(tmp_path: Path, nodes: Nodes, said: list[str]) -> HangReporter:
    async def waits() -> str:
        return "lease 8: waits for 16 groups"

    reporter = HangReporter(tmp_path, lambda: STATE, said.append, waits)
    reporter.cover(nodes.read, lambda: PROCESSES)
    return reporter


async def test_a_report_joins_tasks_stacks_and_states(reporter, said) -> None:
    async def sample():
        await asyncio.Event().wait()

    task = asyncio.create_task(sample(), name="sample 1")
    await asyncio.sleep(0)

    path = await reporter.report("no group was finished")
    task.cancel()
    text = path.read_text()
    assert path.parent.name == "hang" and str(path) in said[0]
    for part in (
        "no group was finished",
        "running, step 7 of 9",
        "trainer: waiting for groups for 60 s",
        "server-0: suspect (no answer), 3 requests run, 1 wait",
        "{'generating': 2}, 4 places",
        "lease 8: waits for 16 groups",
        "sample: ",
        "thread MainThread",
        "rank 0 (process 10), rank 1 (process 11)",
    ):
        assert part in text, part


async def test_processes_with_equal_stacks_are_shown_once(reporter) -> None:
    text = (await reporter.report("slow")).read_text()
    assert text.count("    step\n") == 1


async def test_only_the_named_processes_are_read(reporter, nodes) -> None:
    await reporter.report("server-0 does not answer", {"server-0"})
    assert nodes.asked == ["server-0"]


async def test_a_node_that_does_not_answer_is_named_and_the_others_are_shown(reporter, nodes, monkeypatch) -> None:
    monkeypatch.setattr(hang, "STACKS_SECONDS", 0.05)
    nodes.silent = {"b"}
    text = (await reporter.report("slow")).read_text()
    assert "no stacks of server-0: node b did not answer" in text and "rank 1 (process 11)" in text


async def test_a_node_that_fails_and_a_state_that_is_unknown_are_said(tmp_path, said) -> None:
    async def broken(*_):
        raise OSError("lost")

    reporter = HangReporter(tmp_path, lambda: STATE, said.append, broken)
    reporter.cover(broken, lambda: PROCESSES)
    text = (await reporter.report("slow")).read_text()
    assert "OSError: lost" in text and "unknown: OSError" in text


async def test_a_report_ends_at_its_deadline(reporter, nodes, monkeypatch, caplog) -> None:
    monkeypatch.setattr(hang, "TOTAL_SECONDS", 0.05)
    nodes.silent = {"a", "b"}
    assert await reporter.report("slow") is None
    assert "hang report" in caplog.text


async def test_a_report_that_cannot_be_written_is_a_warning(reporter, tmp_path, caplog) -> None:
    (tmp_path / "hang").write_text("a file is in the way")
    assert await reporter.report("slow") is None
    assert "Could not write a hang report" in caplog.text


async def test_old_reports_are_removed(reporter, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hang, "MOST_REPORTS", 2)
    (tmp_path / "hang").mkdir()
    foreign = [tmp_path / "hang" / name for name in ("00000000-notes.txt", "notes.txt", "20200101-000000-000.txt.bak")]
    for path in foreign:
        path.touch()
    paths = [await reporter.report(f"number {n}") for n in range(4)]
    kept = sorted((tmp_path / "hang").iterdir())
    assert kept == sorted([*sorted(set(paths))[-2:], *foreign])
