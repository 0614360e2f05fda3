"""The `megasync` program: one function per command.

Exit status: 0 on success, 1 when a check failed, 2 when the request was refused or the run failed, 130 when the user
interrupted it. An error that megasync raises deliberately is printed as one message on stderr, without a traceback;
MEGASYNC_DEBUG=1 shows the traceback. Commands import heavy packages themselves, so that `--help` answers at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megasync.base.importing import quick_imports
from megasync.concurrency.event_loop import end_process
from megasync.errors import ConfigError, MegasyncError, raised_as
from megasync.launch.remote import SSH

if TYPE_CHECKING:
    from rich.console import Console

    from megasync.config import Config
    from megasync.config.schema import ModelConfig

DEBUG_VARIABLE = "MEGASYNC_DEBUG"
REFUSED, INTERRUPTED, UNHEALTHY = 2, 130, 1
# Seconds in which user code may end what it has left running: threads, child processes, exit handlers.
EXIT_SECONDS = 30.0
# Seconds allowed for resizing the server pool, in addition to the start timeout of a server.
SCALE_GRACE = 90.0


class Commands(TyperGroup):
    """Commands, of which some have names of two words. Each ends cleanly at Ctrl-C and SIGTERM."""

    # Typer has a copy of click's classes, which it does not name in public.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (name := " ".join(args[:2])) in self.commands:
            args = [name, *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _interruptible():
            return super().invoke(ctx)


class Command(TyperCommand):
    """One command. Its paths and numbers are checked before it begins, whatever it does with them."""

    def invoke(self, ctx: Any) -> Any:
        from megasync.config.limits import path_problem

        for param in self.params:
            given = ctx.params.get(param.name)
            name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name
            for value in given if isinstance(given, list | tuple) else [given]:
                if isinstance(value, Path) and (problem := path_problem(str(value))) is not None:
                    raise ConfigError(f"{name}={str(value)[:200]!r} is not a usable path: {problem}; check it")
                if isinstance(value, float) and not math.isfinite(value):
                    raise ConfigError(f"{name}={value} must be a finite number")
        return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Fully asynchronous reinforcement learning for language models: Megatron trains, SGLang generates, and "
    "neither waits for the other.\n\n"
    "To train a small model on this machine: [bold]megasync install cpu[/], then [bold]megasync quickstart[/]. "
    "To begin a run of your own: [bold]megasync init[/]. To validate a configuration without starting anything: "
    "[bold]megasync plan CONFIG[/]. Every command has its own --help, with examples.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What a launcher adds to a configuration.
JOINED = ("cluster.address=auto", "cluster.host=auto")
# Sections of `megasync --help`.
RUNS, CHECKS, MODELS, FAULTS = "Train and evaluate", "Plan and check", "Models", "Fault tolerance"
SETUP = "Set up"

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML configuration file, such as configs/quickstart.yaml.")
]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/quickstart-20260101-120000.")
]
HfFolder = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hugging Face model folder, or name on a hub: OWNER/NAME[@REVISION].")
]
OutFolder = Annotated[Path, typer.Argument(metavar="OUT", help="Output folder; must be empty or not exist yet.")]
ConvertedDtype = Annotated[
    str | None, typer.Option("--dtype", help="Dtype of the weights written. Default: that of config.json.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Configuration overrides, such as trainer.tensor_parallel=4."),
]
ContinueFile = Annotated[
    Path | None,
    typer.Option(
        "--continue",
        metavar="FILE",
        help="File that records the run's directory. If FILE exists, that run is resumed; otherwise a new run starts "
        "and FILE is written.",
    ),
]


def command(
    panel: str, *examples: str, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command below a heading of `megasync --help`, with the examples that its own help shows."""
    heading = "[bold]Examples[/]" if len(examples) > 1 else "[bold]Example[/]"
    return app.command(
        name,
        cls=Command,
        epilog="\n\n".join((heading, *(f"megasync {example}" for example in examples))),
        rich_help_panel=panel,
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        from megasync import __version__

        typer.echo(f"megasync {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@command(
    SETUP, "install cpu", "install cpu --env ~/megasync-env", "install gpu --env .venv", "install trackers engines"
)
def install(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="cpu or gpu: a whole environment. To add to one: engines, rehearsal, serve, trackers, verl. "
            "Beside one, in an environment of its own: openenv, verifiers.",
        ),
    ],
    env: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Virtual environment to make or complete. Default: this one.")
    ] = None,
) -> None:
    """Install the packages that runs need, in the exact versions of the locks that come with megasync.

    cpu has SGLang for CPUs, gpu everything for NVIDIA GPUs (CUDA 13). After an
    interruption the same command goes on where it stopped. Settings of pip apply,
    such as PIP_INDEX_URL and HTTPS_PROXY: with an index of CPU builds of torch, cpu
    is 3 GB smaller.
    """
    from megasync.install.pins import lock_file

    for name in names:
        lock_file(name)
    # It also replaces packages that this command has imported.
    options = [] if env is None else ["--env", str(env.expanduser())]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "megasync.install", *names, *options])


