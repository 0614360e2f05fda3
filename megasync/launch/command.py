"""`megasync launch`: one run on several machines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from megasync.errors import ConfigError, MegasyncError
from megasync.launch.remote import SSH

INTERRUPTED = 130


def launch(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, such as configs/qwen3_32b_math.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the configuration.")
    ] = None,
    hosts: Annotated[
        str, typer.Option(help="The machines: h1,h2,... or a file with one a line. The first one gets the driver.")
    ] = "",
    slurm: Annotated[bool, typer.Option("--slurm", help="Take the machines of the Slurm job around this.")] = False,
    shell: Annotated[
        str, typer.Option(metavar="COMMAND", help="Runs a command on a machine, which is named behind it.")
    ] = SSH,
    interface: Annotated[
        str, typer.Option(help="Network interface of all machines; the one that leads to the others when not given.")
    ] = "",
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds for all machines to come up.")] = 300.0,
    continue_file: Annotated[
        Path | None,
        typer.Option("--continue", metavar="FILE", help="Names the run; it goes on where FILE is there already."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, start nothing.")] = False,
) -> None:
    """Train as CONFIG says on several machines: a Ray node on each, the run on the first, nothing left at the end.

    The project and the run's folders must lie at the same paths on all machines. Ctrl-C once finishes the step, saves
    and ends; twice leaves at once. Under Slurm, SIGUSR1 saves and puts the job back into the queue.
    """
    from megasync.app.continuing import settings
    from megasync.config import load_config
    from megasync.launch.hosts import read_hosts
    from megasync.launch.launcher import Job
    from megasync.launch.launcher import dry_run as commands
    from megasync.launch.slurm import SHELL, requeue, run_file, slurm_hosts
    from megasync.preflight.check import check_config

    if bool(hosts) == slurm:
        raise ConfigError("name the machines by --hosts h1,h2,..., or take a Slurm job's by --slurm")
    if slurm and continue_file is None:
        continue_file = run_file(load_config(config, overrides or ()).run_root)
    source, changes = settings(config, overrides or (), continue_file)
    if source != config:
        typer.echo(f"going on as {source} says", err=True)
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


async def _launch(job: object, requeue: Callable[[], None] | None) -> int:
    from megasync.launch.launcher import Launcher

    launcher = Launcher(job, _say)
    task = asyncio.create_task(launcher.run(), name="launcher")
    loop, seen, sent = asyncio.get_running_loop(), [], set()

    def on_signal(number: signal.Signals) -> None:
        seen.append(number)
        if len(seen) > 2:
            task.cancel()
            return
        request = loop.create_task(launcher.request_stop(signal.SIGINT))
        sent.add(request)
        request.add_done_callback(sent.discard)

    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if requeue else [])]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        code = await task
    except asyncio.CancelledError:
        return INTERRUPTED
    except MegasyncError:
        if not seen:
            raise
        code = INTERRUPTED
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    if requeue is not None and signal.SIGUSR1 in seen:
        end = f"ended with status {code}" if code else "is saved"
        _say(f"the run {end}; the job goes back into the queue")
        await asyncio.to_thread(requeue)
    elif code:
        _say(f"the run ended with status {code}")
    return code


def _say(line: str) -> None:
    """A full disk, or a reader that has gone, costs the line and not the run."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
