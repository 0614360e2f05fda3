"""Ray actors: groups with one role, services in an actor of their own, and killing actors that no longer respond.

Every call has a deadline and every failure names the actor and the cause; no other module touches Ray's futures. An
actor that died or does not answer is a `ProcessLost`, whatever its peers reported; any other error came out of the
call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.cluster.roles import ROLES
from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import MegasyncError, ProcessLost, TrainingError
from megasync.observe.stacks import ProcessStacks
from megasync.serving.process_watch import ProcessId, ProcessWatch
from megasync.serving.router import Router
from megasync.serving.server import SGLangServer

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

# When an actor dies, its peers' collectives may fail before Ray reports the death. Seconds to wait for that report.
DEATH_REPORT_SECONDS = 5.0
# Added to a start's own deadline, so that the service's error, which is more specific, comes first. Also the deadline
# of short calls.
ANSWER_SECONDS = 30.0
# Seconds for a killed process to exit, on a busy machine.
EXIT_SECONDS = 10.0


class ActorGroup:
    """The actors of one role, in slot order.

    Calls name a method of the role's class, not its name, so that a type checker sees the method and its arguments.
    """

    def __init__(self, role: str, handles: Sequence[Any]) -> None:
        self.role = role
        self.handles = list(handles)

    @classmethod
    def create(cls, role: str, arguments: Sequence[tuple[Any, ...]], options: Sequence[dict[str, Any]]) -> ActorGroup:
        """Starts one actor per entry of `arguments`, with Ray's `options` for its slot (`Pools.options`)."""
        remote = ray.remote(ROLES[role].actor)
        handles = [
            remote.options(**each, max_restarts=0).remote(*args) for each, args in zip(options, arguments, strict=True)
        ]
        return cls(role, handles)

    async def on_all(
        self, timeout: float | None, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls a method on every actor; results in slot order. Raises the first failure."""
        name = method.__name__
        shared = [ray.put(arg) if isinstance(arg, (list, dict)) else arg for arg in args]
        refs = [getattr(handle, name).remote(*shared, **kwargs) for handle in self.handles]
        return await self._gather(name, refs, timeout)

    async def on_one(
        self,
        slot: int,
        timeout: float | None,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R] | R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Calls a method on one actor."""
        return await self.call_one(slot, method.__name__, *args, timeout=timeout, **kwargs)

    async def call_one(self, slot: int, method: str, *args: Any, timeout: float | None, **kwargs: Any) -> Any:
        ref = getattr(self.handles[slot], method).remote(*args, **kwargs)
        return (await self._gather(method, [ref], timeout, first=slot))[0]

    async def _gather(self, method: str, refs: list[Any], timeout: float | None, first: int = 0) -> list[Any]:
        calls = [asyncio.ensure_future(self._result(slot, method, ref)) for slot, ref in enumerate(refs, first)]
        try:
            done, late = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            failure = next((error for call in done if (error := call.exception())), None)
            if failure is not None:
                raise await _find_death(failure, late) or failure
            if late:
                slots = [slot for slot, call in enumerate(calls, first) if call in late]
                loss = ProcessLost(
                    f"{self.role} {slots} did not finish {method}() within {timeout:.0f} s; raise the matching "
                    f"timeouts.* value if the work really takes longer"
                )
                loss.slots, loss.silent = tuple(slots), True
                raise loss
            return [call.result() for call in calls]
        finally:
            await cancel_and_wait(*calls)

    async def _result(self, slot: int, method: str, ref: Any) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, MegasyncError):
                raise cause from None
            raise TrainingError(f"{self.role} {slot} failed in {method}(): {type(cause).__name__}: {cause}") from error
        except RayError as error:
            # The actor died, or its node is gone.
            loss = ProcessLost(f"{self.role} {slot} died during {method}(): {error}")
            loss.slots = (slot,)
            raise loss from error

    def kill(self) -> None:
        """Kills the actors immediately; use it after `stop`, or when an actor no longer answers."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)
        self.handles.clear()


async def _find_death(failure: BaseException, others: set[asyncio.Task[Any]]) -> ProcessLost | None:
    """The death of another actor, which an unexpected failure may come from; None when all are alive."""
    if not isinstance(failure.__cause__, RayTaskError):
        return None
    deadline = time.monotonic() + DEATH_REPORT_SECONDS
    while others:
        left = max(0.0, deadline - time.monotonic())
        ended, others = await asyncio.wait(others, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for death in (call.exception() for call in ended):
            if isinstance(death, ProcessLost):
                return death
        if not ended:
            return None
    return None


class ServiceActor:
    """A service (a server, the router) in a Ray actor of its own, which ends with it. Not reusable after `stop`."""

    def __init__(
        self,
        role: str,
        index: int,
        options: dict[str, Any],
        arguments: tuple[Any, ...],
        ended: Callable[[ProcessId], Awaitable[None]],
        node: Callable[[], str] = str,
    ) -> None:
        """`start` creates the actor.

        Args:
            options: Ray's, from `Pools`.
            arguments: those of the role's class.
            ended: returns when a process of the actor's node has ended; see `Pools.ended`.
            node: the Ray id of that node.
        """
        self._name = f"{role} {index}"
        self._role = role
        self._options = options
        self._arguments = arguments
        self._wait_for_end = ended
        self._node = node
        self._group: ActorGroup | None = None
        self._process: ProcessId | None = None

    def _create(self) -> None:
        if self._group is None:
            remote = ray.remote(ROLES[self._role].actor).options(**self._options, max_restarts=0)
            self._group = ActorGroup(self._role, [remote.remote(*self._arguments)])

    async def meet(self, timeout: float) -> tuple[str, int]:
        """Creates the actor and calls its `SGLangServer.meet`."""
        self._create()
        return await self._actor().on_one(0, timeout + ANSWER_SECONDS, SGLangServer.meet, timeout)

    async def start(self, timeout: float) -> str:
        self._create()
        url = await self._actor().on_one(0, timeout + ANSWER_SECONDS, SGLangServer.start, timeout)
        self._process = await self._actor().on_one(0, ANSWER_SECONDS, SGLangServer.process_id)
        return url

    def processes(self) -> list[tuple[str, int]]:
        """The node and the id of the service's process, if it runs."""
        return [] if self._process is None else [(self._node(), self._process.pid)]

    async def ended(self) -> None:
        if self._process is None:
            raise ProcessLost(f"{self._name} does not run")
        await self._wait_for_end(self._process)

    async def tail(self, lines: int) -> str:
        return await self._actor().on_one(0, ANSWER_SECONDS, SGLangServer.tail, lines)

    async def metrics_url(self) -> str:
        """Calls `Router.metrics_url` in the actor."""
        return await self._actor().on_one(0, ANSWER_SECONDS, Router.metrics_url)

    async def handover_port(self) -> int:
        """Calls `SGLangServer.handover_port` in the actor."""
        return await self._actor().on_one(0, ANSWER_SECONDS, SGLangServer.handover_port)

    async def know_prefill(self, engines: Sequence[tuple[str, int]]) -> None:
        """Calls `SGLangServer.know_prefill` in the actor."""
        await self._actor().on_one(0, ANSWER_SECONDS, SGLangServer.know_prefill, list(engines))

    async def visible_devices(self) -> str:
        """Calls `SGLangServer.visible_devices` in the actor."""
        return await self._actor().on_one(0, ANSWER_SECONDS, SGLangServer.visible_devices)

    async def stop(self, timeout: float) -> None:
        """Asks the service to end within `timeout` seconds, then kills the actor whatever it answered.

        A cancelled call kills it too. The service ends with its actor.
        """
        if self._group is None:
            return
        try:
            await self._actor().on_one(0, timeout, SGLangServer.stop)
        except MegasyncError as error:
            log.debug("%s did not stop cleanly: %r", self._name, error)
        finally:
            self._group.kill()
            self._group = self._process = None

    def _actor(self) -> ActorGroup:
        if self._group is None:
            raise ProcessLost(f"{self._name} does not run")
        return self._group


class AgentActor:
    """The `node_agents.Agent` of one node: a `ProcessWatch` in an actor that holds no device."""

    def __init__(self, node: str) -> None:
        """Starts the actor on the node with this Ray id; it fails if the node is gone."""
        role = ROLES["node_agent"]
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        remote = ray.remote(role.actor).options(scheduling_strategy=place, num_cpus=0, max_restarts=0)
        self._group = ActorGroup(role.name, [remote.remote()])

    async def ended(self, processes: Sequence[ProcessId], seconds: float, timeout: float) -> list[ProcessId]:
        return await self._group.on_one(0, timeout, ProcessWatch.ended, list(processes), seconds)

    async def stacks(self, families: Sequence[tuple[str, int]], seconds: float) -> list[ProcessStacks]:
        return await self._group.on_one(0, None, ProcessWatch.stacks, list(families), seconds)

    def kill(self) -> None:
        self._group.kill()


def kill_process(pid: int, title: str) -> None:
    """Kills a process of this node if `title` is in its command line. Raises psutil.TimeoutExpired if it survives."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # Process ids are reused: Ray names an actor's process after its class.
        if title in " ".join(process.cmdline()):
            process.kill()
            process.wait(EXIT_SECONDS)
