"""The steps of an installation: commands whose output goes to a log, with a line of progress for each step."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megasync.errors import MegasyncError

LOG = "install.log"
# What is printed of a failed step if its cause is not known.
LAST_LINES = 12
# Causes by what pip or a compiler prints; the first that is found is named. {tmp} is the folder of temporary files.
CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full; free some space in {env} and in {tmp} (TMPDIR names another folder for what is temporary)",
    ),
    (
        r"(?:Read-only file system|Permission denied):? *([^\n]*)",
        "a folder cannot be written: {match}; see the log",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|Failed to establish a new connection|"
        r"Connection refused|Network is unreachable|ProxyError|Read timed out|ConnectTimeout",
        "the package index does not answer; check the network, the proxy (HTTPS_PROXY) and pip's PIP_INDEX_URL",
    ),
    (
        r"No matching distribution found for ([^\s;]+)",
        "the package index has no {match} for this Python and machine; check pip's PIP_INDEX_URL",
    ),
    (r"HASHES DO NOT MATCH|THESE PACKAGES DO NOT MATCH THE HASHES", "a package is not the one that the lock names"),
    (
        r"Python\.h: No such file|command '[^']*(?:gcc|g\+\+|cc|c\+\+)' failed",
        "a package could not be compiled; install your system's packages build-essential and python3-dev",
    ),
)


class Steps:
    """Runs the commands of an installation one after the other."""

    def __init__(self, env: Path) -> None:
        self.log = env / LOG
        # Whether any step was run.
        self.ran = False
        self._env = env
        self._live = sys.stdout is not None and sys.stdout.isatty()
        # The locked log, which commands inherit.
        self._held: tuple[int, ...] = ()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for another installation into the environment, or a killed one's pip, then keeps others out.

        Where the log cannot be written or locked, nobody is kept out: a step that has something to do fails there.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                log = stack.enter_context(self.log.open("a"))
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.say(f"another installation into {self._env} is under way; waiting for its end")
                    fcntl.flock(log, fcntl.LOCK_EX)
                self._held = (log.fileno(),)
            yield
            self._held = ()

    def say(self, text: str, end: str = "\n") -> None:
        """Prints at once, also into a pipe."""
        print(text, end=end, flush=True)

    def run(
        self,
        title: str,
        commands: Sequence[Sequence[str]],
        *,
        count: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Runs the commands of one step; with a ``count``, a terminal shows how many packages pip has come to.

        Raises MegasyncError with the cause, the log and what to do if a command fails.
        """
        self.ran = True
        self.say(f"{title} ... ", end="")
        begin, seen = time.monotonic(), 0
        for command in commands:
            lines: list[str] = []
            with (
                self.log.open("a", buffering=1, encoding="utf-8") as log,
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env={**os.environ, **(environment or {})},
                    pass_fds=self._held,
                ) as process,
            ):
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        log.write(line)
                        lines.append(line)
                        seen += line.startswith("Collecting ")
                        if count and self._live:
                            self.say(f"\r{title} ... {min(seen, count)} of {count} ", end="")
                except BaseException:
                    process.terminate()
                    raise
            if process.returncode:
                self.say("failed")
                raise MegasyncError(self._failure(title, "".join(lines)))
        self.say(
            f"\r{title} ... {time.monotonic() - begin:.0f} s"
            if count and self._live
            else f"{time.monotonic() - begin:.0f} s"
        )

    def _failure(self, title: str, output: str) -> str:
        again = f"The log is {self.log}. The same command goes on where it stopped"
        for pattern, cause in CAUSES:
            if found := re.search(pattern, output):
                named = cause.format(env=self._env, tmp=tempfile.gettempdir(), match=found[1] if found.groups() else "")
                return f"{title}: {named}. {again}"
        return f"{title} failed:\n{''.join(output.splitlines(keepends=True)[-LAST_LINES:])}{again}"
