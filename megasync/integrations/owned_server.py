"""A server of environments that the episodes of this process share. It ends with this process, however that ends.

    start, before the first episode    `ready`, which raises ConfigError if the server never answers
    an episode                         `ready`, which restarts a server that died; then requests to `url`
    a server that died                 its episodes fail with ServerError, and are repeated
    the last episode                   `close`

Invariant: at most one process runs. All that need it wait for the same start, and none of them can cancel it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from megasync.concurrency.tasks import cancel_and_wait
from megasync.config.access import foreign_environment
from megasync.errors import ConfigError, ServerError
from megasync.observe.logfile import log_folder
from megasync.serving.process import Service


class EnvironmentService(Service):
    """A command with `{host}` and `{port}` in its words; `answers(url)` says whether the server is ready.

    `env` has variables beside this process's, `given` is what the command reads.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        answers: Callable[[str], Awaitable[bool]],
        scheme: str = "http",
        given: bytes | None = None,
    ) -> None:
        super().__init__("127.0.0.1", 0, f"environment-{Path(name).name}-{os.getpid()}.log")
        self.name = f"the server of the environment {name}"
        self.scheme = scheme
        self._command = command
        self._env = env
        self._answers = answers
        self._given = given

    def prepare(self) -> None:
        # Only now has this process a log file.
        self.log_path = log_folder() / self.log_path.name

    def command(self) -> list[str]:
        return [word.replace("{host}", self.host).replace("{port}", str(self.port)) for word in self._command]

    def environment(self) -> dict[str, str]:
        return foreign_environment() | dict(self._env)

    def secrets(self) -> bytes | None:
        return self._given

    async def ready(self) -> bool:
        return await self._answers(self.url)


class OwnedServer:
    """Keeps a service running. `seconds` is the deadline of a start."""

    def __init__(self, service: Service, seconds: float) -> None:
        self._service = service
        self._seconds = seconds
        self._start: asyncio.Task[str] | None = None
        self._worked = False

    @property
    def url(self) -> str:
        return self._service.url

    def alive(self) -> bool:
        return self._service.alive()

    async def ready(self) -> None:
        """Starts the server if it does not run.

        Raises ServerError if it does not start, and ConfigError if it never has.
        """
        if self._start is None or (self._start.done() and not self.alive()):
            self._start = asyncio.create_task(self._service.start(self._seconds))
            # A start that nobody waits for any more may fail.
            self._start.add_done_callback(lambda start: start.cancelled() or start.exception())
        try:
            await asyncio.shield(self._start)
        except ServerError as error:
            if self._worked:
                raise
            raise ConfigError(f"{error}\nThe server has never answered; check rollout.environment.options") from error
        self._worked = True

    def kill(self) -> None:
        """Kills a server that hangs. The next episode starts another one."""
        self._service.kill()

    async def close(self) -> None:
        if self._start is not None:
            await cancel_and_wait(self._start)
        await self._service.stop()
