"""A pool with a bounded number of environments, each leased to one episode at a time.

Invariant: at most `size` episodes are in progress, each with exclusive use of its environment. An environment whose
call failed or was abandoned is never leased again. `lease` guarantees both.

    waits       for                      woken by
    ----------  -----------------------  ------------------------------------
    lease       a free slot              the end of another episode
    a call      the environment          its answer, or the deadline
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megasync.base.importing import name_of
from megasync.concurrency.foreign import explain
from megasync.concurrency.tasks import within
from megasync.environments.protocol import Step
from megasync.environments.worker import Factory, Worker, worker_kind
from megasync.errors import DataError

log = logging.getLogger(__name__)


class EnvironmentPool:
    """`factory` creates an environment. `deadline` is in seconds, per call, and includes the creation.

    `isolation` selects where sync environments run. With "thread", an environment that hangs is abandoned (at most
    `size` of them). With "process", it is killed; the factory must then be picklable. Async environments run on the
    event loop.
    """

    def __init__(self, factory: Factory, size: int, deadline: float, isolation: str = "thread") -> None:
        self._factory = factory
        self._size = size
        self._deadline = deadline
        self._kind = worker_kind(factory, isolation)
        self._name = name_of(getattr(factory, "func", factory))
        self._free = asyncio.Semaphore(size)
        self._idle: list[Worker] = []
        self._abandoned: list[Worker] = []
        self.made = 0

    @property
    def abandoned(self) -> int:
        """The number of environments abandoned during a call whose threads have not returned from that call yet."""
        self._abandoned = [worker for worker in self._abandoned if worker.busy]
        return len(self._abandoned)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Episode]:
        """An environment for one episode. Raises DataError when too many environments hang on their threads."""
        async with self._free:
            worker = self._idle.pop() if self._idle else self._make()
            episode = Episode(worker, self._name, self._deadline)
            try:
                yield episode
            finally:
                if episode.sound:
                    self._idle.append(worker)
                else:
                    self._discard(worker)

    async def close(self) -> None:
        """Closes the idle environments, each within the deadline."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(self._close, idle))

    def _make(self) -> Worker:
        if self.abandoned >= self._size:
            raise DataError(
                f"{self.abandoned} environments {self._name} hang on their threads; set "
                f"rollout.environment.isolation=process, where they can be killed, or raise timeouts.environment"
            )
        self.made += 1
        return self._kind(self._factory)

    def _discard(self, worker: Worker) -> None:
        worker.end()
        if worker.busy:
            self._abandoned.append(worker)
            log.warning("Abandoned an environment %s during a call; its thread keeps running", self._name)

    async def _close(self, worker: Worker) -> None:
        try:
            await within(worker.call("close"), self._deadline)
        except Exception as error:  # whatever a user's environment raises; it is no longer needed
            log.warning("An environment %s could not be closed", self._name, exc_info=error)
        self._discard(worker)


class Episode:
    """A leased environment. Its methods raise DataError, naming the environment, for any fault of the environment."""

    def __init__(self, worker: Worker, name: str, deadline: float) -> None:
        self._worker = worker
        self._name = name
        self._deadline = deadline
        # Whether the environment can be leased again: False from the start of a call until it answers.
        self.sound = True

    async def reset(self, sample: dict[str, Any]) -> str:
        return await self._call("reset", sample)

    async def step(self, action: str) -> Step:
        return await self._call("step", action)

    async def _call(self, method: str, *arguments: Any) -> Any:
        self.sound = False
        try:
            answer = await within(self._worker.call(method, *arguments), self._deadline)
        except TimeoutError as error:
            raise self._error(
                f"{method} did not answer within {self._deadline:g} s; raise timeouts.environment, or make it faster"
            ) from error
        except Exception as error:  # whatever a user's environment raises
            raise self._error(f"{method} raised {explain(error)}") from error
        self.sound = True
        return answer

    def _error(self, problem: str) -> DataError:
        return DataError(f"the environment {self._name}: {problem}")
