"""`--continue FILE`: the run that a file names, and what it goes on as.

A run goes on as its own CONFIG_FILE says. That knows what changed while it ran, such as the number of servers, and does
not know what was changed since in the CONFIG that it began with, perhaps for another run. Only where a run is placed, the
section `cluster`, belongs to each start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.config import CONFIG_FILE, load_config
from megasync.errors import ConfigError


def has_begun(run_dir: Path) -> bool:
    """Whether there is anything to go on from."""
    if (run_dir / LEDGER_FILE).is_file():
        return True
    from megasync.trainer.checkpoint import latest

    return latest(run_dir) is not None


def named_run(file: Path) -> Path | None:
    """The run directory that ``file`` names; None where there is no such file, or that run had not begun.

    Raises ConfigError for a folder, where no file could be written.
    """
    if file.is_dir():
        raise ConfigError(f"--continue {file} is a folder; name a file, which the run's name is written to")
    if not file.is_file():
        return None
    run_dir = Path(file.read_text(encoding="utf-8").strip())
    return run_dir if has_begun(run_dir) else None


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
