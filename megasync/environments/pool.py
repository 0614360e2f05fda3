"""A pool with a bounded number of environments, each leased to one episode at a time.

Invariants: at most `size` episodes are in progress, each with exclusive use of its environment. An environment whose
call failed or was abandoned is never leased again. `lease` guarantees both. The calls of one environment never overlap,
and none blocks the event loop, except for an async environment's own code: its host guarantees both.

A ServerError of an environment, the end of its process, and a `reset` without an answer are no fault of the episode:
they are a ServiceFailed, and `breaker` pauses environments that fail so for everybody.

    waits       for                      woken by
    ----------  -----------------------  ------------------------------------
    lease       a pause of the breaker   `breaker`
    lease       a free slot              the end of another episode
    a call      the environment          its answer, or the deadline
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, Protocol

from megasync.base.importing import name_of
from megasync.concurrency.foreign import explain, invoke, run
from megasync.concurrency.processes import answer_in_process, kill_pool, one_process
from megasync.concurrency.tasks import within
from megasync.environments.protocol import Environment, SharingFactory, Step, plain_answer
from megasync.errors import DataError, ServerError, ServiceFailed, is_infrastructure
from megasync.rollout.breaker import Breaker

log = logging.getLogger(__name__)


Factory = Callable[[], Environment]


class Host(Protocol):
    """Owns one environment and calls its methods, which never overlap."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the environment. The first call creates the environment."""

    def end(self) -> None:
        """Discards the environment."""

    @property
    def busy(self) -> bool:
        """Whether a call that cannot be stopped is in progress."""
        ...


class LoopHost:
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


class ThreadHost:
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


class ProcessHost:
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


# The environment of this process, once created.
_here: list[Environment] = []


def _call_here(factory: Factory, method: str, arguments: tuple[Any, ...]) -> Any:
    if not _here:
        _here.append(factory())
    return _call(_here[0], method, arguments)


def _call(environment: Environment, method: str, arguments: tuple[Any, ...]) -> Any:
    return plain_answer(method, getattr(environment, method)(*arguments))


def host_kind(factory: Factory, isolation: str) -> type[LoopHost | ThreadHost | ProcessHost]:
    """The class that hosts a factory's environments: LoopHost if `step` is async, otherwise by `isolation`."""
    made = getattr(factory, "func", factory)
    if inspect.iscoroutinefunction(getattr(made, "step", None)):
        return LoopHost
    return {"thread": ThreadHost, "process": ProcessHost}[isolation]


class StepTimeout(DataError):
    """An environment did not answer an action within its deadline, which may be the fault of either."""


class EnvironmentPool:
    """`factory` creates an environment. `deadline` is in seconds, per call, and includes the creation.

    `label` is the environment's name in metrics, by default that of its class.

    `isolation` selects where sync environments run. With "thread", an environment that hangs is abandoned (at most
    `size` of them). With "process", it is killed; the factory must then be picklable. Async environments run on the
    event loop.
    """

    def __init__(
        self, factory: Factory, size: int, deadline: float, isolation: str = "thread", label: str = ""
    ) -> None:
        self._factory = factory
        self._size = size
        self._deadline = deadline
        self._kind = host_kind(factory, isolation)
        self._name = name_of(getattr(factory, "func", factory))
        self.breaker = Breaker(label or self._name.rpartition(".")[2])
        # Whether episodes that end unfinished are graded.
        self._grades = hasattr(getattr(factory, "func", factory), "grade")
        self._free = asyncio.Semaphore(size)
        self._idle: list[Host] = []
        self._abandoned: list[Host] = []
        self.made = 0

    @property
    def abandoned(self) -> int:
        """The number of environments abandoned during a call whose threads have not returned from that call yet."""
        self._abandoned = [host for host in self._abandoned if host.busy]
        return len(self._abandoned)

    async def ready(self) -> None:
        """Makes usable what the environments share. Raises ServerError or ConfigError."""
        if isinstance(self._factory, SharingFactory):
            await self._factory.shared.ready()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Episode]:
        """An environment for one episode.

        Raises DataError when too many environments hang on their threads, ServiceFailed when what they share is down,
        and ServiceDown when they have failed for everybody for long.
        """
        async with self.breaker.episode(), self._free:
            try:
                await self.ready()
            except ServerError as error:
                raise ServiceFailed(str(error), self.breaker.name) from error
            host = self._idle.pop() if self._idle else self._make()
            episode = Episode(host, self._name, self.breaker.name, self._deadline, self._grades)
            try:
                yield episode
            finally:
                if episode.sound:
                    self._idle.append(host)
                else:
                    self._discard(host)

    async def close(self) -> None:
        """Closes the idle environments, each within the deadline, and what they share."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(self._close, idle))
        if isinstance(self._factory, SharingFactory):
            await self._factory.shared.close()

    def _make(self) -> Host:
        if self.abandoned >= self._size:
            raise DataError(
                f"{self.abandoned} environments {self._name} hang on their threads; set "
                f"rollout.environment.isolation=process, where they can be killed, or raise timeouts.environment"
            )
        self.made += 1
        return self._kind(self._factory)

    def _discard(self, host: Host) -> None:
        host.end()
        if host.busy:
            self._abandoned.append(host)
            log.warning("Abandoned an environment %s during a call; its thread keeps running", self._name)

    async def _close(self, host: Host) -> None:
        try:
            await within(host.call("close"), self._deadline)
        except Exception as error:  # whatever a user's environment raises; it is no longer needed
            log.warning("An environment %s could not be closed", self._name, exc_info=error)
        self._discard(host)


class Episode:
    """A leased environment.

    Its methods raise ServiceFailed for a failure that is not the episode's, and otherwise DataError, naming the
    environment; StepTimeout for a late answer to an action.
    """

    def __init__(self, host: Host, name: str, label: str, deadline: float, grades: bool = False) -> None:
        self._host = host
        self._grades = grades
        self._name = name
        self._label = label
        self._deadline = deadline
        # Whether the environment can be leased again: False from the start of a call until it answers.
        self.sound = True

    async def reset(self, sample: dict[str, Any]) -> str:
        return await self._call("reset", sample)

    async def step(self, action: str) -> Step:
        return await self._call("step", action)

    async def grade(self) -> float:
        """The reward of an episode that ends before the environment is done; 0.0 from one that cannot grade it."""
        return await self._call("grade") if self._grades else 0.0

    async def _call(self, method: str, *arguments: Any) -> Any:
        self.sound = False
        try:
            answer = await within(self._host.call(method, *arguments), self._deadline)
        except TimeoutError as error:
            late = f"{method} did not answer within {self._deadline:g} s; raise timeouts.environment, or make it faster"
            # No action has reached it before.
            raise self._failure(late) if method == "reset" else StepTimeout(self._said(late)) from error
        except Exception as error:  # whatever a user's environment raises
            if is_infrastructure(error) or isinstance(error, BrokenProcessPool):
                raise self._failure(f"{method}: {explain(error)}") from error
            raise DataError(self._said(f"{method} raised {explain(error)}")) from error
        self.sound = True
        return answer

    def _said(self, problem: str) -> str:
        return f"the environment {self._name}: {problem}"

    def _failure(self, problem: str) -> ServiceFailed:
        return ServiceFailed(self._said(problem), self._label)
