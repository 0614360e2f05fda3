"""Services in Ray actors: the router, a server of one actor, and servers of several, on several nodes or of engines.

A server of several actors counts as one process: it is stopped whole, and has ended when any of them has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from megasync.cluster.actors import ANSWER_SECONDS, ActorGroup
from megasync.cluster.pools import Pools
from megasync.concurrency.tasks import gather_or_cancel, wait_for_first
from megasync.errors import MegasyncError, ProcessLost
from megasync.serving.process import Service
from megasync.serving.process_watch import ProcessId
from megasync.serving.router import Router
from megasync.serving.server import SGLangServer

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


class ServiceActor:
    """A service (a server, the router) in a Ray actor of its own, which ends with it. Not reusable after `stop`."""

    def __init__(
        self,
        service: type[Service],
        arguments: tuple[Any, ...],
        pools: Pools,
        pool: str,
        slot: int,
        *,
        beside: bool = False,
    ) -> None:
        """`start` creates the actor from the `arguments` of the service's class, on the devices of a slot of a pool.

        With `beside`, it is on the slot's node and takes no device.
        """
        self._name = f"{service.name} at slot {slot} of pool {pool}"
        self._service = service
        self._arguments = arguments
        self._pools = pools
        self._place = pool, slot
        self._options = (pools.same_node_options if beside else pools.options)(pool, slot)
        self._group: ActorGroup | None = None
        self._process: ProcessId | None = None

    def _create(self) -> None:
        if self._group is None:
            self._group = ActorGroup.create(self._name, self._service, [self._arguments], [self._options])

    async def meet(self, timeout: float) -> tuple[str, int]:
        """Creates the actor and calls its `SGLangServer.meet`."""
        self._create()
        return await self._call(timeout + ANSWER_SECONDS, SGLangServer.meet, timeout)

    async def start(self, timeout: float) -> str:
        self._create()
        url = await self._call(timeout + ANSWER_SECONDS, Service.start, timeout)
        self._process = await self.call(Service.process_id)
        return url

    def processes(self) -> list[tuple[str, int]]:
        """The node and the id of the service's process, if it runs."""
        return [] if self._process is None else [(self._pools.node(*self._place), self._process.pid)]

    async def ended(self) -> None:
        if self._process is None:
            raise ProcessLost(f"{self._name} does not run")
        await self._pools.ended(*self._place, self._process)

    async def tail(self, lines: int) -> str:
        return await self.call(Service.tail, lines)

    async def metrics_url(self) -> str:
        return await self.call(Router.metrics_url)

    async def visible_devices(self) -> str:
        return await self.call(SGLangServer.visible_devices)

    async def stop(self, timeout: float) -> None:
        """Asks the service to end within `timeout` seconds, then kills the actor whatever it answered.

        A cancelled call kills it too. The service ends with its actor.
        """
        if self._group is None:
            return
        try:
            await self._call(timeout, Service.stop)
        except MegasyncError as error:
            log.debug("%s did not stop cleanly: %r", self._name, error)
        finally:
            self._group.kill()
            self._group = self._process = None

    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R] | R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Calls a short method of the service in its actor."""
        return await self._call(ANSWER_SECONDS, method, *args, **kwargs)

    async def _call(
        self,
        timeout: float,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R] | R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        if self._group is None:
            raise ProcessLost(f"{self._name} does not run")
        return await self._group.on_one(0, timeout, method, *args, **kwargs)


class ServerParts:
    """The common part of servers of several actors; `named` lists the actors, the first one for requests or control.

    Subclasses start them.
    """

    def named(self) -> list[tuple[str, ServiceActor]]:
        """The actors that exist, with the names of their logs."""
        raise NotImplementedError

    async def ended(self) -> None:
        """Returns, or raises, when one of the processes has ended: the others cannot go on without it."""
        await wait_for_first(*(asyncio.ensure_future(part.ended()) for _, part in self.named()))

    def processes(self) -> list[tuple[str, int]]:
        return [process for _, part in self.named() for process in part.processes()]

    async def tail(self, lines: int) -> str:
        """The last lines of all logs, one after the other."""
        named = self.named()
        tails = await asyncio.gather(*(part.tail(lines) for _, part in named), return_exceptions=True)
        return "\n".join(
            f"{name}: {tail if isinstance(tail, str) else f'(unknown: {tail})'}"
            for (name, _), tail in zip(named, tails, strict=True)
        )

    async def visible_devices(self) -> str:
        """The GPUs of the first process."""
        return await self.named()[0][1].visible_devices()

    async def stop(self, timeout: float) -> None:
        await asyncio.gather(*(part.stop(timeout) for _, part in self.named()))


class SpreadServer(ServerParts):
    """The actors of one server, one on each node; requests go to the first.

    ``part`` makes the actor of a node, from the node's number and the point where all meet (None on the first).
    """

    def __init__(self, part: Callable[[int, tuple[str, int] | None], ServiceActor], nodes: int) -> None:
        self._make_part = part
        self._nodes = nodes
        self._parts = [part(0, None)]

    def named(self) -> list[tuple[str, ServiceActor]]:
        return [(f"node {node}", part) for node, part in enumerate(self._parts)]

    async def start(self, timeout: float) -> str:
        """Starts all processes; returns the URL of the first. Raises MegasyncError; `stop` ends those that started."""
        meeting_point = await self._parts[0].meet(timeout)
        self._parts += [self._make_part(node, meeting_point) for node in range(1, self._nodes)]
        urls = await gather_or_cancel(*(part.start(timeout) for part in self._parts))
        return urls[0]


class EngineGroup(ServerParts):
    """The actors of one server of prefill and decode engines and, before several decode engines, a router.

    `prefill` and `decode`, the URLs of the engines, are known once it has started.

    Args:
        front: makes the router's actor from the URLs of the decode engines.
    """

    def __init__(
        self,
        prefill: Sequence[ServiceActor],
        decode: Sequence[ServiceActor],
        front: Callable[[Sequence[str]], ServiceActor],
    ) -> None:
        self.prefill: Sequence[str] = ()
        self.decode: Sequence[str] = ()
        self._prefill, self._decode = list(prefill), list(decode)
        self._make_front = front
        self._front: ServiceActor | None = None

    def named(self) -> list[tuple[str, ServiceActor]]:
        engines = [("prefill", part) for part in self._prefill] + [("decode", part) for part in self._decode]
        return engines if self._front is None else [*engines, ("router", self._front)]

    async def start(self, timeout: float) -> str:
        """Starts all parts; returns the URL for requests. Raises MegasyncError; `stop` ends those that started."""
        deadline = asyncio.get_running_loop().time() + timeout
        urls = await gather_or_cancel(*(engine.start(timeout) for engine in (*self._prefill, *self._decode)))
        ports = await gather_or_cancel(*(engine.call(SGLangServer.handover_port) for engine in self._prefill))
        self.prefill, self.decode = urls[: len(self._prefill)], urls[len(self._prefill) :]
        places = list(zip(self.prefill, ports, strict=True))
        await gather_or_cancel(*(engine.call(SGLangServer.know_prefill, places) for engine in self._decode))
        if len(self.decode) == 1:
            return self.decode[0]
        self._front = self._make_front(self.decode)
        return await self._front.start(max(1.0, deadline - asyncio.get_running_loop().time()))