@command(SETUP, "files", "files .", "files ~/megasync --overwrite")
def files(
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Folder to copy them to.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that differ.")] = False,
) -> None:
    """Copy the files that come with megasync to DIR: configurations, launch scripts, examples, patches, verl plugin.

    Without DIR, says where they are. A file that was changed in DIR is never
    replaced without --overwrite.
    """
    from megasync.starters.copies import FOLDERS, copy_out

    if folder is None:
        for name, (source, purpose) in FOLDERS.items():
            _say(f"{name}: {purpose}\n    {source}")
        return
    written, there = copy_out(folder.expanduser(), overwrite=overwrite)
    _say(f"wrote {written} files to {folder}" + (f"; {there} were there already" if there else ""))


@command(RUNS, "quickstart", "quickstart schedule.total_steps=50 name=first")
def quickstart(overrides: Overrides = None) -> None:
    """Train a tiny model on this machine's CPU, from random weights to a learned task, in about a minute.

    Writes the model to models/digits unless it is there, and the run to
    runs/quickstart-<time>/, both below the current folder.
    """
    from megasync.base.missing import require
    from megasync.base.shipped import ROOT

    require("torch", "ray", "megatron", "sglang", "sglang_router")
    fetch("digits")
    train(ROOT / "configs" / "quickstart.yaml", overrides)


@command(
    RUNS,
    "init",
    "init my-run --template tools",
    "init my-run --template math --model Qwen/Qwen3-0.6B --gpus 8",
    "init my-run --from verl run_qwen3_8b.sh",
)
def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Folder for the run: new or empty. Default: this one.")
    ] = None,
    template: Annotated[str | None, typer.Option(help="Template, one of those above. Default: reward.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to train: digits or smollm2 (small, for a CPU), OWNER/NAME on a hub, or a folder. Default: the "
            "small one that suits the template."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, max=1024, help="GPUs of the machine; 0 for a CPU. Default: those of this one.")
    ] = None,
    other: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--from",
            metavar="LIBRARY FILE",
            help="Translate a configuration of verl, slime or trl instead: a shell script, YAML or Python.",
        ),
    ] = None,
) -> None:
    """Write a run of your own into DIR: configuration, reward, tools or agent, rows, and a test of the reward.

    It works as it is written, and every file is yours to change. Templates: reward
    (a reward function of your own), math (word problems), tools (an agent that
    calls your tools), agent (one that uses OpenAI's API), sft (supervised learning
    first), lora (adapters), distill (from a teacher), deepresearch (an agent that
    searches). Without arguments, a few questions are asked.
    """
    from megasync.cli.questions import ask_run
    from megasync.device import count_gpus
    from megasync.starters import (
        DEFAULT,
        TEMPLATES,
        after_translation,
        check_folder,
        find_model,
        find_template,
        next_steps,
        run_files,
        run_name,
        translated_files,
        write_run,
    )
    from megasync.translate import translate

    if other is not None:
        if not (template is model is gpus is None):
            raise ConfigError("--from takes model and devices from FILE: leave --template, --model and --gpus out")
        folder = folder or Path()
        check_folder(folder)
        translation = translate(*other)
        files = translated_files(translation, run_name(folder))
        write_run(folder, files)
        _say(after_translation(folder, translation, files))
        return
    if folder is template is model is gpus is None:
        folder, template, model = ask_run()
    folder, template = folder or Path(), find_template(template or DEFAULT)
    check_folder(folder)
    trained = find_model(model or TEMPLATES[template].model)
    files = run_files(template, trained, count_gpus() if gpus is None else gpus, run_name(folder))
    write_run(folder, files, trained)
    _say(next_steps(folder, template, files, trained))


@command(
    RUNS,
    "train configs/quickstart.yaml",
    "train configs/qwen3_8b_math.yaml trainer.tensor_parallel=2 trainer.data_parallel=2",
)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    continue_file: ContinueFile = None,
) -> None:
    """Train with the configuration CONFIG.

    All output goes to the run directory, runs/<name>-<time>/. Press Ctrl-C once
    to finish the current step, save a checkpoint and stop; press it twice to stop
    immediately.
    """
    from megasync.preflight.check import check_config

    loaded = _loaded(*_resolved(config, overrides, continue_file))
    check_config(loaded)  # before the import below, which takes seconds

    from megasync import AsyncTrainer

    (AsyncTrainer.begin_or_resume(loaded, continue_file) if continue_file else AsyncTrainer(loaded)).train()


