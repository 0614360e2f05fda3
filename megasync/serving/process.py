"""Child processes that cannot outlive their owner, and services: such processes that answer HTTP on a port.

A command runs under `supervisor.py` in a session of its own, so a terminal's Ctrl-C does not reach it: only `stop` or
the owner's death ends it. Waiting is asynchronous; nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megasync.config.host import resolve_host
from megasync.errors import ServerError, raised_as
from megasync.serving.process_watch import ProcessId, process_id

log = logging.getLogger(__name__)

# Seconds between two polls of a process that is expected to end; also the resolution of `wait`.
_EXIT_POLL = 0.02
# Seconds that a killed process group may take to leave the process table.
_KILL_GRACE = 10.0
_TAIL_BYTES = 64 * 1024

# Seconds between two polls of a service that starts.
_READY_POLL = 0.1
# Polls between two searches of the log for a lost port: some servers keep running without it and never become ready.
_POLLS_PER_LOG_CHECK = 10
# Attempts to start on a free port, in case another process binds it first.
_PORT_ATTEMPTS = 3
_PORT_TAKEN = ("address already in use", "port is already in use", "errno 98")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. Another process may bind it first, so callers must be ready to retry."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_is_free(host: str, port: int) -> bool:
    """Whether a server can listen on this port now."""
    with socket.socket(_family(host)) as probe:
        # As servers do: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class ManagedProcess:
    """One command with its log file. Not reusable: create another one to start again."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: str | Path,
        scratch: Sequence[str] = (),
        stdin: bytes | None = None,
    ) -> None:
        """Stores the settings; `start` runs the command.

        Args:
            env: the whole environment.
            log_path: receives standard output and error, appended.
            scratch: glob patterns of files and folders to remove once the command has ended, however it ended.
            stdin: what the command reads, at most a pipe's buffer (64 KiB). Use it for secrets, because other users of
                the machine can see command lines.
        """
        self.command = list(command)
        self.log_path = Path(log_path)
        self._env = dict(env)
        self._scratch = os.pathsep.join(scratch)
        self._stdin = stdin
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """Starts the command. Raises ServerError when the log cannot be written or no process can be created."""
        if self._process is not None:
            raise RuntimeError(f"{self.command[0]} was started before")
        supervisor = Path(__file__).with_name("supervisor.py")
        with raised_as(ServerError, f"cannot start {self.command[0]} with its log at {self.log_path}"):
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log_path, "ab") as out:
                self._log_start = out.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", str(supervisor), str(os.getpid()), self._scratch, *self.command],
                    env=self._env,
                    # The command inherits the supervisor's standard input.
                    stdin=subprocess.DEVNULL if self._stdin is None else subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        if self._stdin is not None and self._process.stdin is not None:
            # A broken pipe means that the process has died already; `returncode` reports that.
            with suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(self._stdin)

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; the command is its child."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """The command's exit status, 128 + n when signal n ended it; None before the end."""
        return self._process.poll() if self._process else None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 30) -> str:
        """The last lines that this process wrote to its log."""
        try:
            with open(self.log_path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return f"(log {self.log_path} cannot be read: {error})"
        return "\n".join(text.splitlines()[-lines:])

    async def wait(self, timeout: float | None = None) -> int | None:
        """The exit status, or None when `timeout` seconds pass first."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while self.alive():
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return None
            await asyncio.sleep(_EXIT_POLL)
        return self.returncode

    async def stop(self, timeout: float = 10.0) -> None:
        """Asks the command to end, and kills its process group after `timeout` seconds. Safe to call again.

        Raises ServerError when a killed process does not exit.
        """
        if self._process is None or not self.alive():
            return
        self._process.terminate()
        try:
            if await self.wait(timeout) is not None:
                return
            log.warning("%s did not end within %.1f s; killing it", self.command[0], timeout)
        finally:
            # Also when the caller is cancelled while it waits: nothing may be left behind.
            self.kill()
        if await self.wait(_KILL_GRACE) is None:
            raise ServerError(f"process group of {self.command[0]} (supervisor {self.pid}) survived SIGKILL")

    def kill(self) -> None:
        """Kills the process group without waiting; for exit paths that have no event loop."""
        if self._process is not None and self.alive():
            # A stopped supervisor would not receive the next signal.
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGUSR1)


class Service:
    """A managed process that answers HTTP: starts it, waits until it is ready, stops it, and reports why it died.

    Subclasses give the command, the environment and the readiness check. A service is picklable until `start`, so that
    it can become an actor. `port` 0 takes a free port at each start; `url` is known once started.
    """

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
        """The secrets that the command reads from its standard input."""
        return None

    def scratch(self) -> list[str]:
        """Glob patterns of what to remove once the process has ended, however it ended."""
        return []

    async def ready(self) -> bool:
        """Whether the process answers requests. Raises ServerError for a failure that waiting does not cure."""
        raise NotImplementedError

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def process_id(self) -> ProcessId:
        """The supervisor's identity: it ends with the service. Raises ServerError while the service does not run."""
        if self._process is None or self._process.pid is None:
            raise ServerError(f"{self.name} does not run")
        with raised_as(ServerError, f"{self.name} has ended"):
            return process_id(self._process.pid)

    def tail(self, lines: int = 30) -> str:
        """The last lines of the log since the start."""
        return self._process.tail(lines) if self._process else ""

    async def start(self, timeout: float) -> str:
        """Starts the process and waits until it is ready; returns the URL.

        Raises ServerError, with the last log lines, when the process dies or is not ready within `timeout` seconds.
        Nothing is left running then, nor when the wait is cancelled.
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
            process = self._launch()
            try:
                await self._wait_until_ready(process, deadline, timeout)
                log.info("%s is ready at %s", self.name, self.url)
                return self.url
            except ServerError:
                if self._fixed_port or attempt == _PORT_ATTEMPTS or not self._port_was_taken(process):
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

    def _launch(self) -> ManagedProcess:
        self.prepare()
        self._process = ManagedProcess(
            self.command(), self.environment(), self.log_path, self.scratch(), self.secrets()
        )
        self._process.start()
        return self._process

    async def _wait_until_ready(self, process: ManagedProcess, deadline: float, timeout: float) -> None:
        try:
            polls = 0
            while not await self.ready():
                polls += 1
                if polls % _POLLS_PER_LOG_CHECK == 0 and self._port_was_taken(process):
                    problem = f"could not listen at {self.url}: another process took the port"
                elif not process.alive():
                    problem = f"ended with status {process.returncode} while starting at {self.url}"
                elif asyncio.get_running_loop().time() >= deadline:
                    problem = f"was not ready at {self.url} within {timeout:g} s (timeouts.server_start)"
                else:
                    await asyncio.sleep(_READY_POLL)
                    continue
                raise ServerError(f"{self.name} {problem}. Last lines of {self.log_path}:\n{self.tail()}")
        except BaseException:
            await self.stop(timeout=1.0)
            raise

    def _port_was_taken(self, process: ManagedProcess) -> bool:
        """Whether the log says that the port is taken. A live process may handle the loss of another port itself."""
        lines = process.tail(200).lower().splitlines()
        if process.alive():
            lines = [line for line in lines if str(self.port) in line]
        return any(words in line for line in lines for words in _PORT_TAKEN)
