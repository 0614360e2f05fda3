"""The questions of `megasync init` without arguments. What cannot be used as an answer is asked for again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import typer

from megasync.errors import ConfigError
from megasync.starters import DEFAULT, SMALL, TEMPLATES, check_folder, check_model, find_model, find_template

T = TypeVar("T")


def ask_run() -> tuple[Path, str, str]:
    """Folder, template and model of a new run. Raises ConfigError without a terminal, KeyboardInterrupt at Ctrl-C."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(
            "megasync init without arguments asks questions, and there is no terminal to ask them in; name a folder, "
            "and a template if you like: megasync init my-run --template math"
        )
    try:
        folder = _ask("Folder", "my-run", _free_folder)
        typer.echo("\n".join(f"  {name:<14}{each.summary}" for name, each in TEMPLATES.items()))
        template = _ask("Template", DEFAULT, find_template)
        small = ", ".join(SMALL)
        typer.echo(f"  {small} (small, for a CPU), OWNER/NAME on a hub, or a folder")
        return folder, template, _ask("Model", TEMPLATES[template].model, partial(_model, template))
    except typer.Abort:
        raise KeyboardInterrupt("interrupted; nothing was written") from None


def _ask(question: str, default: str, read: Callable[[str], T]) -> T:
    while True:
        try:
            return read(typer.prompt(question, default))
        except ConfigError as error:
            typer.secho(str(error), err=True, fg=typer.colors.RED)


def _model(template: str, text: str) -> str:
    check_model(template, find_model(text))
    return text


def _free_folder(text: str) -> Path:
    check_folder(folder := Path(text).expanduser())
    return folder