@command(RUNS, "sft configs/quickstart_sft.yaml", "sft my_run.yaml sft.epochs=3 trainer.optimizer.lr=1e-5")
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on given answers (supervised), as a start for reinforcement learning.

    The section sft of CONFIG names the rows. All output goes to a run directory,
    as with train; `megasync resume RUN` goes on after an interruption. To go on
    with reinforcement learning, pass its export: megasync train CONFIG
    model.path=RUN/export.
    """
    from megasync.observe.result import show_result
    from megasync.preflight.check import check_supervised

    loaded = _loaded(config, overrides)
    check_supervised(loaded)  # before the import below, which takes seconds

    from megasync.supervised.run import train_supervised

    show_result(train_supervised(loaded), _console())


@command(
    RUNS, "serve configs/serve_quickstart.yaml", "serve configs/serve_qwen3_8b.yaml serve.port=8080 rollout.servers=4"
)
def serve(config: ConfigFile, overrides: Overrides = None, continue_file: ContinueFile = None) -> None:
    """Serve training and sampling to scripts that speak Tinker's protocol.

    Starts trainer ranks, servers and an endpoint, and prints its address and the
    file with the key. Clients take both from TINKER_BASE_URL and TINKER_API_KEY.
    All output goes to a run directory, as with train. Press Ctrl-C once to finish
    what runs and stop; press it twice to stop immediately. `megasync resume RUN`
    goes on, with all models, checkpoints and accepted requests.
    """
    from megasync.tenants.checks import check_service

    loaded = _loaded(*_resolved(config, overrides, continue_file))
    check_service(loaded)  # before the import below, which takes seconds

    from megasync.service.app import serve_forever

    serve_forever(loaded, continue_file)


@command(
    RUNS, "resume runs/quickstart-20260101-120000", "resume runs/quickstart-20260101-120000 schedule.total_steps=500"
)
def resume(run: RunDirectory, overrides: Overrides = None) -> None:
    """Resume RUN, in its own directory, from its newest complete checkpoint (or from the start if it has none)."""
    from megasync.config import ROWS_FILE, SERVICE_FOLDER

    if (run / SERVICE_FOLDER).is_dir():
        from megasync.service.app import resume_serving

        resume_serving(run, overrides or ())
    elif (run / ROWS_FILE).is_file():
        from megasync.observe.result import show_result
        from megasync.supervised.run import resume_supervised

        show_result(resume_supervised(run, overrides or ()), _console())
    else:
        from megasync import AsyncTrainer

        AsyncTrainer.resume(run, overrides or ()).train()


@command(
    CHECKS, "plan configs/qwen3_32b_math.yaml", "plan configs/qwen3_8b_math.yaml rollout.servers=2 --device-memory 141"
)
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    device_memory: Annotated[
        float | None, typer.Option(metavar="GB", min=1, max=10_000, help="Memory of one GPU, in GB. Default: 80.")
    ] = None,
) -> None:
    """Show what CONFIG would start: pools, ranks, buffer capacity, staleness bound, memory. Starts nothing.

    A CONFIG that names sft.train is planned as a supervised run (megasync sft),
    one with a section serve as a service (megasync serve).
    Exits with status 2 if the run does not fit into device memory, and suggests
    the nearest configuration that does. The model's weights are not needed: set
    model.config to a config.json to plan without them.
    """
    from megasync.planning.plan import resolve
    from megasync.planning.render import plan_tables
    from megasync.planning.start_checks import check_run

    loaded = _loaded(config, overrides, weights=False)
    left_out = check_run(loaded, planning=True)
    resolved = resolve(loaded, None if device_memory is None else int(device_memory * 1e9))
    _console().print(plan_tables(resolved, left_out))
    if resolved.refusals:
        raise typer.Exit(REFUSED)


@command(
    CHECKS,
    "rehearse configs/qwen3_32b_math.yaml",
    "rehearse configs/qwen3_32b_math.yaml trainer.data_parallel=64 --rank 0,1023 --megatron all",
)
def rehearse(
    config: ConfigFile,
    overrides: Overrides = None,
    rank: Annotated[
        str, typer.Option(help="Ranks: sample (of every pipeline stage and expert coordinate), all, or numbers.")
    ] = "sample",
    megatron: Annotated[
        str | None, typer.Option(metavar="VERSION", help="megatron-core: 0.16.1, 0.19.2 or all. Default: installed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Build trainer ranks of CONFIG at full size without a GPU: real layers and groups, tensors without memory.

    Checks names, shapes, dtypes and marks of parameters, members of process
    groups, and bytes against the plan. Needs the model's config.json only. Exits
    with status 1 and names the first difference if there is one.
    """
    from megasync.lab.rehearsal.command import rehearse_config

    if not rehearse_config(config, overrides or [], rank, megatron, as_json):
        raise typer.Exit(UNHEALTHY)


@command(RUNS, "scale runs/quickstart-20260101-120000 rollout=3")
def scale(
    run: RunDirectory,
    size: Annotated[str, typer.Argument(metavar="rollout=N", help="New number of rollout servers.")],
) -> None:
    """Change the number of rollout servers of RUN while it is running.

    A new server starts serving after the next weight sync. Requests on a removed
    server continue on another one.
    """
    from megasync.app.mailbox import ask
    from megasync.config import CONFIG_FILE, load_config

    wanted = re.fullmatch(r"rollout=([0-9]{1,9})", size)
    if wanted is None:
        raise ConfigError(f"{size!r} is not a valid size; write rollout=N, such as rollout=3")
    settings = run / CONFIG_FILE
    # The run itself waits `server_start` for a server.
    server_start = load_config(settings, unset=True).timeouts.server_start if settings.is_file() else 0.0
    answer = ask(run, "scale", int(wanted[1]), timeout=server_start + SCALE_GRACE)
    _say(answer)


@command(RUNS, "stacks runs/quickstart-20260101-120000")
def stacks(run: RunDirectory) -> None:
    """Write a hang report of RUN while it is running: what each process of it is doing.

    The run writes it into RUN/hang. If it does not answer, the stacks of its
    driver are printed, on the machine where the driver runs.
    """
    from megasync.app.mailbox import report_of

    _say(report_of(run))


