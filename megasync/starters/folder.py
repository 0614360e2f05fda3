"""Writes the folder of a new run, all of it or nothing.

Everything is written in a hidden draft inside the folder, and renamed out of it at the end: a failure or an interrupt
before that leaves the folder as it was. The folder itself may be the working directory, so it is never replaced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megasync.errors import ConfigError
from megasync.starters.fetch import fetch
from megasync.starters.model import Model


def check_folder(folder: Path) -> None:
    """Raises ConfigError for a folder that a new run cannot be written into."""
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        raise ConfigError(f"{folder} cannot be a folder: {place} is a file; name another folder for the new run")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} cannot be written: you may not write in {place}; name another folder")
    if folder.is_dir() and (present := sorted(entry.name for entry in folder.iterdir())):
        shown = ", ".join(present[:3]) + (", ..." if len(present) > 3 else "")
        raise ConfigError(f"{folder} is not empty: it holds {shown}; name a new folder, or empty this one")


def write_run(folder: Path, files: Mapping[str, bytes], model: Model | None = None) -> None:
    """Writes files by their paths into a new or empty folder, and a small model beside them. Raises ConfigError."""
    check_folder(folder)
    made = not folder.exists()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".init-", dir=folder))
        written.append(draft)
        for name, content in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(content)
        if model is not None and model.small:
            fetch(model.named, draft / model.path)
        for entry in sorted(draft.iterdir()):
            written.append(folder / entry.name)
            entry.rename(written[-1])
        draft.rmdir()
    except BaseException as error:
        for path in written:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if made:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; name another folder") from error
        raise
