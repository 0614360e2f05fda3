"""Files that survive a crash: each is there whole, old or new, whatever ends the process or the machine.

    write NAME's new content beside it ─▶ fsync ─▶ rename over NAME ─▶ fsync of the folder

A failure or a kill before the rename leaves the old file as it was; `atomic_write` removes what it wrote beside it, and a
kill leaves at most one hidden file, `.NAME.<random>.part`, that nothing reads. No module here imports torch or Ray.
"""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import suppress
from pathlib import Path

PART = ".part"


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Replaces a file by this content (text as UTF-8), durably. A symbolic link stays, and its target is replaced.

    Raises OSError, with the earlier file untouched.
    """
    path = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PART}")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    to_disk(path.parent)


def rename_to_disk(draft: Path, path: Path) -> None:
    """Gives a file or folder its final name, durably. What it holds must be on disk already: see `to_disk`."""
    os.replace(draft, path)
    to_disk(path.parent)


def to_disk(path: str | Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder; their servers keep names durably.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(handle)


def tree_to_disk(folder: Path) -> None:
    """`to_disk` of a folder with all files and folders in it."""
    for found in (*folder.rglob("*"), folder):
        to_disk(found)
