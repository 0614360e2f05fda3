"""Notices processes that end, by one agent on each node: one long call per node instead of polling every server.

    ended(node, process) ──▶ one task per node ──(names all its processes)──▶ agent on the node ──▶ those that ended

    wait     for                             woken by
    -------  ------------------------------  -----------------------------------------------------------------------
    `ended`  the end of one process          the agent's report; ProcessLost when the node does not answer; `close`
    a task   the agent's answer, or another  the end of a process, after CALL_SECONDS at the latest; a deadline; `ended`
             process to wait for

Agents keep no state, because each call names every process of the node that somebody waits for. An agent that fails is
therefore replaced, and the next one finds what ended meanwhile. Invariant: every wait ends with the process, or with
ProcessLost once an agent and its replacement have failed in a row (`_follow`): the node is then lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.cluster.actors import ActorGroup
from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import MegasyncError, ProcessLost
from megasync.observe.stacks import ProcessStacks
from megasync.serving.process_watch import ProcessId, ProcessWatch

log = logging.getLogger(__name__)

# Seconds after which an agent answers even if no process has ended, and the deadline of that answer.
CALL_SECONDS = 5.0
ANSWER_SECONDS = 10.0
# Deadline of the first answer of a replacement, in seconds. With ANSWER_SECONDS, it bounds how long a node is silent
# before it is lost.
REPLACEMENT_SECONDS = 20.0
# The same for the first agent of a node, which starts when many other processes do.
FIRST_ANSWER_SECONDS = 120.0


class NodeAgent:
    """A `ProcessWatch` on a node, in an actor that holds no device. Callers of `stacks` have a deadline."""

    def __init__(self, node: str) -> None:
        """Starts the actor on the node with this Ray id; it fails if the node is gone."""
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        self._group = ActorGroup.create(
            "node agent", ProcessWatch, [()], [{"scheduling_strategy": place, "num_cpus": 0}]
        )

    async def ended(self, processes: Sequence[ProcessId], seconds: float, timeout: float) -> list[ProcessId]:
        return await self._group.on_one(0, timeout, ProcessWatch.ended, list(processes), seconds)

    async def stacks(self, families: Sequence[tuple[str, int]], seconds: float) -> list[ProcessStacks]:
        return await self._group.on_one(0, None, ProcessWatch.stacks, list(families), seconds)

    def kill(self) -> None:
        self._group.kill()


class NodeAgents:
    """Starts agents where they are needed. `close` ends them, and every wait with ProcessLost."""

    def __init__(self, start: Callable[[str], NodeAgent] = NodeAgent) -> None:
        """`start` starts an agent on a node, without waiting for it."""
        self._start = start
        self._nodes: dict[str, _Node] = {}

    async def ended(self, node: str, process: ProcessId) -> None:
        """Returns when a process of the node has ended. Raises ProcessLost when the node is lost."""
        await self._node(node).ended(process)

    async def stacks(self, node: str, families: Sequence[tuple[str, int]], seconds: float) -> list[ProcessStacks]:
        """The stacks of processes of a node, for at most ``seconds``; the agent may have to start first."""
        return await self._node(node).agent().stacks(families, seconds)

    def _node(self, name: str) -> _Node:
        if name not in self._nodes:
            self._nodes[name] = _Node(name, self._start)
        return self._nodes[name]

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()


class _Node:
    def __init__(self, name: str, start: Callable[[str], NodeAgent]) -> None:
        self._name = name
        self._start = start
        self._agent: NodeAgent | None = None
        self._waits: dict[ProcessId, asyncio.Future[None]] = {}
        self._added = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name=f"agent of node {name}")

    async def ended(self, process: ProcessId) -> None:
        wait = self._waits[process] = asyncio.get_running_loop().create_future()
        self._added.set()
        try:
            await wait
        finally:
            self._waits.pop(process, None)

    def agent(self) -> NodeAgent:
        if self._agent is None:
            self._agent = self._start(self._name)
        return self._agent

    def close(self) -> None:
        self._task.cancel()
        self._fail(ProcessLost(f"node {self._name} is no longer watched, because its run has ended"))
        self._end_agent()

    async def _follow(self) -> None:
        failed = False
        timeout = FIRST_ANSWER_SECONDS
        while True:
            while not self._waits:
                self._added.clear()
                await self._added.wait()
            try:
                gone = await self._ask(timeout)
            except MegasyncError as error:
                self._end_agent()
                if failed:
                    self._fail(ProcessLost(f"node {self._name} is lost: {error}"))
                else:
                    log.warning("Agent of node %s failed, replacing it: %s", self._name, error)
                failed, timeout = not failed, REPLACEMENT_SECONDS
                continue
            if gone is not None:
                failed, timeout = False, ANSWER_SECONDS
                self._report(gone)

    async def _ask(self, timeout: float) -> list[ProcessId] | None:
        """Asks the agent once; None if the question is out of date because another process must be watched."""
        # A new agent answers as soon as it runs, because its deadline allows for its start.
        seconds = 0.0 if self._agent is None else CALL_SECONDS
        agent = self.agent()
        self._added.clear()
        call = asyncio.ensure_future(agent.ended(list(self._waits), seconds, timeout))
        added = asyncio.ensure_future(self._added.wait())
        try:
            await asyncio.wait({call, added}, return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            await cancel_and_wait(call, added)

    def _report(self, gone: Sequence[ProcessId]) -> None:
        for process in gone:
            wait = self._waits.pop(process, None)
            if wait is not None and not wait.done():
                wait.set_result(None)

    def _fail(self, error: ProcessLost) -> None:
        for wait in self._waits.values():
            if not wait.done():
                wait.set_exception(error)
        self._waits.clear()

    def _end_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.kill()