@command(RUNS, "watch runs", "watch runs/quickstart-20260101-120000 --port 0", "watch /mnt/shared/runs --host 10.0.0.5")
def watch(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_FOLDER", help="Run directory, or folder of them.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 8420,
    with_token: Annotated[
        bool, typer.Option("--token/--no-token", help="Ask for the access token that the printed address contains.")
    ] = True,
) -> None:
    """Show RUN_OR_FOLDER as a live page in the browser: reading only, also of finished and crashed runs."""
    from megasync.watch.server import serve

    serve(path, host, port, with_token, _say)


@command(
    RUNS,
    "report runs/quickstart-20260101-120000",
    "report runs/quickstart-20260101-120000 --out report.html",
    "report runs/quickstart-20260101-120000 --markdown --out notes/report.md",
)
def report(
    run: RunDirectory,
    out: Annotated[
        Path | None, typer.Option(help="Output file. Default: the run's name with .html or .md, in this folder.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write Markdown, with figures as PNG files in a folder beside it.")
    ] = False,
) -> None:
    """Write a report on RUN: what was run, how it went, why it is as fast as it is, what went wrong.

    One HTML file that needs no network and no server, or Markdown. RUN may be
    starting, running, finished or crashed, by reinforcement learning or
    supervised.
    """
    from megasync.watch.files import open_run, write_document
    from megasync.watch.report import make_report

    written = write_document(make_report(open_run(run)), out, run.resolve().name, markdown)
    _say(f"report: {written}")


@command(
    RUNS,
    "compare runs/math-20260101-120000 runs/math-20260102-120000",
    "compare runs/math-* --threshold 0.5 --threshold 0.8",
    "compare runs/math-20260101-120000 runs/math-20260102-120000 --out comparison.html",
)
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN [RUN...]", help="Run directories.")],
    out: Annotated[
        Path | None, typer.Option(help="Write an HTML file with curves; Markdown if it ends in .md.")
    ] = None,
    threshold: Annotated[
        list[float] | None, typer.Option(help="Score (or loss) to report the time for. Repeatable. Default: a few.")
    ] = None,
) -> None:
    """Compare runs: their outcomes, how soon they reached a score, and the settings in which they differ.

    Prints tables, or writes a file like that of megasync report, with the curves
    by steps, by trained tokens and by time.
    """
    from megasync.watch.comparison import compare as compared
    from megasync.watch.comparison import label_apart, terminal
    from megasync.watch.files import open_run, write_document

    if len(runs) < 2:
        raise ConfigError(f"{runs[0]} alone cannot be compared; name two or more runs")
    opened = [open_run(run) for run in runs]
    label_apart(opened)
    document = compared(opened, threshold or ())
    if out is None:
        _console().print(terminal(document), highlight=False)
    else:
        written = write_document(document, out, out.stem, markdown=out.suffix == ".md")
        _say(f"comparison: {written}")


@command(
    RUNS,
    "eval runs/quickstart-20260101-120000",
    "eval configs/quickstart.yaml --model models/digits eval.samples=32",
    "eval configs/qwen3_8b_math.yaml --set eval eval.temperatures=[0.6] eval.repeats=8",
    name="eval",
)
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="CONFIG_OR_RUN", help="YAML configuration file, or run directory.")],
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face model folder to evaluate.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Training checkpoint to evaluate, such as RUN/checkpoints/step-00000010.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Evaluate only this set. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: a new folder.")] = None,
) -> None:
    """Evaluate a model on the held-out sets of CONFIG_OR_RUN. Starts servers but no trainer.

    Evaluates the newest checkpoint of a run, or the model of a configuration,
    unless --model or --checkpoint selects another. The set under data.eval is
    called "eval". Prints a table of scores; writes all answers to answers.jsonl
    and the scores to scores.json. Ctrl-C stops cleanly.
    """
    if model is not None and checkpoint is not None:
        raise ConfigError(f"--model {model} and --checkpoint {checkpoint} exclude each other; give only one")

    with quick_imports():
        from megasync.offline.evaluate import load_target, model_folder, output_folder, run_evaluation
        from megasync.offline.report import scores_table

    console = _console()
    config = load_target(target, overrides or ())
    with (
        output_folder(target, config, out) as folder,
        model_folder(target, config, folder, model, checkpoint) as (served, name),
    ):
        results = run_evaluation(config, folder, served, name, only or (), console)
    console.print(scores_table(results))
    _say(f"results: {folder}")


@command(RUNS, "trace runs/quickstart-20260101-120000", "trace runs/quickstart-20260101-120000 step.json")
def trace(
    run: RunDirectory,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Output file. Default: RUN/trace.json.gz.")
    ] = None,
) -> None:
    """Merge the traces of all processes of RUN into one file, for ui.perfetto.dev or chrome://tracing.

    RUN may be running. A name that ends in .gz gives a compressed file, which both
    programs read.
    """
    from megasync.watch.spans import write_perfetto

    path = out or run / "trace.json.gz"
    spans = write_perfetto(run, path)
    _say(f"wrote {spans} spans to {path}")


