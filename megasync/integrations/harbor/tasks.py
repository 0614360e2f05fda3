"""Joins Harbor: its task folders as a dataset: one row for each task, with its instruction as the prompt.

    TASK/instruction.md   TASK/task.toml   TASK/environment/   TASK/tests/test.sh   TASK/solution/

Invariant: a row holds the instruction, the folder and the time limits. Neither tests nor solution are read here, and
what the reader does not support is a DataError before the run starts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megasync.config.schema import DatasetConfig
from megasync.data.rows import Row
from megasync.errors import DataError, raised_as

# Seconds of an agent that task.toml does not limit, and of the tests: Harbor's own default.
AGENT_SECONDS, TEST_SECONDS = 900.0, 600.0
# Lines that mark a benchmark's text, for those who search training data for it. No agent sees them.
_CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)


def harbor_rows(config: DatasetConfig) -> Iterator[Row]:
    """The tasks of a folder, or of its subfolder with the name of the split, in the order of their names."""
    what = f"harbor dataset {config.source!r} cannot be read"
    with raised_as(DataError, what, "check data.*.source", of=(OSError, RuntimeError, ValueError)):
        source = Path(config.source).expanduser()
        folder = source / config.split if (source / config.split).is_dir() else source
        tasks = [folder] if (folder / "task.toml").is_file() else sorted(folder.glob("*/task.toml"))
    if not tasks:
        raise DataError(f"{folder} has no Harbor tasks: it must be a task, or have folders with a task.toml each")
    for task in tasks:
        yield task_row(task if task.is_dir() else task.parent)


def task_row(folder: Path) -> Row:
    """The row of a task folder. Raises DataError for one that is incomplete or needs what is not supported."""
    with raised_as(DataError, f"the Harbor task {folder} cannot be read", of=(OSError, ValueError, RecursionError)):
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = _without_canary((folder / "instruction.md").read_text(encoding="utf-8"))
    agent, verifier, environment = (_table(settings, name, folder) for name in ("agent", "verifier", "environment"))
    for unsupported, what in (
        (settings.get("steps"), "several steps"),
        (str(environment.get("os", "linux")).lower() != "linux", f"os={environment.get('os')}"),
        (verifier.get("environment"), "an environment of its own for the tests"),
        (verifier.get("environment_mode", "shared") != "shared", "an environment of its own for the tests"),
        ((folder / "environment" / "docker-compose.yaml").exists(), "several containers (docker-compose.yaml)"),
        (environment.get("mcp_servers"), "MCP servers"),
    ):
        if unsupported:
            raise DataError(f"the Harbor task {folder} has {what}, which is not supported; leave it out")
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"the Harbor task {folder} has no tests/test.sh, which writes its reward")
    dockerfile = (folder / "environment" / "Dockerfile").is_file()
    columns = {
        "prompt": instruction,
        "task": str(folder.resolve()),
        "image": _text(environment, "docker_image", folder) or None,
        "dockerfile": dockerfile and not environment.get("docker_image"),
        "workdir": _text(environment, "workdir", folder),
        "agent_seconds": _seconds(agent, AGENT_SECONDS, "agent", folder),
        "test_seconds": _seconds(verifier, TEST_SECONDS, "verifier", folder),
        "environment_env": _variables(environment, "environment", folder),
        "test_env": _variables(verifier, "verifier", folder),
    }
    return Row(columns, str(folder))


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0]):
        lines.pop(0)
    return "\n".join(lines).strip("\n")


def _table(settings: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, Mapping):
        raise DataError(f"{folder}/task.toml: {name}={table!r} must be a table, [{name}]")
    return table


def _text(environment: Mapping[str, Any], name: str, folder: Path) -> str:
    text = environment.get(name, "")
    if not isinstance(text, str):
        raise DataError(f"{folder}/task.toml: environment.{name}={text!r} must be text")
    return text


def _seconds(table: Mapping[str, Any], default: float, name: str, folder: Path) -> float:
    seconds = table.get("timeout_sec", default)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise DataError(f"{folder}/task.toml: {name}.timeout_sec={seconds!r} must be a number of seconds above 0")
    return float(seconds)


def _variables(table: Mapping[str, Any], name: str, folder: Path) -> dict[str, str]:
    variables = _table(table, "env", folder)
    for key, value in variables.items():
        if not isinstance(value, str):
            raise DataError(f"{folder}/task.toml: {name}.env.{key}={value!r} must be text")
        if "${" in value:
            raise DataError(
                f"{folder}/task.toml: {name}.env.{key}={value!r} takes a variable of this machine, which no sandbox "
                f"gets; write the value"
            )
    return {**variables}
