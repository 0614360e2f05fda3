"""One command on another machine, started through a remote shell and held by its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from megasync.errors import ConfigError
from megasync.launch.leash import BEAT_SECONDS

log = logging.getLogger(__name__)

# A connection on which nothing came back for a minute is given up.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
# A shell whose command has ended ends too; one that does not has lost its connection.
END_SECONDS = 10.0


def shell_command(shell: str, host: str, command: Sequence[str]) -> list[str]:
    """What is executed here so that `command` runs on `host`.

    ssh hands the remote side one string, which a shell there takes apart again; every other program (srun, docker exec,
    nsenter) is given the words.

    Raises ConfigError for a `shell` that is no command.
    """
    try:
        words = shlex.split(shell)
    except ValueError as error:
        raise ConfigError(f"--shell {shell!r} is not a command: {error}") from error
    if not words:
        raise ConfigError(f"--shell {shell!r} is not a command; name one, such as 'ssh -p 2222'")
    if PurePath(words[0]).name == "ssh":
        return [*words, host, shlex.join(command)]
    return [*words, host, *command]


class Remote:
    """`say` gets each line that the command writes. Not reusable."""

    def __init__(self, host: str, command: Sequence[str], say: Callable[[str], None]) -> None:
        self.host = host
        self._command = list(command)
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task | None = None
        self._beats: asyncio.Task | None = None

    async def start(self, environment: Mapping[str, str]) -> None:
        """`environment` goes over the pipe, not over the command line. Raises OSError when the shell does not exist."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2**20,
            # The terminal's Ctrl-C is for the launcher alone.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(), name=f"output of {self.host}")
        await self._write(json.dumps(dict(environment)))
        self._beats = asyncio.create_task(self._beat(), name=f"beats to {self.host}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._write("")

    async def _read(self) -> None:
        async for line in self._process.stdout:
            self._say(line.decode("utf-8", "replace").rstrip("\n"))

    async def _write(self, line: str) -> None:
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(f"{line}\n".encode())
            await self._process.stdin.drain()

    async def send(self, number: signal.Signals) -> None:
        await self._write(number.name)

    async def wait(self) -> int:
        """The command's exit status, with all of its output said."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            # A grandchild may hold the pipe open.
            await asyncio.wait_for(asyncio.shield(self._reader), END_SECONDS)
        return code

    async def end(self, timeout: float) -> None:
        """Lets go of the leash and waits `timeout` seconds for the machine to put away what it started."""
        if self._process is None:
            return
        if self._beats is not None:
            self._beats.cancel()
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self.wait(), timeout)
        except TimeoutError:
            log.warning(
                "%s did not end within %.0f s; its side ends when it sees the connection gone", self.host, timeout
            )
            self._process.kill()
            await self._process.wait()
        finally:
            self._reader.cancel()
