"""The simulated disk of the run directory. While it is full, no file of this process can grow."""

from __future__ import annotations

import resource


class Disk:
    """Simulates a full disk with a limit on file sizes (RLIMIT_FSIZE), so that real writes fail half-way."""

    def __init__(self) -> None:
        # Whether the disk was full at any time since the last call of `watch`.
        self.was_full = False
        self._usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def watch(self) -> None:
        self.was_full = False

    def fill(self, room: int) -> None:
        """Limit every file of this process to `room` bytes."""
        self.was_full = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, self._usual[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)
