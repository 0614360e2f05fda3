"""The lines of a file that another process appends to, each read once.

A line counts when its newline is there, so a line that is being written, or was torn by a crash, is left for later. A
file that was replaced or cut (a resumed run rewrites its metrics) is read again from its beginning: a replaced one has
another inode, and one rewritten in place differs in what stood before the place where reading stopped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Bytes before the place where reading stopped that must still be the same.
REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Appended:
    """New whole lines without their newlines. `restarted` means that everything before them is void."""

    lines: list[bytes]
    restarted: bool = False


class GrowingFile:
    """Reads what was appended to `path` since the last call. The file may not exist yet, or vanish."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._inode: int | None = None
        self._offset = 0
        self._before = b""

    def read(self) -> Appended:
        """Raises OSError for a file that exists and cannot be read."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            void, self._inode, self._offset, self._before = self._offset > 0, None, 0, b""
            return Appended([], void)
        with file:
            inode = os.fstat(file.fileno()).st_ino
            restarted = self._offset > 0 and (inode != self._inode or not self._unchanged(file.fileno()))
            if restarted:
                self._offset, self._before = 0, b""
            self._inode = inode
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole)[-REMEMBERED:]
        return Appended(whole.split(b"\n")[:-1], restarted)

    def torn(self) -> bool:
        """Whether bytes without a newline follow the last line that was read."""
        try:
            return self.path.stat().st_size > self._offset
        except OSError:
            return False

    def _unchanged(self, file: int) -> bool:
        return os.pread(file, len(self._before), self._offset - len(self._before)) == self._before
