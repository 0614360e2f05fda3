"""`megasync watch` in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from waits import PATIENCE

ADDRESS = re.compile(r"http://\S+")


class Watch:
    """A `megasync watch` process and the address that it has printed."""

    def __init__(self, target: Path, *options: str) -> None:
        command = [
            sys.executable,
            "-c",
            "from megasync.cli.commands import main; main()",
            "watch",
            str(target),
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        for line in self.process.stdout or ():
            lines.append(line)
            if found := ADDRESS.search(line):
                self.url = found[0]
                return
        raise AssertionError(f"megasync watch printed no address: {''.join(lines)}")

    @property
    def root(self) -> str:
        """The address without the token."""
        return self.url.partition("?")[0]

    @property
    def token(self) -> str:
        return self.url.partition("token=")[2]

    def of(self, view: str, *runs: str) -> str:
        """The address of a view of runs, with the token."""
        return f"{self.root}{view}?{''.join(f'run={run}&' for run in runs)}token={self.token}"

    def end(self) -> str:
        """Interrupts it, and returns what it printed after its address."""
        self.process.terminate()
        rest, _ = self.process.communicate(timeout=PATIENCE)
        return rest
