"""A managed process that answers HTTP: start and wait until it serves, with a deadline; stop; or say why it died.

Subclasses give the command, the environment and what "serves" means. Shared by SGLang servers and the router. The
object is plain and picklable until `start`, so that it can be an actor of its own.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from megasync.config.host import resolve_host
from megasync.errors import ServerError
from megasync.serving.ports import free_port, port_is_free
from megasync.serving.process import ManagedProcess

log = logging.getLogger(__name__)

_POLL = 0.1
# Polls between two looks into the log for a port that was lost: some servers live on without it, and never serve.
_POLLS_PER_LOOK = 10
# Starts on a free port that somebody else took in the meantime are tried again this often.
_PORT_ATTEMPTS = 3
_PORT_TAKEN = ("address already in use", "port is already in use", "errno 98")


class Service:
    """`port` 0 takes a free one at each start; `url` is known once started."""

    name = "service"
    scheme = "http"

    def __init__(self, host: str, port: int, log_path: str | Path) -> None:
        self.host = host
        self.port = port
        self.log_path = Path(log_path)
        self._fixed_port = port != 0
        self._process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def prepare(self) -> None:
        """Called before each attempt to start, when the port is known."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        raise NotImplementedError

    def secrets(self) -> bytes | None:
        """What the command reads from its standard input."""
        return None

    def scratch(self) -> list[str]:
        """Glob patterns of what is removed when the process has ended, in whatever way."""
        return []

    async def serving(self) -> bool:
        """True once the process serves; ServerError when it answers something that will not change."""
        raise NotImplementedError

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def tail(self, lines: int = 30) -> str:
        """The last lines of the log since the start."""
        return self._process.tail(lines) if self._process else ""

    async def start(self, timeout: float) -> str:
        """Starts and waits; returns the URL.

        Raises ServerError when the process dies, with its last log lines, or does not serve within `timeout` seconds;
        nothing is left running then, nor when the wait is cancelled.
        """
        if self.alive():
            raise ServerError(f"{self.name} is running already at {self.url}")
        # Here and not in the constructor: "auto" means the node that this process was placed on.
        self.host = resolve_host(self.host)
        deadline = asyncio.get_running_loop().time() + timeout
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            if not self._fixed_port:
                self.port = free_port(self.host)
            elif not port_is_free(self.host, self.port):
                raise ServerError(
                    f"{self.name} cannot listen on {self.host}:{self.port}: the port is in use; stop what listens "
                    f"there, or give another port (0 takes a free one)"
                )
            try:
                await self._start_once(deadline, timeout)
                log.info("%s serves at %s", self.name, self.url)
                return self.url
            except ServerError:
                if self._fixed_port or attempt == _PORT_ATTEMPTS or not self._port_was_taken():
                    raise
                log.warning("%s lost port %d to another process; trying the next", self.name, self.port)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def stop(self, timeout: float = 10.0) -> None:
        """Ends the process and everything it started. Safe to call at any time and again."""
        if self._process is not None:
            await self._process.stop(timeout)

    def kill(self) -> None:
        """Kills without waiting; for exit paths that have no event loop."""
        if self._process is not None:
            self._process.kill()

    async def _start_once(self, deadline: float, timeout: float) -> None:
        self.prepare()
        self._process = ManagedProcess(
            self.command(), self.environment(), self.log_path, self.scratch(), self.secrets()
        )
        self._process.start()
        try:
            polls = 0
            while not await self.serving():
                polls += 1
                if polls % _POLLS_PER_LOOK == 0 and self._port_was_taken():
                    raise ServerError(
                        f"{self.name} could not listen at {self.url}, a port that another process took. Last lines of "
                        f"{self.log_path}:\n{self.tail()}"
                    )
                if not self._process.alive():
                    raise ServerError(
                        f"{self.name} ended with status {self._process.returncode} while starting at {self.url}. "
                        f"Last lines of {self.log_path}:\n{self.tail()}"
                    )
                if asyncio.get_running_loop().time() >= deadline:
                    raise ServerError(
                        f"{self.name} did not serve at {self.url} within {timeout:g} s (timeouts.server_start). "
                        f"Last lines of {self.log_path}:\n{self.tail()}"
                    )
                await asyncio.sleep(_POLL)
        except BaseException:
            await self.stop(timeout=1.0)
            raise

    def _port_was_taken(self) -> bool:
        """Whether the log says so of this port; of another one it may be a matter that the process sees to itself."""
        if self._process.alive():
            lines = [line for line in self.tail(200).lower().splitlines() if str(self.port) in line]
        else:
            lines = [self.tail(200).lower()]
        return any(words in line for line in lines for words in _PORT_TAKEN)
