"""The command line: `megasync train`, `launch`, `plan`, `resume`, `scale`, `eval`, `export`, `check-layout`, `doctor`,
`fetch`, `chaos`, `simulate`.

Errors that megasync raises on purpose end a command with one message on stderr and status 2, without a traceback;
MEGASYNC_DEBUG=1 shows the traceback. Heavy packages are imported inside the commands, so that help comes at once.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megasync.cli.evaluate import evaluate
from megasync.errors import MegasyncError
from megasync.launch.command import launch

if TYPE_CHECKING:
    from rich.console import Console

    from megasync.app.async_trainer import AsyncTrainer

DEBUG_VARIABLE = "MEGASYNC_DEBUG"
REFUSED, INTERRUPTED, UNHEALTHY = 2, 130, 1
# Seconds beyond a server's start for everything else that changing the number of servers takes.
SCALE_GRACE = 90.0

app = typer.Typer(
    help="Asynchronous reinforcement learning for language models: Megatron trains, SGLang generates, neither waits.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, such as configs/quickstart.yaml.")]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/quickstart-20260101-120000.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the configuration, such as trainer.tensor_parallel=4."),
]


@app.command(
    epilog="[bold]Examples[/]\n\nmegasync train configs/quickstart.yaml\n\n"
    "megasync train configs/qwen3_8b_math.yaml trainer.tensor_parallel=2 trainer.data_parallel=2"
)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    continue_file: Annotated[
        Path | None,
        typer.Option("--continue", metavar="FILE", help="Names the run; it goes on where FILE is there already."),
    ] = None,
) -> None:
    """Train as CONFIG says.

    Everything about the run is left in runs/<name>-<time>/. Ctrl-C once finishes the step, saves and ends; twice leaves
    at once.
    """
    from megasync.app.continuing import settings
    from megasync.config import load_config
    from megasync.preflight.check import check_config

    source, changes = settings(config, overrides or (), continue_file)
    if source != config:
        typer.echo(f"going on as {source} says", err=True)
    loaded = load_config(source, changes)
    check_config(loaded)  # before the import below, which takes seconds

    from megasync import AsyncTrainer

    _run(AsyncTrainer.begin_or_resume(loaded, continue_file) if continue_file else AsyncTrainer(loaded))


@app.command(
    epilog="[bold]Examples[/]\n\nmegasync resume runs/quickstart-20260101-120000\n\n"
    "megasync resume runs/quickstart-20260101-120000 schedule.total_steps=500"
)
def resume(run: RunDirectory, overrides: Overrides = None) -> None:
    """Go on with RUN from its newest complete checkpoint (or its start), in the same directory."""
    from megasync import AsyncTrainer

    _run(AsyncTrainer.resume(run, overrides or ()))


@app.command(
    epilog="[bold]Examples[/]\n\nmegasync plan configs/qwen3_32b_math.yaml\n\n"
    "megasync plan configs/qwen3_8b_math.yaml rollout.servers=2 --device-memory 141"
)
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    device_memory: Annotated[
        float | None, typer.Option(metavar="GB", min=1, max=10_000, help="Memory of one GPU; 80 GB when not given.")
    ] = None,
) -> None:
    """Show what CONFIG would start: pools, ranks, buffer, staleness, memory. Starts nothing.

    Status 2 when it cannot fit into the devices' memory; the nearest configuration that does is named then. The model
    need not be here: model.config may name a config.json that is read instead.
    """
    from megasync.config import load_config
    from megasync.preflight.check import check_config
    from megasync.preflight.plan import resolve_plan
    from megasync.preflight.render import print_plan

    loaded = load_config(config, overrides or ())
    check_config(loaded, planning=True)
    resolved = resolve_plan(loaded, None if device_memory is None else int(device_memory * 1e9))
    print_plan(resolved, _console())
    if resolved.refusals:
        raise typer.Exit(REFUSED)


@app.command(epilog="[bold]Example[/]\n\nmegasync scale runs/quickstart-20260101-120000 rollout=3")
def scale(
    run: RunDirectory,
    size: Annotated[str, typer.Argument(metavar="rollout=N", help="Servers that the run shall have from now on.")],
) -> None:
    """Add servers to RUN, or remove some, while it goes on.

    An added server serves after the next weight sync. What a removed one was generating goes on elsewhere.
    """
    from megasync.app.mailbox import ask
    from megasync.config import CONFIG_FILE, load_config
    from megasync.errors import ConfigError

    pool, _, number = size.partition("=")
    if pool != "rollout" or not number.isdecimal():
        raise ConfigError(f"{size!r} does not say how many servers; write rollout=N, such as rollout=3")
    settings = run / CONFIG_FILE
    # The run itself waits so long for a server.
    patience = load_config(settings).timeouts.server_start + SCALE_GRACE if settings.is_file() else SCALE_GRACE
    done = ask(run, "scale", int(number), timeout=patience)
    _console().print(done, highlight=False, soft_wrap=True)


app.command(
    "eval",
    epilog="[bold]Examples[/]\n\nmegasync eval runs/quickstart-20260101-120000\n\n"
    "megasync eval configs/quickstart.yaml --model models/digits eval.samples=32\n\n"
    "megasync eval configs/qwen3_8b_math.yaml --set eval eval.temperatures=[0.6] eval.repeats=8",
)(evaluate)


@app.command(epilog="[bold]Example[/]\n\nmegasync export runs/quickstart-20260101-120000 models/digits-trained")
def export(
    run: RunDirectory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist yet, or be empty.")],
) -> None:
    """Write the newest checkpoint of RUN as a Hugging Face model folder (safetensors, config, tokenizer)."""
    from megasync.config import CONFIG_FILE, load_config
    from megasync.errors import CheckpointError, ConfigError

    settings = run / CONFIG_FILE
    if not settings.is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {CONFIG_FILE}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; name another folder")

    from megasync.layout.shards import export_checkpoint
    from megasync.trainer.checkpoint import latest

    checkpoint = latest(run)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no complete checkpoint to export yet")
    export_checkpoint(checkpoint, Path(load_config(settings).model.path), out)
    _console().print(f"wrote {out} from {checkpoint}", highlight=False, soft_wrap=True)


@app.command(
    epilog="[bold]Examples[/]\n\nmegasync check-layout models/smollm2 --tp 3 --pp 2 --engine-tp 2\n\n"
    "megasync check-layout models/qwen3-30b-a3b --tp 2 --pp 2 --dp 2 --ep 4 --etp 1 --engine-tp 4 --random"
)
def check_layout(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face model folder.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the trainer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data replicas.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    etp: Annotated[int | None, typer.Option(min=1, help="Ranks that share an expert; --tp when not given.")] = None,
    vpp: Annotated[int, typer.Option(min=1, help="Virtual stages of each pipeline stage.")] = 1,
    engine_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the engine.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="Of both sides; config.json's own when not given.")] = None,
    bucket_mb: Annotated[int, typer.Option(min=1, help="Largest message (sync.bucket_mb).")] = 256,
    random: Annotated[bool, typer.Option("--random", help="Make weights up; MODEL needs a config.json only.")] = False,
    device: Annotated[str, typer.Option(help="The engine's: auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Check that MODEL's weights get from a trainer's ranks into an engine's and back, bit for bit.

    Cuts the weights as the trainer holds them, moves every parcel of a shard-to-shard sync in this process, and compares
    what arrives with what SGLang's own loader would leave. No trainer, server or GPU. Status 1 names the tensors.
    """
    from megasync.device import check_machine, resolve_device
    from megasync.errors import SyncError
    from megasync.layout.topology import Topology
    from megasync.preflight.layout_check import check_layout as check
    from megasync.preflight.render_layout import report_data, report_tables
    from megasync.serving.engine_blueprint import engine_ranks

    topology = Topology(tensor=tp, pipeline=pp, data=dp, expert=ep, expert_tensor=etp, virtual=vpp)
    check_machine(device, trains=False)
    place = resolve_device(device)
    try:
        report = check(
            model,
            topology,
            place.spec,
            dtype,
            bucket_mb,
            random,
            lambda served, specs: engine_ranks(model, engine_tp, served, place.kind, specs),
        )
    except SyncError as error:
        # The two layouts do not fit each other: an outcome, not a wrong question.
        _complain(str(error))
        raise typer.Exit(UNHEALTHY) from None
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(report_data(report), indent=2))
    else:
        _console().print(report_tables(report))
    if report.problems:
        raise typer.Exit(UNHEALTHY)


