"""The console of commands and runs, which outlives its reader."""

from __future__ import annotations

import os
from contextlib import suppress

from rich.console import Console


class Terminal(Console):
    """A console that goes quiet once nobody reads it, as after `| head`; Rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Lets what is printed from now on, also by others, go nowhere."""
        self.quiet = True
        # A file of Python's own, such as a notebook's, has no descriptor.
        with suppress(OSError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)
