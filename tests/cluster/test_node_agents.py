"""One agent per node: every wait for a process ends, whatever happens to agents and nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest

from megasync.cluster.node_agents import CALL_SECONDS, NodeAgents
from megasync.errors import ProcessLost
from megasync.lab.sim.clock import VirtualLoop
from megasync.serving.process_watch import ProcessId


class FakeNodes:
    """Nodes whose processes end on command, and whose agents die (`dead`) or answer nothing (`frozen`)."""

    def __init__(self) -> None:
        self.gone: set[ProcessId] = set()
        self.dead: set[str] = set()
        self.frozen: set[str] = set()
        self.started: list[str] = []
        self.calls = 0
        self.changed = asyncio.Event()
        self.agents = NodeAgents(lambda node: FakeAgent(self, node))

    def end(self, *processes: ProcessId) -> None:
        self.gone |= set(processes)
        self.change()

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def watched(self, node: str, *processes: ProcessId) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.agents.ended(node, process)) for process in processes]


class FakeAgent:
    def __init__(self, nodes: FakeNodes, node: str) -> None:
        nodes.started.append(node)
        self._nodes, self._node = nodes, node
        self._killed = False

    async def ended(self, processes: Sequence[ProcessId], seconds: float, timeout: float) -> list[ProcessId]:
        self._nodes.calls += 1
        clock = asyncio.get_running_loop().time
        begun = clock()
        assert not self._killed
        while True:
            if self._node in self._nodes.dead:
                raise ProcessLost("the agent died")
            if self._node in self._nodes.frozen:
                await asyncio.sleep(timeout - (clock() - begun))
                raise ProcessLost("the agent did not answer")
            gone = [process for process in processes if process in self._nodes.gone]
            if gone or clock() >= begun + seconds:
                return gone
            with suppress(TimeoutError):
                await asyncio.wait_for(self._nodes.changed.wait(), begun + seconds - clock())

    def kill(self) -> None:
        self._killed = True


def in_virtual_time(test: Callable[[FakeNodes], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def body() -> None:
            nodes = FakeNodes()
            try:
                await test(nodes)
            finally:
                nodes.agents.close()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(body())

    run.__name__ = test.__name__
    return run


A, B, C = ProcessId(1, 1), ProcessId(2, 1), ProcessId(3, 1)


@in_virtual_time
async def test_the_end_of_a_process_wakes_its_waiter_alone(nodes):
    first, second = nodes.watched("n", A, B)
    await asyncio.sleep(1.0)
    nodes.end(B)
    await second
    assert not first.done()
    assert nodes.started == ["n"]


@in_virtual_time
async def test_calls_per_second_do_not_grow_with_the_processes_of_a_node(nodes):
    nodes.watched("n", *(ProcessId(pid, 1) for pid in range(100)))
    await asyncio.sleep(100 * CALL_SECONDS)
    assert nodes.calls <= 102


@in_virtual_time
async def test_a_process_is_watched_as_soon_as_it_is_named(nodes):
    nodes.watched("n", A)
    await asyncio.sleep(0.1)
    (late,) = nodes.watched("n", B)
    nodes.end(B)
    await asyncio.wait_for(late, 0.1)


@in_virtual_time
async def test_a_dead_agent_is_replaced_and_what_ended_meanwhile_is_reported(nodes):
    first, second = nodes.watched("n", A, B)
    await asyncio.sleep(0.1)
    nodes.dead.add("n")
    nodes.change()
    while nodes.started == ["n"]:
        await asyncio.sleep(0)
    # The replacement has been started, but not asked.
    nodes.dead.clear()
    nodes.end(A)
    await asyncio.wait_for(first, CALL_SECONDS)
    nodes.end(B)
    await asyncio.wait_for(second, CALL_SECONDS)


@in_virtual_time
async def test_a_dead_node_ends_all_its_waits_and_no_other(nodes):
    lost, other = nodes.watched("n", A, B), nodes.watched("m", C)
    await asyncio.sleep(0.1)
    nodes.dead.add("n")
    nodes.change()
    for wait in lost:
        with pytest.raises(ProcessLost, match="node n is lost: the agent died"):
            await asyncio.wait_for(wait, CALL_SECONDS)
    assert not other[0].done()


@in_virtual_time
async def test_a_silent_node_is_noticed_in_time(nodes):
    (lost,) = nodes.watched("n", A)
    await asyncio.sleep(0.1)
    nodes.frozen.add("n")
    nodes.change()
    with pytest.raises(ProcessLost, match="node n is lost"):
        await asyncio.wait_for(lost, 31.0)
    # The next process on that node gets a new agent.
    nodes.frozen.clear()
    (again,) = nodes.watched("n", B)
    nodes.end(B)
    await asyncio.wait_for(again, CALL_SECONDS)


@in_virtual_time
async def test_closing_ends_every_wait(nodes):
    waits = nodes.watched("n", A, B)
    await asyncio.sleep(0.1)
    nodes.agents.close()
    for wait in waits:
        with pytest.raises(ProcessLost, match="no longer watched"):
            await wait
