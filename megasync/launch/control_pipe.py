"""The host's end of the pipe from the launcher: secrets, signals and heartbeats in, shutdown when it closes."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

# The launcher writes at least an empty line this often.
HEARTBEAT_SECONDS = 10.0
# Without a line for this long the launcher is considered lost: a network cut does not close a pipe. Long enough for a
# launcher that is suspended for a moment, by Ctrl-Z or a closed laptop lid.
SILENCE_SECONDS = 300.0


class ControlPipe:
    """Reads what the launcher writes. `ended` is set when the pipe closes, after `silence` seconds without a line, or
    when this process receives SIGTERM, SIGINT or SIGHUP.

    The constructor reads the first line: JSON with the environment variables that must not appear in a process list.
    Each further line that names a signal is passed to `on_signal`; every other line is a heartbeat.
    """

    def __init__(self, pipe: TextIO = sys.stdin, silence: float = SILENCE_SECONDS) -> None:
        self._pipe = pipe
        self._silence = silence
        self.environment: dict[str, str] = json.loads(pipe.readline())
        self._last_line = time.monotonic()
        self.ended = threading.Event()
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None

    def watch(self) -> None:
        """Starts to watch the pipe. Call it from the main thread, after setting `on_signal`."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.ended.set())
        self._last_line = time.monotonic()
        for task in (self._read, self._watch_silence):
            threading.Thread(target=task, name=f"control pipe: {task.__name__}", daemon=True).start()

    def _watch_silence(self) -> None:
        while (left := self._last_line + self._silence - time.monotonic()) > 0:
            if self.ended.wait(left):
                return
        self.ended.set()
        with contextlib.suppress(OSError):
            # The reader may be gone.
            print(f"no heartbeat from the launcher for {self._silence:g} s: shutting down", flush=True)

    def _read(self) -> None:
        for line in self._pipe:
            self._last_line = time.monotonic()
            if number := signal.Signals.__members__.get(line.strip()):
                self.on_signal(number)
        self.ended.set()
