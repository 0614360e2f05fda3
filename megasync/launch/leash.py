"""The pipe by which a launcher holds what it started on another machine; see `megasync.launch`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

# The launcher says something, if only an empty line, so often.
BEAT_SECONDS = 10.0
# Seconds without a word after which the launcher is gone: a network that was cut ends no pipe. Long enough for a launcher
# that was stopped for a moment, by Ctrl-Z or a lid.
SILENCE_SECONDS = 300.0


class Leash:
    """Reads the pipe from now on. `ended` is set at its end, after `silence` seconds without a line, or when this process
    is told to end.

    The first line is read at once: JSON with the part of the environment that must not be seen in a list of processes.
    Each further line that names a signal goes to `on_signal`.
    """

    def __init__(self, pipe: TextIO = sys.stdin, silence: float = SILENCE_SECONDS) -> None:
        self._pipe = pipe
        self._silence = silence
        self.environment: dict[str, str] = json.loads(pipe.readline())
        self._heard = time.monotonic()
        self.ended = threading.Event()
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None

    def hold(self) -> None:
        """From the main thread, once `on_signal` is set."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.ended.set())
        self._heard = time.monotonic()
        for task in (self._follow, self._listen):
            threading.Thread(target=task, name=f"leash: {task.__name__}", daemon=True).start()

    def _listen(self) -> None:
        while (left := self._heard + self._silence - time.monotonic()) > 0:
            if self.ended.wait(left):
                return
        self.ended.set()
        with contextlib.suppress(OSError):
            # Nobody may be there to read it.
            print(f"nothing heard from the launcher for {self._silence:g} s: ending", flush=True)

    def _follow(self) -> None:
        for line in self._pipe:
            self._heard = time.monotonic()
            if number := signal.Signals.__members__.get(line.strip()):
                self.on_signal(number)
        self.ended.set()
