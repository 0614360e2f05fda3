"""The lines of a file that another process appends to, each read once.

A line counts when its newline is there, so a line that is being written, or was torn by a crash, is left for later. A
file that was replaced or cut (a resumed run rewrites its metrics) is read again from its beginning: a replaced one has
another inode, and one rewritten in place differs in what stood before the place where reading stopped.

The file is read as hostile: it is read in pieces, a line of over LONGEST_LINE bytes is left out and counted, and of a
file above MOST_BYTES the rest is left out, so reading it takes bounded time and memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megasync.base.files import open_regular

# Bytes before the place where reading stopped that must still be the same.
REMEMBERED = 256
# Bytes that are read at once, of the longest line, and of the file.
PIECE = 8 * 2**20
LONGEST_LINE = 8 * 2**20
MOST_BYTES = 512 * 2**20


class GrowingFile:
    """Reads what was appended to `path` since the last call. The file may not exist yet, or vanish.

    `left_out` counts lines that are too long, and `full` says whether the file is longer than what is read of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._forget()

    def _forget(self) -> None:
        self.left_out = 0
        self.full = False
        self._inode: int | None = None
        self._offset = 0
        self._before = b""
        # Within a line that is too long.
        self._skipping = False

    def skip_to_last(self, share: int) -> bool:
        """Leaves out all but the last `share` bytes, up to the end of a line; for before the first reading.

        Returns whether there are more. Raises OSError.
        """
        with open_regular(self.path) as file:
            if (size := file.seek(0, os.SEEK_END)) <= share:
                return False
            file.seek(size - share)
            file.readline(PIECE)
            self._inode, self._offset = os.fstat(file.fileno()).st_ino, file.tell()
            return True

    def read(self) -> tuple[bool, Iterator[list[bytes]]]:
        """Whether everything that was read before is void, and the new whole lines without their newlines, in pieces.

        The pieces must be consumed before the next call. Raises OSError for a file that cannot be read.
        """
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            void = self._offset > 0
            self._forget()
            return void, iter(())
        inode = os.fstat(file.fileno()).st_ino
        restarted = self._offset > 0 and (inode != self._inode or not self._unchanged(file.fileno()))
        if restarted:
            self._forget()
        self._inode = inode
        return restarted, self._pieces(file)

    def _pieces(self, file: BinaryIO) -> Iterator[list[bytes]]:
        with file:
            while self._offset < MOST_BYTES:
                file.seek(self._offset)
                data = file.read(PIECE)
                complete = data[: data.rfind(b"\n") + 1]
                if not complete and len(data) < LONGEST_LINE:
                    return
                self._offset += len(complete or data)
                self._before = (self._before + (complete or data))[-REMEMBERED:]
                if not complete:
                    self.left_out += not self._skipping
                    self._skipping = True
                    continue
                lines = complete.split(b"\n")[:-1]
                yield lines[self._skipping :]
                self._skipping = False
            self.full = os.fstat(file.fileno()).st_size > self._offset

    def torn(self) -> bool:
        """Whether bytes without a newline follow the last line that was read."""
        try:
            return not self.full and self.path.stat().st_size > self._offset
        except OSError:
            return False

    def _unchanged(self, file: int) -> bool:
        return os.pread(file, len(self._before), self._offset - len(self._before)) == self._before
