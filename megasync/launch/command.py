"""The command `megasync launch`: one run on several hosts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megasync.concurrency.event_loop import handle_signals
from megasync.errors import ConfigError, MegasyncError
from megasync.launch.remote import SSH

if TYPE_CHECKING:
    from megasync.launch.launcher import Job

INTERRUPTED = 130


def launch(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Configuration overrides.")] = None,
    hosts: Annotated[
        str, typer.Option(help="Hosts: h1,h2,... or a file with one host per line. The driver runs on the first.")
    ] = "",
    slurm: Annotated[bool, typer.Option("--slurm", help="Use the nodes of the surrounding Slurm job.")] = False,
    shell: Annotated[str, typer.Option(metavar="COMMAND", help="Remote shell, called as COMMAND HOST ....")] = SSH,
    interface: Annotated[
        str, typer.Option(help="Network interface to use on all hosts. Default: the one that routes to the others.")
    ] = "",
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for all hosts to join.")] = 300.0,
    continue_file: Annotated[
        Path | None,
        typer.Option(
            "--continue",
            metavar="FILE",
            help="File that records the run's directory. If FILE exists, that run is resumed.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands without running them.")] = False,
) -> None:
    """Train with CONFIG on several hosts: starts Ray on each, runs the driver on the first, and shuts everything down.

    The checkout and the run's folders must have the same paths on all hosts. Press
    Ctrl-C once to finish the current step, save a checkpoint and stop; press it
    twice to stop immediately. Under Slurm, SIGUSR1 saves a checkpoint and requeues
    the job.
    """
    from megasync.app.resume_file import resolve_config
    from megasync.config import load_config
    from megasync.launch.hosts import read_hosts
    from megasync.launch.launcher import Job
    from megasync.launch.launcher import dry_run as commands
    from megasync.launch.slurm import SHELL, requeue, run_file, slurm_hosts
    from megasync.preflight.check import check_config

    if bool(hosts) == slurm:
        raise ConfigError("give either --hosts h1,h2,... or, inside a Slurm job, --slurm")
    if slurm and continue_file is None:
        continue_file = run_file(load_config(config, overrides or ()).run_root)
    source, changes = resolve_config(config, overrides or (), continue_file)
    if source != config:
        typer.echo(f"resuming with the configuration {source}", err=True)
    loaded = load_config(source, [*changes, "cluster.address=auto", "cluster.host=auto"])
    check_config(loaded, planning=True)
    job = Job(
        hosts=slurm_hosts() if slurm else read_hosts(hosts),
        config=loaded,
        config_file=source,
        changes=changes,
        folder=Path.cwd(),
        shell=SHELL if slurm else shell,
        interface=interface,
        continue_file=continue_file,
        wait=wait,
        logs=(Path(loaded.run_root) / "launch" / f"{datetime.now():%Y%m%d-%H%M%S}").absolute(),
    )
    if dry_run:
        typer.echo("\n".join(commands(job)))
        return
    raise typer.Exit(asyncio.run(_launch(job, requeue if slurm else None)))


async def _launch(job: Job, requeue: Callable[[], None] | None) -> int:
    from megasync.launch.launcher import Launcher

    launcher = Launcher(job, _print_line)
    task = asyncio.create_task(launcher.run(), name="launcher")
    received: list[signal.Signals] = []
    requests: set[asyncio.Task[None]] = set()

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) > 2:
            task.cancel()
            return
        request = asyncio.create_task(launcher.request_stop(signal.SIGINT))
        requests.add(request)
        request.add_done_callback(requests.discard)

    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if requeue else [])]
    try:
        with handle_signals(numbers, on_signal):
            code = await task
    except asyncio.CancelledError:
        return INTERRUPTED
    except MegasyncError:
        if not received:
            raise
        code = INTERRUPTED
    if requeue is not None and signal.SIGUSR1 in received:
        outcome = f"exited with status {code}" if code else "saved a checkpoint"
        _print_line(f"the run {outcome}; requeueing the job")
        await asyncio.to_thread(requeue)
    elif code:
        _print_line(f"the run exited with status {code}")
    return code


def _print_line(line: str) -> None:
    """Prints a line; a full disk or a closed reader loses the line, not the run."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
