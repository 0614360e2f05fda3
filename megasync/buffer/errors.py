"""The two ways in which the buffer says no for good."""

from __future__ import annotations

from megasync.errors import MegasyncError


class BufferClosed(MegasyncError):
    """The buffer was closed; ``reason`` says why. Ends every wait."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BufferStateError(MegasyncError):
    """A call that the group's or the batch's state does not allow: names the uid or step and the state."""
