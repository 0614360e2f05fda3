"""What the launcher starts on each host of a job: `python -m megasync.launch.node {ray,run} ...`.

`ray` runs a Ray node in the foreground; `run` runs any command, such as the training driver. Both receive the address
and the interface by which the other hosts reach this one, and end when the control pipe closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from megasync_patches import PatchError, ray_bind  # pyright: ignore[reportMissingImports] - the folder patches/

from megasync.base.files import ray_environment
from megasync.config.host import HOST_VARIABLE, LOOPBACK, route_from
from megasync.config.pools import NODE_RESOURCE_AMOUNT, node_resource
from megasync.device import resolve_device
from megasync.errors import ConfigError, MegasyncError, raised_as
from megasync.launch.control_pipe import ControlPipe
from megasync.serving.process import ManagedProcess, free_port

# Prefix of the line by which a Ray node reports that it is ready; JSON follows.
READY = "megasync-node "
# Grace period between asking a process to exit and killing it.
STOP_SECONDS = 20.0
# Deadline for the Ray head to listen.
HEAD_SECONDS = 90.0
POLL_SECONDS = 0.1
# Ray's workers exit on their own when they notice that their node is gone.
WORKER_EXIT_SECONDS = 5.0
# Longer log files of Ray are copied from this many bytes before their end.
MAX_LOG_BYTES = 4 * 2**20
_LOG_DIR_OPTIONS = ("--log_dir=", "--log-dir=")


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    pipe = ControlPipe()
    os.chdir(args.folder)
    try:
        address = address_of(args.interface) if args.interface else address_towards(args.peer)
        os.environ |= {HOST_VARIABLE: address} | pipe.environment
        os.environ.update(ray_environment(os.environ))
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface_of(address))
        _bind_to(address, report=args.what == "ray")
        return _run(args, pipe) if args.what == "run" else _ray(args, pipe, address)
    except MegasyncError as error:
        print(f"{socket.gethostname()}: {error}", flush=True)
        return 2


def address_towards(peer: str) -> str:
    """This host's IPv4 address on the route to `peer` (a host name or address), or on the default route if it is "".

    Raises ConfigError if the name does not resolve or there is no route.
    """
    if not peer:
        return route_from() or LOOPBACK
    here = socket.gethostname()
    with raised_as(ConfigError, f"{here} cannot resolve the host {peer!r}", "list hosts by address"):
        answers = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
    targets = [target for family, _, _, _, target in answers if family == socket.AF_INET]
    if not targets:
        raise ConfigError(f"{here} resolves {peer!r} to IPv6 only ({answers[0][4][0]}); list hosts by IPv4 address")
    address = route_from(targets[0])
    if address is None:
        raise ConfigError(f"{here} has no route to {peer!r}; choose the interface with --interface")
    return address


def interface_of(address: str) -> str:
    """The name of the interface that has this address. Raises ConfigError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    raise ConfigError(f"{socket.gethostname()} has no interface with the address {address}")


def address_of(interface: str) -> str:
    """The first IPv4 address of an interface. Raises ConfigError if there is none."""
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        names = ", ".join(sorted(interfaces))
        raise ConfigError(f"{socket.gethostname()} has no interface {interface!r}; it has {names}")
    for entry in interfaces[interface]:
        if entry.family == socket.AF_INET:
            return entry.address
    raise ConfigError(f"interface {interface!r} of {socket.gethostname()} has no IPv4 address")


