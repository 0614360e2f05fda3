"""Keeps what Ray's processes on a machine wrote, beside the job's other logs: Ray leaves it in the machine's /tmp."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import psutil

from megasync.launch.family import children_of

# Of each file its end, where it is longer.
MOST_BYTES = 4 * 2**20
_OPTIONS = ("--log_dir=", "--log-dir=")


def log_folder(pid: int) -> Path | None:
    """The folder that Ray's processes below this one were told to log to; None while there are none."""
    for child in children_of(pid):
        try:
            words = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        for word in words:
            if word.startswith(_OPTIONS):
                return Path(word.partition("=")[2])
    return None


def keep(folder: Path, beside: Path) -> Path | None:
    """Copies the files of ``folder`` that say something to ``<beside without suffix>-1``, or the next number that is free.

    Returns where they are; None when Ray has written nothing. Raises OSError when they cannot be written.
    """
    files = [path for path in sorted(folder.glob("*")) if path.is_file() and path.stat().st_size]
    if not files:
        return None
    for number in count(1):
        target = beside.with_name(f"{beside.stem}-{number}")
        try:
            target.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    for path in files:
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - MOST_BYTES))
            (target / path.name).write_bytes(source.read())
    return target
