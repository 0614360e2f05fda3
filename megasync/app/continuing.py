"""`--continue FILE`: the run that a file names, and what it goes on as.

A new run begins only where there is no FILE, or where the run that it names never began (it ended before its ledger was
made, so nothing can be lost). A FILE that names no run, or one that is gone, is an error: a run that silently began anew
would leave behind whatever the named one has trained.

A run goes on as its own CONFIG_FILE says. That knows what changed while it ran, such as the number of servers, and does
not know what was changed since in the CONFIG that it began with, perhaps for another run. Only where a run is placed, the
section `cluster`, belongs to each start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.buffer.ledger import begun
from megasync.config import CONFIG_FILE, load_config
from megasync.config.limits import SHOWN_PATH, path_problem
from megasync.errors import ConfigError
from megasync.files import atomic_write

log = logging.getLogger(__name__)


def has_begun(run_dir: Path) -> bool:
    """Whether there is anything to go on from."""
    if begun(run_dir / LEDGER_FILE):
        return True
    from megasync.trainer.checkpoint import latest

    return latest(run_dir) is not None


def named_run(file: Path) -> Path | None:
    """The run directory that ``file`` names; None where there is no such file, or that run never began.

    Raises ConfigError for a folder, where no file could be written, and for a file that names no run directory.
    """
    if file.is_dir():
        raise ConfigError(f"--continue {file} is a folder; name a file, which the run's name is written to")
    if not file.exists():
        return None
    fix = f"write the run's directory into it, or remove {file} to begin a new run"
    try:
        name = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--continue {file} cannot be read: {error}; {fix}") from None
    if not name:
        raise ConfigError(f"--continue {file} is empty, so it names no run; {fix}")
    run_dir = Path(name)
    if path_problem(name) is None and has_begun(run_dir):
        return run_dir
    if path_problem(name) is not None or not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--continue {file} names {name[:SHOWN_PATH]!r}, which is not a run directory: it has no {CONFIG_FILE}; put the "
            f"run back there, {fix}"
        )
    log.warning("--continue %s names %s, which ended before it began: beginning a new run", file, run_dir)
    return None


def name_run(file: Path, run_dir: Path) -> None:
    """Makes ``file`` name the run. Raises ConfigError when it cannot be written."""
    content = f"{run_dir.absolute()}\n"
    try:
        if not file.is_file() or file.read_text(encoding="utf-8") != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, content)
    except OSError as error:
        raise ConfigError(
            f"--continue {file} cannot be written: {error}; free some space, or name another file"
        ) from error


def settings(config: Path, overrides: Sequence[str], file: Path | None) -> tuple[Path, list[str]]:
    """Configuration file and overrides of a start with ``--continue FILE``: the named run's, or those given for a new one.

    Raises ConfigError as `load_config` does.
    """
    run_dir = None if file is None else named_run(file)
    if run_dir is None:
        return config, list(overrides)
    place = asdict(load_config(config, overrides).cluster)
    return run_dir / CONFIG_FILE, [
        f"cluster.{key}={'null' if value is None else value}" for key, value in place.items()
    ]
