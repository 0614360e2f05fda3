"""Joins verifiers: the tasks of a taskset as rows, and how its own environment is reached.

A row has `prompt`, the text of the task's prompt, and `task`, the task's data, which the environment's server takes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasync.base.missing import apart_program
from megasync.config.access import foreign_environment
from megasync.config.schema import DatasetConfig
from megasync.errors import DataError, raised_as

_SIDE = Path(__file__).with_name("side.py")
# Seconds to load a taskset, which may download its data.
_LOAD_SECONDS = 3600.0
_LAST_LINES = 12


def verifiers_command(order: str, python: str = "") -> list[str]:
    """The command that carries out an order in verifiers' environment, or in that of another `python`.

    Raises ConfigError if it is not installed.
    """
    return [str(python or apart_program("verifiers", "python")), "-P", str(_SIDE), order]


def verifiers_variables(command: Sequence[str]) -> dict[str, str]:
    """Environment variables of that command, beside this process's.

    Modules of the working directory can be imported, as in a run, and programs beside its Python are found: verifiers
    starts its agents with uv.
    """
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    programs = os.pathsep.join((str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)))
    return {"PYTHONPATH": path, "PATH": programs}


def taskset_settings(config: DatasetConfig) -> dict[str, Any]:
    """The taskset's own options of a data set; of one of another kind, none."""
    options = config.options if config.kind == "verifiers" else {}
    return {name: value for name, value in options.items() if name not in ("python", "select")}


def verifiers_rows(config: DatasetConfig) -> tuple[list[dict[str, Any]], None]:
    """The tasks of the taskset `config.source`, which no reward function scores: their environment does.

    Its `options` are the taskset's own, and `select` and `python`.
    Raises DataError with what verifiers says.
    """
    name = f"verifiers:{config.source}"
    if config.split != "train":
        raise DataError(
            f"{name}: split={config.split!r}, but tasksets have no splits; choose other tasks with options.select, "
            f"such as {{skip: 1000}}, or a taskset's own option"
        )
    python, select = config.options.get("python", ""), config.options.get("select") or {}
    if not isinstance(select, Mapping):
        raise DataError(f"{name}: options.select={select!r} must be a mapping, such as {{skip: 1000}}")
    chosen = {"limit": config.size, "seed": config.seed} | dict(select)
    order = {"name": config.source, "taskset": taskset_settings(config), "select": chosen}
    command = verifiers_command("rows", python)
    with raised_as(DataError, f"{name} cannot be loaded", of=(OSError, subprocess.TimeoutExpired)):
        done = subprocess.run(
            command,
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=_LOAD_SECONDS,
            env=foreign_environment() | verifiers_variables(command),
            check=False,
        )
    if done.returncode:
        raise DataError(f"{name} cannot be loaded:\n" + "\n".join(done.stderr.splitlines()[-_LAST_LINES:]))
    return [json.loads(line) for line in done.stdout.splitlines()], None
