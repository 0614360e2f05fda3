"""Copies the files that come with megasync (`base.shipped`) to where a user can read and change them: `megasync files`.

A file is replaced only if the user says so.
"""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterator
from pathlib import Path

from megasync.base.shipped import INSIDE, PACKAGE, ROOT
from megasync.errors import ConfigError, raised_as

# What `megasync files` copies: the folder's name in the copy, its source, and what it is for.
FOLDERS: dict[str, tuple[Path, str]] = {
    "configs": (ROOT / "configs", "configurations: megasync train configs/quickstart.yaml"),
    "launch": (
        ROOT / "launch",
        "scripts for one machine, several and Slurm, the check of a GPU environment, the locks",
    ),
    "examples": (ROOT / "examples", "agents, tools and workflows, and verl with megasync's workers"),
    "patches": (
        PACKAGE.parent / ("megasync_patches" if ROOT == INSIDE else "patches"),
        "changes of upstream packages, to read: runs use the installed ones",
    ),
    "verl_plugin": (PACKAGE / "integrations" / "verl", "the plugin for verl, to read: verl uses the installed one"),
}
# At most so many changed files are named in an error.
NAMED = 8


def copy_out(target: Path, *, overwrite: bool = False) -> tuple[int, int]:
    """Copies `FOLDERS` to a folder; returns the numbers of files written and of files that were there already.

    Raises ConfigError before anything is written if a file there differs from the shipped one, unless ``overwrite``.
    """
    pairs = [(source, target / path) for source, path in _files()]
    different = [path for source, path in pairs if path.exists() and not _same(source, path)]
    if different and not overwrite:
        named = ", ".join(map(str, different[:NAMED])) + (", ..." if len(different) > NAMED else "")
        raise ConfigError(
            f"{len(different)} file(s) in {target} differ from those of this version: {named}. Nothing was written; "
            "choose another folder, or replace them with --overwrite"
        )
    written = 0
    with raised_as(ConfigError, f"cannot copy files to {target}", "choose a folder that can be written"):
        for source, path in pairs:
            if path in different or not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, path)
                written += 1
    return written, len(pairs) - written


def _files() -> Iterator[tuple[Path, Path]]:
    """Every file of `FOLDERS`, with its path in the copy."""
    for name, (folder, _) in FOLDERS.items():
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, Path(name) / path.relative_to(folder)


def _same(source: Path, path: Path) -> bool:
    return path.is_file() and filecmp.cmp(source, path, shallow=False)
