"""Workers that own one environment each: on the event loop, on a separate thread, or in a separate process.

Invariant: the calls of one environment never overlap, and none blocks the event loop, except for an async environment's
own code.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

from megasync.concurrency.foreign import invoke, run
from megasync.concurrency.processes import answer_in_process, kill_pool, one_process
from megasync.environments.protocol import Environment, plain_answer

Factory = Callable[[], Environment]


class Worker(Protocol):
    """Owns one environment and calls its methods."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the environment. The first call creates the environment."""

    def end(self) -> None:
        """Discards the environment."""

    @property
    def busy(self) -> bool:
        """Whether a call that cannot be stopped is in progress."""
        ...


class LoopWorker:
    """Runs an async environment on the event loop."""

    busy = False

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._environment: Environment | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        return await run(self._call, f"an environment's {method}", None, method, arguments)

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self._environment is None:
            self._environment = self._factory()
        return plain_answer(method, await getattr(self._environment, method)(*arguments))

    def end(self) -> None:
        """Does nothing: cancelling a call stops it."""


class ThreadWorker:
    """Runs an environment on a daemon thread. A call that hangs occupies the thread, but lets the program exit."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._orders: SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = SimpleQueue()
        self.busy = False
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    async def call(self, method: str, *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        self._orders.put((answer, method, arguments))
        return await asyncio.wrap_future(answer)

    def end(self) -> None:
        self._orders.put(None)

    def _serve(self) -> None:
        environment = None
        while (order := self._orders.get()) is not None:
            answer, method, arguments = order
            if not answer.set_running_or_notify_cancel():
                continue
            self.busy = True
            try:
                if environment is None:
                    environment = invoke(self._factory)
                result = invoke(_call, environment, method, arguments)
            except Exception as error:  # noqa: BLE001 - passed to the waiting caller
                self.busy = False
                answer.set_exception(error)
            else:
                self.busy = False
                answer.set_result(result)


class ProcessWorker:
    """Runs an environment in a process. A call that hangs is stopped by killing the process."""

    busy = False

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._pool = one_process()

    async def call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(
            self._pool.submit(answer_in_process, _call_here, self._factory, method, arguments)
        )

    def end(self) -> None:
        kill_pool(self._pool)


# The environment of this worker process, once created.
_here: list[Environment] = []


def _call_here(factory: Factory, method: str, arguments: tuple[Any, ...]) -> Any:
    if not _here:
        _here.append(factory())
    return _call(_here[0], method, arguments)


def _call(environment: Environment, method: str, arguments: tuple[Any, ...]) -> Any:
    return plain_answer(method, getattr(environment, method)(*arguments))


def worker_kind(factory: Factory, isolation: str) -> type[LoopWorker | ThreadWorker | ProcessWorker]:
    """The worker class for a factory: LoopWorker if `step` is async, otherwise by `isolation` (thread or process)."""
    made = getattr(factory, "func", factory)
    if inspect.iscoroutinefunction(getattr(made, "step", None)):
        return LoopWorker
    return {"thread": ThreadWorker, "process": ProcessWorker}[isolation]
