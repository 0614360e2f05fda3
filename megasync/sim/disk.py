"""The disk of the run directory, which may be full: files of this process then cannot grow."""

from __future__ import annotations

import resource


class Disk:
    """A full disk is a limit on the size of files (RLIMIT_FSIZE): the real writes of the real code fail half-way."""

    def __init__(self) -> None:
        # Since `watch` was called last.
        self.was_full = False
        self._usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def watch(self) -> None:
        self.was_full = False

    def fill(self, room: int) -> None:
        """No file grows beyond so many bytes."""
        self.was_full = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, self._usual[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)
