"""One command on another host, started through a remote shell and controlled through its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megasync.errors import ConfigError
from megasync.launch.control_pipe import HEARTBEAT_SECONDS

log = logging.getLogger(__name__)

# ssh closes a connection after a minute without an answer.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
# A grandchild of the command may hold the output pipe open for longer; its output is then dropped.
DRAIN_SECONDS = 10.0


def shell_command(shell: str, host: str, command: Sequence[str]) -> list[str]:
    """The local command that runs `command` on `host`.

    ssh passes one string that a remote shell splits again, so the command is quoted for it. Every other program (srun,
    docker exec, nsenter) receives the words themselves.

    Raises ConfigError if `shell` is not a valid command.
    """
    try:
        words = shlex.split(shell)
    except ValueError as error:
        raise ConfigError(f"--shell {shell!r} is not a command: {error}") from error
    if not words:
        raise ConfigError(f"--shell {shell!r} is not a command; use one such as 'ssh -p 2222'")
    if PurePath(words[0]).name == "ssh":
        return [*words, host, shlex.join(command)]
    return [*words, host, *command]


class Remote:
    """A running command; `on_line` receives each line of its output. Not reusable."""

    def __init__(self, host: str, command: Sequence[str], on_line: Callable[[str], None]) -> None:
        self.host = host
        self._command = list(command)
        self._on_line = on_line
        self._running: _Running | None = None

    async def start(self, environment: Mapping[str, str]) -> None:
        """Starts the command. `environment` goes through the pipe, not on the command line.

        Raises OSError if the remote shell does not exist.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2**20,
            # Ctrl-C in the terminal must reach the launcher only.
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        reader = asyncio.create_task(self._read(process.stdout), name=f"output of {self.host}")
        heartbeats = asyncio.create_task(_send_heartbeats(process.stdin), name=f"heartbeats to {self.host}")
        self._running = _Running(process, process.stdin, reader, heartbeats)
        await _write(process.stdin, json.dumps(dict(environment)))

    async def _read(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            self._on_line(line.decode("utf-8", "replace").rstrip("\n"))

    async def send(self, number: signal.Signals) -> None:
        """Sends a signal to the command; does nothing before `start`."""
        if self._running is not None:
            await _write(self._running.pipe, number.name)

    async def wait(self) -> int:
        """The exit status, once all output was delivered. Call it after `start`."""
        assert self._running is not None
        code = await self._running.process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._running.reader), DRAIN_SECONDS)
        return code

    async def end(self, timeout: float) -> None:
        """Closes the pipe and waits up to `timeout` seconds for the host to shut down what it started."""
        if self._running is None:
            return
        self._running.heartbeats.cancel()
        self._running.pipe.close()
        try:
            await asyncio.wait_for(self.wait(), timeout)
        except TimeoutError:
            log.warning(
                "%s did not shut down within %.0f s; it will once it notices the lost connection", self.host, timeout
            )
            self._running.process.kill()
            await self._running.process.wait()
        finally:
            self._running.reader.cancel()


@dataclass(frozen=True, slots=True)
class _Running:
    """The local shell process and the tasks that serve its pipes."""

    process: asyncio.subprocess.Process
    pipe: asyncio.StreamWriter
    reader: asyncio.Task[None]
    heartbeats: asyncio.Task[None]


async def _send_heartbeats(pipe: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        await _write(pipe, "")


async def _write(pipe: asyncio.StreamWriter, line: str) -> None:
    with contextlib.suppress(ConnectionError):
        pipe.write(f"{line}\n".encode())
        await pipe.drain()