@command(MODELS, "export runs/quickstart-20260101-120000 models/digits-trained")
def export(
    run: RunDirectory,
    out: OutFolder,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the weights of their model: a whole model folder.")
    ] = False,
) -> None:
    """Export the newest checkpoint of RUN as a Hugging Face model folder (safetensors, config, tokenizer).

    That of a run with adapters (trainer.lora) becomes a PEFT folder, or with
    --merge a model folder.
    """
    from megasync.config import CONFIG_FILE, load_config
    from megasync.errors import CheckpointError

    settings = run / CONFIG_FILE
    if not settings.is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {CONFIG_FILE}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose another folder")

    from megasync.layout.shards import export_checkpoint
    from megasync.offline.merge import export_model
    from megasync.trainer.checkpoint import latest

    checkpoint = latest(run)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no complete checkpoint to export yet")
    source = _folder(load_config(settings, unset=True).model.path)
    (export_model if merge else export_checkpoint)(checkpoint, source, out)
    _say(f"exported {checkpoint} to {out}")


@command(MODELS, "to-megatron models/digits-trained checkpoints/digits")
def to_megatron(model: HfFolder, out: OutFolder, dtype: ConvertedDtype = None) -> None:
    """Write the weights of MODEL as a checkpoint of Megatron's own format (torch_dist), without an optimizer."""
    from megasync.device import Device

    Device("cpu").prepare_process(0)
    from megasync.integrations.dist_checkpoint import write_dist_checkpoint

    write_dist_checkpoint(_converted_model(_folder(model), dtype), out)
    _say(f"wrote {out}")


@command(MODELS, "from-megatron checkpoints/digits models/digits models/digits-imported")
def from_megatron(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint of Megatron's own format.")],
    model: HfFolder,
    out: OutFolder,
    dtype: ConvertedDtype = None,
) -> None:
    """Write the weights of CHECKPOINT as a Hugging Face folder, with config.json and tokenizer of MODEL."""
    from megasync.device import Device

    Device("cpu").prepare_process(0)
    from megasync.integrations.dist_checkpoint import read_dist_checkpoint

    read_dist_checkpoint(checkpoint, _converted_model(_folder(model), dtype), out)
    _say(f"wrote {out}")


@command(MODELS, "quantize models/qwen3-8b models/qwen3-8b-fp8")
def quantize(
    model: HfFolder,
    out: OutFolder,
    block: Annotated[int, typer.Option(min=1, help="Rows and columns of a block. Kernels on GPUs want 128.")] = 128,
    power_of_two: Annotated[
        bool, typer.Option("--power-of-two", help="Round scales up to powers of two (scale_fmt ue8m0).")
    ] = False,
    dtype: ConvertedDtype = None,
) -> None:
    """Write MODEL in block FP8, for servers that keep it so (rollout.fp8=true).

    The linear layers of all blocks are quantized; embeddings, head, norms and
    routers are not.
    """
    from megasync.layout.block_fp8 import Block
    from megasync.offline.quantize import write_fp8_folder

    folder = _folder(model)
    write_fp8_folder(folder, out, Block(block, block), _converted_model(folder, dtype).dtype, power_of_two)
    _say(f"wrote {out}")


def _converted_model(path: Path, dtype: str | None) -> ModelConfig:
    from megasync.config.schema import ModelConfig
    from megasync.layout.model_files import read_hf_config

    config = read_hf_config(path)
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return ModelConfig(path=str(path), dtype=dtype or str(stored))


