"""The command `megasync eval`: its arguments, and where its results are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasync.errors import ConfigError
from megasync.importing import quick_imports

INTERRUPTED = 130


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="CONFIG_OR_RUN", help="YAML file, or run directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to the configuration, such as eval.samples=32."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face model folder to evaluate.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Training checkpoint to evaluate, such as RUN/checkpoints/step-00000010.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Only this set; may be given again.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; a new one when not given.")] = None,
) -> None:
    """Answer the held-out sets of CONFIG_OR_RUN and score the answers. Starts servers, no trainer.

    Evaluates the newest checkpoint of a run, or the model that a configuration names, unless --model or --checkpoint name
    another. The set under data.eval is called "eval". Prints a table, and leaves every answer in answers.jsonl and the
    scores in scores.json. Ctrl-C ends it cleanly.
    """
    if model is not None and checkpoint is not None:
        raise ConfigError(f"--model {model} and --checkpoint {checkpoint} exclude each other; name one")

    from rich.console import Console

    with quick_imports():
        from megasync.app.evaluate import load_target, model_folder, output_folder, run_evaluation
        from megasync.evaluation.show import scores_table

    console = Console()
    config = load_target(target, overrides or ())
    try:
        with (
            output_folder(target, config, out) as folder,
            model_folder(target, config, folder, model, checkpoint) as (served, name),
        ):
            found = run_evaluation(config, folder, served, name, only or (), console)
    except KeyboardInterrupt as interrupt:
        typer.secho(str(interrupt) or "interrupted", err=True, fg=typer.colors.RED, bold=True)
        raise typer.Exit(INTERRUPTED) from None
    console.print(scores_table(found))
    console.print(f"answers and scores: {folder}", highlight=False, markup=False, soft_wrap=True)