def _bind_to(address: str, report: bool) -> None:
    """Makes all child processes listen on this address or on loopback; prints a warning where that is impossible."""
    os.environ[ray_bind.VARIABLE] = address
    try:
        if ray_bind.PATCH.needed():
            ray_bind.PATCH.apply()
    except PatchError as error:
        if report:
            print(
                f"WARNING Ray listens on ALL interfaces of {socket.gethostname()}: {error}; until this is fixed, "
                "protect the host's ports with a firewall",
                flush=True,
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megasync.launch.node")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--peer", default="", help="another host of the job; the route to it selects the interface")
    parser.add_argument("--interface", default="")
    what = parser.add_subparsers(dest="what", required=True)
    ray = what.add_parser("ray")
    ray.add_argument("--head", default="", help="ADDRESS:PORT of the head; empty to start the head")
    ray.add_argument("--port", type=int, default=0, help="port of the head; 0 for any that is free")
    ray.add_argument("--device", default="auto")
    ray.add_argument("--devices", type=int, required=True, help="cluster.devices_per_node")
    ray.add_argument("--pool", default="")
    ray.add_argument("--log", required=True)
    run = what.add_parser("run")
    run.add_argument(
        "--stop", type=float, default=STOP_SECONDS, help="seconds that the command has to exit before it is killed"
    )
    run.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _ray(args: argparse.Namespace, pipe: ControlPipe, address: str) -> int:
    port = 0 if args.head else args.port or free_port(address)
    # Without GPUs each rank is accounted as one CPU in Ray, whatever its number of cores; Ray counts GPUs itself.
    cpus = args.devices if resolve_device(args.device).kind == "cpu" else 0
    node = ManagedProcess(ray_command(address, args.head, port, cpus, args.pool), os.environ, args.log)
    node.start()
    assert node.pid is not None
    pipe.watch()
    ready = args.head or _wait_for_head(address, port, node, pipe)
    if ready:
        ready_info = {"head": args.head or f"{address}:{port}", "address": address, "interface": interface_of(address)}
        print(READY + json.dumps(ready_info), flush=True)
    folder = None
    while ready and node.alive() and not pipe.ended.wait(POLL_SECONDS):
        folder = folder or ray_log_folder(node.pid)
    requested = pipe.ended.is_set()
    descendants = _descendants(node.pid)
    asyncio.run(node.stop(STOP_SECONDS))
    _end_processes(descendants, WORKER_EXIT_SECONDS)
    if folder is not None:
        try:
            copy_ray_logs(folder, Path(args.log))
        except OSError as error:
            print(f"could not copy Ray's logs from {folder}: {error}", flush=True)
    if not requested:
        # Leaves out the counters that Ray's processes print when they exit.
        tail = "\n".join(line for line in node.tail().splitlines() if "[state-dump]" not in line)
        print(f"the Ray node exited with status {node.returncode}; last lines of {args.log}:\n{tail}", flush=True)
    return 0 if requested else 1


def _descendants(pid: int) -> list[psutil.Process]:
    """All processes below this one, at any depth; none if it has exited."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end_processes(processes: Sequence[psutil.Process], timeout: float) -> None:
    """Waits for processes to exit and kills those that remain after `timeout` seconds.

    psutil identifies a process by pid and start time, so a recycled pid is never killed.
    """
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout)


def ray_log_folder(pid: int) -> Path | None:
    """The log folder of the Ray processes below this one, from their command lines; None while there are none."""
    for child in _descendants(pid):
        try:
            words = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        for word in words:
            if word.startswith(_LOG_DIR_OPTIONS):
                return Path(word.partition("=")[2])
    return None


def copy_ray_logs(folder: Path, log: Path) -> Path | None:
    """Copies the non-empty files of `folder`, which is in /tmp, to `<log without suffix>-<N>` with the first free N.

    Returns the new folder; None if Ray has written nothing. Raises OSError if the files cannot be written.
    """
    files = [path for path in sorted(folder.glob("*")) if path.is_file() and path.stat().st_size]
    if not files:
        return None
    target = _new_folder(log)
    for path in files:
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            (target / path.name).write_bytes(source.read())
    return target


def _new_folder(log: Path) -> Path:
    """Creates the first folder beside a log file whose number is free."""
    number = 1
    while True:
        target = log.with_name(f"{log.stem}-{number}")
        try:
            target.mkdir(parents=True)
            return target
        except FileExistsError:
            number += 1


def ray_command(address: str, head: str, port: int, cpus: int, pool: str) -> list[str]:
    """The command of a Ray node in the foreground: a worker node of `head`, or the head at `port` if `head` is ""."""
    # Disables what is not used; the autoscaler's monitor would listen on all interfaces. Ray's client server cannot be
    # disabled, and its default port would be shared by all heads on a host.
    bare = ("--include-dashboard=false", "--no-monitor", f"--ray-client-server-port={free_port(address)}")
    where = [f"--address={head}"] if head else ["--head", f"--port={port}", *bare]
    return [
        sys.executable,
        *("-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", f"--node-ip-address={address}"),
        *where,
        *([f"--num-cpus={cpus}"] if cpus else []),
        *([f"--resources={json.dumps({node_resource(pool): NODE_RESOURCE_AMOUNT})}"] if pool else []),
    ]


def _wait_for_head(address: str, port: int, node: ManagedProcess, pipe: ControlPipe) -> bool:
    """Whether the head accepts connections before its deadline."""
    deadline = time.monotonic() + HEAD_SECONDS
    while node.alive() and not pipe.ended.is_set() and time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=1.0):
                return True
        except OSError:
            time.sleep(POLL_SECONDS)
    return False


def _run(args: argparse.Namespace, pipe: ControlPipe) -> int:
    command = subprocess.Popen(args.command, stdin=subprocess.DEVNULL, start_new_session=True)

    def send(number: signal.Signals) -> None:
        if command.poll() is None:
            command.send_signal(number)

    pipe.on_signal = send
    pipe.watch()
    while command.poll() is None and not pipe.ended.wait(POLL_SECONDS):
        pass
    send(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(args.stop)
    # Kills the command if it ignored SIGTERM, and everything that it left running.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    code = command.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
