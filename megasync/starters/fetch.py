"""`fetch`: creates the folder of a named model.

Invariant: the folder exists only if it is complete. It is written under a temporary name in the parent of its
destination and renamed at the end, so an interrupted fetch leaves nothing that looks like a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from megasync.base.files import new_folder
from megasync.errors import ConfigError, raised_as
from megasync.starters.digits import write_digits
from megasync.starters.smollm2 import write_smollm2

log = logging.getLogger(__name__)

# Functions that write a model's files into an empty folder, by name of the model.
MODELS: dict[str, Callable[[Path], None]] = {
    "digits": write_digits,
    "digits_moe": partial(write_digits, experts=True),
    "smollm2": write_smollm2,
}


def fetch(name: str, out: str | Path) -> Path:
    """Writes the model `name` to the folder `out` and returns the folder. An existing complete model is kept.

    Raises ConfigError for an unknown name, a missing package, and if `out` is something else or cannot be written.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; megasync can fetch {', '.join(MODELS)}")
    out = Path(out).expanduser()
    if (out / "config.json").is_file() and (out / "model.safetensors").is_file():
        log.info("%s already exists: %s", name, out)
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not a model folder; move it away or choose another folder")
    log.info("Writing %s to %s", name, out)
    what, fix = (
        f"{name} cannot be written to {out.absolute()}",
        "free some space, or choose a folder that can be written",
    )
    with raised_as(ConfigError, what, fix, of=(OSError, SafetensorError)), new_folder(out) as unfinished:
        MODELS[name](unfinished)
    log.info("%s is ready: %s", name, out)
    return out
