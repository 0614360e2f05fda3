"""The pipe by which a launcher holds what it started on another machine; see `megasync.launch`."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from typing import TextIO


class Leash:
    """Reads the pipe from now on. `ended` is set at its end, or when this process is told to end.

    The first line is read at once: JSON with the part of the environment that must not be seen in a list of processes.
    Each further line names a signal and goes to `on_signal`.
    """

    def __init__(self, pipe: TextIO = sys.stdin) -> None:
        self._pipe = pipe
        self.environment: dict[str, str] = json.loads(pipe.readline())
        self.ended = threading.Event()
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None

    def hold(self) -> None:
        """From the main thread, once `on_signal` is set."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.ended.set())
        threading.Thread(target=self._follow, name="leash", daemon=True).start()

    def _follow(self) -> None:
        for line in self._pipe:
            if number := signal.Signals.__members__.get(line.strip()):
                self.on_signal(number)
        self.ended.set()