@command(
    CHECKS,
    "check-layout models/smollm2 --tp 3 --pp 2 --engine-tp 2",
    "check-layout models/qwen3-30b-a3b --tp 2 --pp 2 --dp 2 --ep 4 --etp 1 --engine-tp 4 --random",
)
def check_layout(
    model: HfFolder,
    tp: Annotated[int, typer.Option(min=1, help="Trainer tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Trainer pipeline-parallel size.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Trainer data-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Trainer expert-parallel size.")] = 1,
    etp: Annotated[int | None, typer.Option(min=1, help="Trainer expert-tensor-parallel size. Default: --tp.")] = None,
    vpp: Annotated[int, typer.Option(min=1, help="Virtual pipeline stages per pipeline stage.")] = 1,
    engine_tp: Annotated[int, typer.Option(min=1, help="SGLang tensor-parallel size.")] = 1,
    engine_ep: Annotated[int, typer.Option(min=1, help="SGLang expert-parallel size.")] = 1,
    engine_pp: Annotated[int, typer.Option(min=1, help="SGLang pipeline-parallel size.")] = 1,
    engine_dp_attention: Annotated[
        int, typer.Option(min=1, help="SGLang groups of data-parallel attention (--attn-dp-size).")
    ] = 1,
    dtype: Annotated[str | None, typer.Option(help="Dtype of both sides. Default: that of config.json.")] = None,
    bucket_mb: Annotated[int, typer.Option(min=1, help="Bucket size in MiB (sync.bucket_mb).")] = 256,
    random: Annotated[
        bool, typer.Option("--random", help="Use random weights; MODEL then needs only a config.json.")
    ] = False,
    fp8: Annotated[
        bool,
        typer.Option("--fp8", help="The servers keep MODEL's block FP8 (rollout.fp8); values and scales are random."),
    ] = False,
    device: Annotated[str, typer.Option(help="Device of the SGLang engine: auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that a weight sync moves MODEL between trainer shards and SGLang shards bit for bit.

    Shards the weights as the trainer does, runs every transfer of a shard-to-
    shard sync inside this process, and compares the result with what SGLang's own
    loader produces. Needs no trainer, server or GPU. Exits with status 1 and
    lists the tensors if any differ.
    """
    from megasync.device import check_machine, resolve_device
    from megasync.errors import SyncError
    from megasync.lab.engine_blueprint import engine_ranks
    from megasync.lab.layout_check import check_layout as check
    from megasync.lab.render_layout import report_data, report_tables
    from megasync.layout.topology import Topology

    topology = Topology(tensor=tp, pipeline=pp, data=dp, expert=ep, expert_tensor=etp, virtual=vpp)
    check_machine(device, trains=False)
    place = resolve_device(device)
    if engine_tp % engine_dp_attention:
        raise ConfigError(
            f"--engine-dp-attention={engine_dp_attention} does not divide --engine-tp={engine_tp}; choose a divisor"
        )
    split = {"--ep-size": engine_ep, "--pp-size": engine_pp, "--attn-dp-size": engine_dp_attention}
    folder = _folder(model, weights=not random)
    try:
        report = check(
            folder,
            topology,
            place.spec,
            dtype,
            bucket_mb,
            random,
            lambda served, specs: engine_ranks(folder, engine_tp, served, place.kind, specs, split, fp8),
            fp8,
        )
    except SyncError as error:
        # The two layouts are incompatible: a negative result, not a usage error.
        _print_error(str(error))
        raise typer.Exit(UNHEALTHY) from None
    if as_json:
        typer.echo(json.dumps(report_data(report), indent=2))
    else:
        _console().print(report_tables(report))
    if report.problems:
        raise typer.Exit(UNHEALTHY)


@command(
    FAULTS,
    "chaos configs/quickstart.yaml --minutes 10",
    "chaos configs/quickstart.yaml --kill server,rank --stop --seed 7 timeouts.train_step=60 timeouts.weight_sync=60",
    "chaos configs/quickstart.yaml --slow --disk /mnt/small run_root=/mnt/small/runs",
)
def chaos(
    config: ConfigFile,
    overrides: Overrides = None,
    kill: Annotated[
        str,
        typer.Option(help="Kinds of processes to kill: server, router, rank, worker, controller. Empty for none."),
    ] = "server,router,rank",
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Duration of the experiment in minutes, from the start of the run.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Random seed for the order, times and targets of faults.")] = 0,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Stop once every kind of fault was injected this many times.")
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="Also freeze processes (SIGSTOP), as often as they are killed.")
    ] = False,
    slow: Annotated[bool, typer.Option("--slow", help="Also slow a server down to a fifth of its speed.")] = False,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="MOUNT",
            help="Also fill up this filesystem and free it again. It must hold only run_root, for example a tmpfs.",
        ),
    ] = None,
    cut: Annotated[
        str | None,
        typer.Option(
            metavar="NETNS/IFACE",
            help="Also take this network link down. The hosts of the run must be network namespaces. Needs root.",
        ),
    ] = None,
    hold: Annotated[
        float, typer.Option(min=1.0, help="Duration of a slow server, a full disk or a network cut, in seconds.")
    ] = 20.0,
    pause: Annotated[float, typer.Option(min=0.0, help="Maximum random delay between two faults, in seconds.")] = 20.0,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for the next training step after a fault.")
    ] = 600.0,
) -> None:
    """Train with CONFIG while injecting faults at random times.

    Prints each fault with its recovery time (until the next training step), the
    ledger's balance and the held-out score. Exits with status 1 if the run did
    not recover or any prompt was lost. Faults affect processes on this machine
    only.
    """
    from megasync.config import load_config
    from megasync.lab.chaos.experiment import ChaosExperiment, ChaosTiming, FaultPlan
    from megasync.lab.chaos.report import report_tables
    from megasync.preflight.check import check_config

    loaded = load_config(config, overrides or ())
    experiment = ChaosExperiment(
        config,
        loaded,
        overrides or (),
        FaultPlan([kind for kind in kill.split(",") if kind], stop, slow, disk, cut),
        ChaosTiming(pause, patience, hold),
        seed,
        log=_say,
    )
    check_config(_with_models(loaded))
    report = experiment.run(minutes, rounds)
    _console().print(report_tables(report))
    if report.problems:
        raise typer.Exit(UNHEALTHY)


@command(FAULTS, "simulate --seeds 10000", "simulate --seed 4711 --history")
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds to simulate.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    history: Annotated[
        bool, typer.Option("--history", help="Simulate only the first seed and print its event history.")
    ] = False,
) -> None:
    """Run controller, buffer and rollout in virtual time under random fault schedules.

    Exits with status 1 and names the first seed that violates an invariant. Runs
    are deterministic: the same seed reproduces the failure.
    """
    from megasync.lab.sim.report import report

    raise typer.Exit(report(range(seed, seed + (1 if history else seeds)), history, _console(), jobs))


@command(
    RUNS,
    "launch configs/qwen3_32b_math.yaml --hosts gpu1,gpu2,gpu3",
    "launch configs/qwen3_32b_math.yaml --hosts hosts.txt --dry-run trainer.tensor_parallel=4",
)
def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    hosts: Annotated[
        str, typer.Option(help="Hosts: h1,h2,... or a file with one host per line. The driver runs on the first.")
    ] = "",
    slurm: Annotated[bool, typer.Option("--slurm", help="Use the nodes of the surrounding Slurm job.")] = False,
    shell: Annotated[str, typer.Option(metavar="COMMAND", help="Remote shell, called as COMMAND HOST ....")] = SSH,
    interface: Annotated[
        str, typer.Option(help="Network interface to use on all hosts. Default: the one that routes to the others.")
    ] = "",
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for all hosts to join.")] = 300.0,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Start the part of host N only (from 0), here: for schedulers that start this command on every host.",
        ),
    ] = None,
    continue_file: ContinueFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands without running them.")] = False,
) -> None:
    """Train with CONFIG on several hosts: starts Ray on each, runs the driver on the first, and shuts everything down.

    A CONFIG with a section serve is served (megasync serve); its endpoint is on the first host.
    The checkout and the run's folders must have the same paths on all hosts. Press
    Ctrl-C once to finish the current step, save a checkpoint and stop; press it
    twice to stop immediately. Under Slurm, SIGUSR1 saves a checkpoint and requeues
    the job.
    """
    from megasync.config import load_config
    from megasync.config.commands import is_served
    from megasync.launch.hosts import read_hosts
    from megasync.launch.launcher import LOCAL, Job, run_job
    from megasync.launch.launcher import dry_run as commands
    from megasync.launch.slurm import SHELL, requeue, run_file, slurm_hosts
    from megasync.preflight.check import check_config
    from megasync.tenants.checks import check_service

    if bool(hosts) == slurm:
        raise ConfigError("give either --hosts h1,h2,... or, inside a Slurm job, --slurm")
    named = slurm_hosts() if slurm else read_hosts(hosts)
    if rank is not None and (slurm or rank >= len(named) or continue_file is None):
        raise ConfigError(
            f"--rank {rank} needs --hosts with more than {rank} hosts, not --slurm, and --continue FILE in a folder "
            "that all hosts share"
        )
    if slurm and continue_file is None:
        continue_file = run_file(load_config(config, overrides or ()).run_root)
    source, changes = _resolved(config, overrides, continue_file)
    loaded = load_config(source, [*changes, *JOINED])
    check = check_service if is_served(loaded) else check_config
    check(_with_models(loaded, weights=False), planning=True)
    job = Job(
        hosts=named,
        config=loaded,
        config_file=source,
        changes=changes,
        folder=Path.cwd(),
        shell=SHELL if slurm else shell if rank is None else LOCAL,
        interface=interface,
        continue_file=continue_file,
        rank=rank,
        wait=wait,
        logs=(Path(loaded.run_root) / "launch" / f"{datetime.now():%Y%m%d-%H%M%S}").absolute(),
    )
    if dry_run:
        typer.echo("\n".join(commands(job)))
        return
    raise typer.Exit(asyncio.run(run_job(job, requeue if slurm else None)))


@command(
    RUNS,
    "launch render --target kuberay configs/qwen3_32b_math.yaml --image IMAGE --volume megasync-data:/data "
    "run_root=/data/runs > run.yaml",
    "launch render --target slurm configs/qwen3_32b_math.yaml > run.sbatch",
    name="launch render",
)
def launch_render(
    config: ConfigFile,
    target: Annotated[str, typer.Option(help="What starts the run: kuberay, job (Kubernetes), skypilot or slurm.")],
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="Image that the nodes pull: kuberay, job.")] = "",
    volume: Annotated[
        str,
        typer.Option(metavar="CLAIM:PATH", help="Shared volume and where to mount it; run_root is on it."),
    ] = "",
    folder: Annotated[
        str,
        typer.Option(metavar="PATH", help="Where CONFIG and its files are in the pods. Default: the image's checkout."),
    ] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="What SkyPilot calls the GPUs.")] = "H100",
) -> None:
    """Print the file with which Kubernetes, SkyPilot or Slurm starts CONFIG. Starts nothing.

    Nodes and devices are those of `megasync plan`. The file holds no secrets; its
    first lines say how it is submitted.
    """
    from megasync.config.commands import is_served
    from megasync.launch.manifests import deployment, render
    from megasync.planning.plan import resolve_plan
    from megasync.preflight.check import check_config

    changes = overrides or []
    loaded = _loaded(config, [*changes, *JOINED], weights=False)
    if is_served(loaded):
        raise ConfigError(
            "serve: there are no files for a service, whose clients must reach it; use megasync launch --hosts or "
            "--slurm, or run megasync serve CONFIG cluster.address=auto in a pod of a Ray cluster of your own"
        )
    check_config(loaded, planning=True)
    run = deployment(target, resolve_plan(loaded), config, changes, image, volume, folder, gpu)
    typer.echo(render(target, run), nl=False)


@command(CHECKS, "doctor", "doctor configs/quickstart.yaml", "doctor --cluster auto --nodes 4 my_run.yaml")
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="Also check what this configuration needs: model, folders, devices."),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Check all nodes of this Ray cluster: auto or HOST:PORT.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Expected number of cluster nodes.")] = 1,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the nodes to join.")] = 0.0,
) -> None:
    """Check this machine: versions, patches, devices, ports, Ray, memory, disk, plugins, and what CONFIG needs.

    With --cluster, checks every node, compares what must match on all nodes
    (code, versions, devices, clocks, folders) and tests the network between them.
    Exits with status 1 if a check fails.
    """
    from megasync.models.hub import pending
    from megasync.planning.doctor import FAILURE, examine
    from megasync.planning.render import findings_table
    from megasync.planning.run_doctor import find_contradiction
    from megasync.planning.start_checks import check_run

    loaded = _loaded(config, overrides, weights=False) if config else None
    refuse = partial(check_run, planning=loaded is not None and bool(pending(loaded)))
    if cluster is None:
        findings = examine(loaded, refuse=refuse)
    else:
        from megasync.planning.cluster_doctor import examine_cluster

        findings = examine_cluster(cluster, nodes, wait, loaded)
        if config is not None and loaded is not None:
            # A launcher joins the cluster for a configuration that names none.
            joins = [] if loaded.cluster.address else [f"cluster.address={cluster}", "cluster.host=auto"]
            joined = _loaded(config, [*(overrides or ()), *joins], weights=False)
            findings.append(find_contradiction(joined, refuse))
    _console().print(findings_table(findings))
    if any(finding.status == FAILURE for finding in findings):
        raise typer.Exit(UNHEALTHY)


@command(MODELS, "fetch digits", "fetch smollm2 --out /data/models/smollm2")
def fetch(
    name: Annotated[
        str,
        typer.Argument(
            help="digits or digits_moe (tiny, random weights), smollm2 (SmolLM2-135M-Instruct), or OWNER/NAME[@REV]."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: models/NAME.")] = None,
) -> None:
    """Create the folder of a small model (configuration, weights, tokenizer), or download a model of a hub.

    The small ones need no network. A model of a hub goes into the cache of
    huggingface_hub, as when a run starts: for machines whose runs have no network.
    """
    from megasync.models.hub import is_name
    from megasync.starters.fetch import fetch as write_model

    if is_name(name) and out is not None:
        raise ConfigError(f"{name} is downloaded into the cache, which HF_HOME sets; leave --out out")
    folder = _folder(name) if is_name(name) else write_model(name, out or Path("models") / name)
    _say(f"wrote {name} to {folder}")


def _resolved(config: Path, overrides: list[str] | None, continue_file: Path | None) -> tuple[Path, list[str]]:
    """The configuration file and overrides to run with; prints the file if an earlier run goes on."""
    from megasync.app.resume_file import resolve_config

    source, changes = resolve_config(config, overrides or (), continue_file)
    if source != config:
        typer.echo(f"resuming with the configuration {source}", err=True)
    return source, changes


def _loaded(config: Path, overrides: Sequence[str] | None, *, weights: bool = True) -> Config:
    """The configuration, with the folders of models that are given by name, which are downloaded."""
    from megasync.config import load_config

    return _with_models(load_config(config, overrides or ()), weights=weights)


def _with_models(config: Config, *, weights: bool = True) -> Config:
    from megasync.models.hub import resolve_names

    return resolve_names(config, weights=weights)


def _folder(model: str, *, weights: bool = True) -> Path:
    """The folder of a model, downloaded if it is given by name."""
    from megasync.models.hub import local_folder

    return local_folder(model, weights=weights)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Exits with the status of an interruption, and prints its message, at Ctrl-C or SIGTERM outside of an event loop.

    Python ends at a SIGTERM without any cleanup, which would leave what is being written half written.
    """

    def terminate(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _print_error(_with_notes(str(interrupt) or "interrupted", interrupt))
        raise typer.Exit(INTERRUPTED) from None
    except SystemExit as error:
        # Of Rich, which prints the help, once its reader has gone.
        if isinstance(error.__context__, BrokenPipeError):
            raise
        # Commands end with typer.Exit: this is of code that they called, which may ask for status 0.
        raise MegasyncError(f"some code ended the program before its goal, with SystemExit: {error.code}") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    """Prints a line that may hold a path: unbroken, and without colours."""
    _console().print(text, highlight=False, markup=False, soft_wrap=True)


def _console() -> Console:
    from megasync.base.terminal import Terminal

    return Terminal()


def main() -> None:
    """Entry point of the `megasync` program."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Flush every line, also into a file: users follow runs there. A path may hold bytes that are no text.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    status = UNHEALTHY
    try:
        # A configuration may name functions of modules in the working directory; installed packages take precedence.
        with raised_as(ConfigError, "the working directory cannot be entered", "cd to another one"):
            sys.path.append(os.getcwd())
        app()
    except MegasyncError as error:
        status = REFUSED
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        _print_error(_with_notes(f"{type(error).__name__}: {error}", error))
        sys.exit(status)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        status = REFUSED
        _print_error(f"{error}: free some space, or write to another disk")
        sys.exit(status)
    except ModuleNotFoundError as error:
        from megasync.base.missing import fix_for_module

        if (fix := fix_for_module(error.name)) is None:
            raise
        status = REFUSED
        _print_error(fix)
        sys.exit(status)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        # Skips the garbage collection at interpreter exit, which takes seconds with these imports.
        gc.freeze()
        end_process(status, EXIT_SECONDS)


def _with_notes(text: str, error: BaseException) -> str:
    """The text, and what was added to the error on its way."""
    return "\n".join([text, *getattr(error, "__notes__", ())])


def _print_error(text: str) -> None:
    typer.secho(text, err=True, fg=typer.colors.RED, bold=True)