@app.command(
    epilog="[bold]Examples[/]\n\nmegasync chaos configs/quickstart.yaml --minutes 10\n\n"
    "megasync chaos configs/quickstart.yaml --kill server,rank --stop --seed 7 timeouts.train_step=60 "
    "timeouts.weight_sync=60\n\n"
    "megasync chaos configs/quickstart.yaml --slow --disk /mnt/small run_root=/mnt/small/runs"
)
def chaos(
    config: ConfigFile,
    overrides: Overrides = None,
    kill: Annotated[
        str, typer.Option(help="Processes to kill: server, router, rank, buffer, controller; '' for none.")
    ] = "server,router,rank,buffer",
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to go on, from the start of the run.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the order, the moments and the victims.")] = 0,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="End when each kind of fault was injected so often.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop processes (SIGSTOP) as often as kill them.")] = False,
    slow: Annotated[bool, typer.Option("--slow", help="Also slow a server down to a fifth of its speed.")] = False,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="MOUNT",
            help="Also fill this filesystem and empty it again. It must hold run_root and nothing else, such as a tmpfs.",
        ),
    ] = None,
    cut: Annotated[
        str | None,
        typer.Option(
            metavar="NETNS/IFACE",
            help="Also take down this link, where the hosts of the run are network namespaces. Needs root.",
        ),
    ] = None,
    hold: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a slow server, a full disk and a cut link last.")
    ] = 20.0,
    pause: Annotated[float, typer.Option(min=0.0, help="Longest random wait between two faults, in seconds.")] = 20.0,
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the next step after a fault.")] = 600.0,
) -> None:
    """Train as CONFIG says, and inject faults at random moments.

    Ends with a table of the faults and how long the run took to recover (until the next step), the ledger's balance and
    the held-out score. Status 1 when the run did not recover, or anything was lost. For processes on this machine.
    """
    from megasync.chaos.render import verdict_tables
    from megasync.chaos.run import Chaos
    from megasync.config import load_config
    from megasync.preflight.check import check_config

    loaded = load_config(config, overrides or ())
    console = _console()
    experiment = Chaos(
        config,
        loaded,
        overrides or (),
        [kind for kind in kill.split(",") if kind],
        seed,
        stop=stop,
        pause=pause,
        patience=patience,
        hold=hold,
        slow=slow,
        disk=disk,
        cut=cut,
        say=lambda text: console.print(text, highlight=False, soft_wrap=True),
    )
    check_config(loaded)
    verdict = experiment.run(minutes, rounds)
    console.print(verdict_tables(verdict))
    if verdict.problems:
        raise typer.Exit(UNHEALTHY)


