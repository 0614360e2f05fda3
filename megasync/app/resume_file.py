"""`--continue FILE`: the file that names the run to resume, and the configuration that the run resumes with.

A new run starts only where FILE does not exist, or where the run that it names ended before its ledger was created, so
nothing can be lost. A FILE that names no run, or a missing one, is an error: silently starting a new run would abandon
what the named run has trained.

A run resumes with its own CONFIG_FILE. That holds what changed while the run went on, such as the number of servers,
and not what was changed since in the CONFIG that the run was started with, perhaps for another run. Only the section
`cluster`, which says where a run is placed, is taken from each start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megasync.base.files import atomic_write
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.buffer.ledger import begun
from megasync.config import CONFIG_FILE, SERVICE_FOLDER, load_config
from megasync.config.limits import SHOWN_CHARACTERS, path_problem
from megasync.errors import ConfigError, raised_as

log = logging.getLogger(__name__)


def is_resumable(run_dir: Path) -> bool:
    """Whether the run has a ledger, of trajectories or of a service, or a complete checkpoint to resume from."""
    if begun(run_dir / LEDGER_FILE) or (run_dir / SERVICE_FOLDER).is_dir():
        return True
    from megasync.trainer.checkpoint import latest

    return latest(run_dir) is not None


def read_resume_file(file: Path) -> Path | None:
    """The run directory that ``file`` names; None without a file, or when that run ended before it began.

    Raises ConfigError for a folder, and for a file that names no run directory.
    """
    if file.is_dir():
        raise ConfigError(f"--continue {file} is a folder; name a file: the run directory is written to it")
    if not file.exists():
        return None
    fix = f"write the run directory into it, or remove {file} to start a new run"
    with raised_as(ConfigError, f"--continue {file} cannot be read", fix, of=(OSError, UnicodeDecodeError)):
        name = file.read_text(encoding="utf-8").strip()
    if not name:
        raise ConfigError(f"--continue {file} is empty and names no run; {fix}")
    run_dir = Path(name)
    if path_problem(name) is None and is_resumable(run_dir):
        return run_dir
    if path_problem(name) is not None or not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--continue {file} names {name[:SHOWN_CHARACTERS]!r}, which is not a run directory: it has no "
            f"{CONFIG_FILE}; put the run back there, {fix}"
        )
    log.warning("Starting a new run: --continue %s names %s, which ended before it began", file, run_dir)
    return None


def write_resume_file(file: Path, run_dir: Path) -> None:
    """Writes the run directory into ``file``. Raises ConfigError when it cannot be written."""
    content = f"{run_dir.absolute()}\n"
    with raised_as(ConfigError, f"--continue {file} cannot be written", "free some space, or name another file"):
        if not file.is_file() or file.read_text(encoding="utf-8") != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, content)


def resolve_config(config: Path, overrides: Sequence[str], file: Path | None) -> tuple[Path, list[str]]:
    """Configuration file and overrides of a start with ``--continue FILE``: the named run's, or the given ones.

    Raises ConfigError as `load_config` does.
    """
    run_dir = None if file is None else read_resume_file(file)
    if run_dir is None:
        return config, list(overrides)
    cluster = asdict(load_config(config, overrides).cluster)
    return run_dir / CONFIG_FILE, [
        f"cluster.{key}={'null' if value is None else value}" for key, value in cluster.items()
    ]
