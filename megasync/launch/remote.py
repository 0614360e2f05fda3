"""One command on another host, started through a remote shell and controlled through its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Self

from megasync.concurrency.tasks import within
from megasync.errors import ConfigError, raised_as
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
    with raised_as(ConfigError, f"--shell {shell!r} is not a command", of=ValueError):
        words = shlex.split(shell)
    if not words:
        raise ConfigError(f"--shell {shell!r} is not a command; use one such as 'ssh -p 2222'")
    if PurePath(words[0]).name == "ssh":
        return [*words, host, shlex.join(command)]
    return [*words, host, *command]


class Remote:
    """A running command; `start` creates it."""

    def __init__(self, host: str, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.host = host
        self._process = process
        self._pipe = process.stdin
        self._reader = asyncio.create_task(_read(process.stdout, on_line), name=f"output of {host}")
        self._heartbeats = asyncio.create_task(_send_heartbeats(process.stdin), name=f"heartbeats to {host}")

    @classmethod
    async def start(
        cls, host: str, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None]
    ) -> Self:
        """Starts the command. `environment` goes through the pipe, not on the command line.

        `on_line` receives each line of the output. Raises OSError if the remote shell does not exist.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2**20,
            # Ctrl-C in the terminal must reach the launcher only.
            start_new_session=True,
        )
        remote = cls(host, process, on_line)
        await _write(remote._pipe, json.dumps(dict(environment)))
        return remote

    async def send(self, number: signal.Signals) -> None:
        """Sends a signal to the command."""
        await _write(self._pipe, number.name)

    async def wait(self) -> int:
        """The exit status, once all output was delivered."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await within(asyncio.shield(self._reader), DRAIN_SECONDS)
        return code

    async def end(self, timeout: float) -> None:
        """Closes the pipe and waits up to `timeout` seconds for the host to shut down what it started."""
        self._heartbeats.cancel()
        self._pipe.close()
        try:
            await within(self.wait(), timeout)
        except TimeoutError:
            log.warning(
                "%s did not shut down within %.0f s; it will once it notices the lost connection", self.host, timeout
            )
            self._process.kill()
            await self._process.wait()
        finally:
            self._reader.cancel()


async def _read(output: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    async for line in output:
        on_line(line.decode("utf-8", "replace").rstrip("\n"))


async def _send_heartbeats(pipe: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        await _write(pipe, "")


async def _write(pipe: asyncio.StreamWriter, line: str) -> None:
    with contextlib.suppress(ConnectionError):
        pipe.write(f"{line}\n".encode())
        await pipe.drain()
