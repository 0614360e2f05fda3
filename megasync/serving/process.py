"""A child process that cannot outlive its owner.

The command runs under `supervisor.py`, in a session of its own, so a terminal's Ctrl-C does not reach it: only `stop`
ends it, or the owner's death. Waiting is asynchronous; nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megasync.errors import ServerError

log = logging.getLogger(__name__)

# Seconds between two looks at a process that is expected to end; also the resolution of `wait`.
_POLL = 0.02
# Seconds that a killed process group may take to leave the process table.
_KILL_GRACE = 10.0
_TAIL_BYTES = 64 * 1024


class ManagedProcess:
    """One command with its log file. Not reusable: make another to start again."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: str | Path,
        scratch: Sequence[str] = (),
        stdin: bytes | None = None,
    ) -> None:
        """`env` is the whole environment. The log gets standard output and error, appended.

        `stdin` is what the command reads from its standard input, through a pipe: the place for secrets, as other users
        of the machine see command lines. It must fit into a pipe's buffer (64 KiB).

        `scratch` are glob patterns of files and folders that are removed when the command has ended, in whatever way.
        """
        self.command = list(command)
        self.log_path = Path(log_path)
        self._env = dict(env)
        self._scratch = os.pathsep.join(scratch)
        self._stdin = stdin
        self._process: subprocess.Popen | None = None
        self._log_start = 0

    def start(self) -> None:
        """Raises ServerError when the log cannot be written or no process can be made."""
        if self._process is not None:
            raise RuntimeError(f"{self.command[0]} was started before")
        supervisor = Path(__file__).with_name("supervisor.py")
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log_path, "ab") as out:
                self._log_start = out.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", str(supervisor), str(os.getpid()), self._scratch, *self.command],
                    env=self._env,
                    # The supervisor leaves its own to the command.
                    stdin=subprocess.DEVNULL if self._stdin is None else subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ServerError(f"cannot start {self.command[0]} with its log at {self.log_path}: {error}") from error
        if self._stdin is not None:
            # Not a broken pipe: of a process that has died already, `returncode` tells.
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
        """The last lines of what this process wrote to its log."""
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
            await asyncio.sleep(_POLL)
        return self.returncode

    async def stop(self, timeout: float = 10.0) -> None:
        """Asks the process group to end and kills what is left after `timeout` seconds. Safe to call again.

        Raises ServerError when even killed processes stay.
        """
        if not self.alive():
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
        """Kills the group at once, without waiting; for exit paths that have no event loop."""
        if self.alive():
            # A supervisor that somebody has stopped would not hear it.
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGUSR1)
