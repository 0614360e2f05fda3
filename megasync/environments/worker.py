"""Where one environment lives and is called: on the event loop, on a thread of its own, or in a process of its own.

Invariant: calls of one environment never overlap, and none of them holds up the event loop, apart from an async
environment's own code.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol

from megasync.concurrency.tasks import kill_pool
from megasync.environments.protocol import Environment

Factory = Callable[[], Environment]


class Worker(Protocol):
    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls the environment, which the first call makes."""

    def end(self) -> None:
        """Gives it up."""

    @property
    def busy(self) -> bool:
        """A call is under way that cannot be ended."""


class LoopWorker:
    """For async environments."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._environment: Environment | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        if self._environment is None:
            self._environment = self._factory()
        return await getattr(self._environment, method)(*arguments)

    def end(self) -> None:
        """A call is ended by its cancellation."""

    @property
    def busy(self) -> bool:
        return False


class ThreadWorker:
    """A call that hangs keeps its thread for ever; the thread does not keep the program from ending."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._orders: SimpleQueue[tuple[Future, str, tuple] | None] = SimpleQueue()
        self._busy = False
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    async def call(self, method: str, *arguments: Any) -> Any:
        answer: Future = Future()
        self._orders.put((answer, method, arguments))
        return await asyncio.wrap_future(answer)

    def end(self) -> None:
        self._orders.put(None)

    @property
    def busy(self) -> bool:
        return self._busy

    def _serve(self) -> None:
        environment = None
        while (order := self._orders.get()) is not None:
            answer, method, arguments = order
            if not answer.set_running_or_notify_cancel():
                continue
            self._busy = True
            try:
                if environment is None:
                    environment = self._factory()
                result = getattr(environment, method)(*arguments)
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who waits for it
                self._busy = False
                answer.set_exception(error)
            else:
                self._busy = False
                answer.set_result(result)


class ProcessWorker:
    """A call that hangs is ended with its process."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        # spawn: a fork of this process would copy its threads' locks and its sockets.
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    async def call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._pool.submit(_call, self._factory, method, arguments))

    def end(self) -> None:
        kill_pool(self._pool)

    @property
    def busy(self) -> bool:
        return False


# The environment of a worker process.
_here: list[Environment] = []


def _call(factory: Factory, method: str, arguments: tuple) -> Any:
    if not _here:
        _here.append(factory())
    return getattr(_here[0], method)(*arguments)


def worker_kind(factory: Factory, isolation: str) -> type[LoopWorker | ThreadWorker | ProcessWorker]:
    """Async environments live on the loop; for the others `isolation` is thread or process."""
    made = getattr(factory, "func", factory)
    if inspect.iscoroutinefunction(getattr(made, "step", None)):
        return LoopWorker
    return {"thread": ThreadWorker, "process": ProcessWorker}[isolation]