@app.command(epilog="[bold]Examples[/]\n\nmegasync simulate --seeds 10000\n\nmegasync simulate --seed 4711 --history")
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Schedules to run.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to run them in.")] = 1,
    history: Annotated[bool, typer.Option("--history", help="Run the first one only and print what happened.")] = False,
) -> None:
    """Run the controller, the buffer and the rollout in virtual time under random schedules of faults.

    Status 1 names the first seed that breaks a law; the same seed repeats it.
    """
    from megasync.sim.report import report

    raise typer.Exit(report(range(seed, seed + (1 if history else seeds)), history, _console(), jobs))


app.command(
    epilog="[bold]Examples[/]\n\nmegasync launch configs/qwen3_32b_math.yaml --hosts gpu1,gpu2,gpu3\n\n"
    "megasync launch configs/qwen3_32b_math.yaml --hosts hosts.txt --dry-run trainer.tensor_parallel=4"
)(launch)


@app.command(
    epilog="[bold]Examples[/]\n\nmegasync doctor\n\nmegasync doctor configs/quickstart.yaml\n\n"
    "megasync doctor --cluster auto --nodes 4 my_run.yaml"
)
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="Also what it needs: model, folders, devices.")
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="All nodes of this Ray cluster instead: auto or host:port.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the cluster should have.")] = 1,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for them.")] = 0.0,
) -> None:
    """Examine this machine: versions, patches, devices, ports, Ray, memory, disk, plugins; with CONFIG what that run needs.
    Status 1 on a failure.

    With --cluster every node, what must be equal on all of them (code, versions, devices, clocks, folders), and the ways
    between them.
    """
    from megasync.config import load_config
    from megasync.preflight.doctor import FAILURE, examine
    from megasync.preflight.render import findings_table

    loaded = load_config(config, overrides or ()) if config else None
    if cluster is None:
        findings = examine(loaded)
    else:
        from megasync.preflight.cluster_doctor import examine_cluster

        findings = examine_cluster(cluster, nodes, wait, loaded)
    _console().print(findings_table(findings))
    if any(finding.status == FAILURE for finding in findings):
        raise typer.Exit(UNHEALTHY)


@app.command(epilog="[bold]Examples[/]\n\nmegasync fetch digits\n\nmegasync fetch smollm2 --out /data/models/smollm2")
def fetch(
    name: Annotated[str, typer.Argument(help="digits (tiny, random weights) or smollm2 (SmolLM2-135M-Instruct).")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; models/NAME when not given.")] = None,
) -> None:
    """Make a small model's folder: configuration, weights, tokenizer."""
    from megasync.models import fetch as write_model

    folder = write_model(name, out or Path("models") / name)
    _console().print(f"{name} is in {folder}", highlight=False, soft_wrap=True)


def _run(trainer: AsyncTrainer) -> None:
    from megasync.observe.result import show_result

    try:
        result = trainer.train()
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "interrupted")
        raise typer.Exit(INTERRUPTED) from None
    show_result(result, _console())


def _console() -> Console:
    from rich.console import Console

    return Console()


def main() -> None:
    """Entry point of the `megasync` program."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Into a file, too, each line at once: runs are watched there.
        sys.stdout.reconfigure(line_buffering=True)
    # Functions that a configuration names may lie in this folder; installed packages come first.
    sys.path.append(os.getcwd())
    try:
        app()
    except MegasyncError as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        _complain(f"{type(error).__name__}: {error}")
        sys.exit(REFUSED)
    finally:
        # The interpreter ends with a search for garbage in all that was imported, which takes seconds.
        gc.freeze()


def _complain(text: str) -> None:
    typer.secho(text, err=True, fg=typer.colors.RED, bold=True)
