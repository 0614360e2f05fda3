"""What runs on each machine of a job, on a leash: `python -m megasync.launch.node {ray,run} ...`.

`ray` is a Ray node in the foreground, `run` any command, such as the training's driver. Both get the address and the
interface by which the job's other machines reach this one.
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
from pathlib import Path

from megasync_patches import PatchError, ray_bind

from megasync.cluster.marks import PLENTY, mark_of
from megasync.config.host import HOST_VARIABLE
from megasync.device import resolve_device
from megasync.errors import MegasyncError
from megasync.launch import ray_logs
from megasync.launch.family import children_of, end_all
from megasync.launch.interface import address_of, address_towards, interface_of
from megasync.launch.leash import Leash
from megasync.serving.ports import free_port
from megasync.serving.process import ManagedProcess

# Begins the line by which a Ray node says where it is; JSON follows.
READY = "megasync-node "
# What has begun to end by itself has this long before it is killed.
STOP_SECONDS = 20.0
HEAD_SECONDS = 90.0
LOOK_SECONDS = 0.1
# Workers end by themselves when they find Ray gone.
GONE_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    leash = Leash()
    os.chdir(args.folder)
    try:
        address = address_of(args.interface) if args.interface else address_towards(args.peer)
        os.environ |= {HOST_VARIABLE: address} | leash.environment
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface_of(address))
        _confine(address, say=args.what == "ray")
        return _run(args, leash) if args.what == "run" else _ray(args, leash, address)
    except MegasyncError as error:
        print(f"{socket.gethostname()}: {error}", flush=True)
        return 2


def _confine(address: str, say: bool) -> None:
    """All that is started from here listens on this address, or on loopback; a machine where that cannot be says so."""
    os.environ[ray_bind.VARIABLE] = address
    try:
        if ray_bind.PATCH.needed():
            ray_bind.PATCH.apply()
    except PatchError as error:
        if say:
            print(
                f"Ray listens on ALL interfaces of {socket.gethostname()}: {error}; until then, let a firewall keep "
                "strangers from this machine's ports",
                flush=True,
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megasync.launch.node")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--peer", default="", help="another machine of the job; the way to it chooses the interface")
    parser.add_argument("--interface", default="")
    what = parser.add_subparsers(dest="what", required=True)
    ray = what.add_parser("ray")
    ray.add_argument("--head", default="", help="ADDRESS:PORT of the head; without one this is the head")
    ray.add_argument("--device", default="auto")
    ray.add_argument("--devices", type=int, required=True, help="cluster.devices_per_node")
    ray.add_argument("--pool", default="")
    ray.add_argument("--log", required=True)
    run = what.add_parser("run")
    run.add_argument("--stop", type=float, default=STOP_SECONDS, help="seconds that the command has to end by itself")
    run.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _ray(args: argparse.Namespace, leash: Leash, address: str) -> int:
    port = 0 if args.head else free_port(address)
    # Without GPUs a rank is a CPU in Ray's books, however many cores it gets; with them Ray counts by itself.
    cpus = args.devices if resolve_device(args.device).kind == "cpu" else 0
    node = ManagedProcess(ray_command(address, args.head, port, cpus, args.pool), os.environ, args.log)
    node.start()
    leash.hold()
    ready = args.head or _listens(address, port, node, leash)
    if ready:
        where = {"head": args.head or f"{address}:{port}", "address": address, "interface": interface_of(address)}
        print(READY + json.dumps(where), flush=True)
    folder = None
    while ready and node.alive() and not leash.ended.wait(LOOK_SECONDS):
        folder = folder or ray_logs.log_folder(node.pid)
    asked = leash.ended.is_set()
    family = children_of(node.pid)
    asyncio.run(node.stop(STOP_SECONDS))
    end_all(family, GONE_SECONDS)
    if folder is not None:
        _keep_logs(folder, Path(args.log))
    if not asked:
        # Without the counters that Ray's processes write when they end.
        words = "\n".join(line for line in node.tail().splitlines() if "[state-dump]" not in line)
        print(f"the Ray node ended by itself with status {node.returncode}; {args.log} ends:\n{words}", flush=True)
    return 0 if asked else 1


def _keep_logs(folder: Path, log: Path) -> None:
    try:
        ray_logs.keep(folder, log)
    except OSError as error:
        print(f"Ray's logs stay in {folder}: {error}", flush=True)


def ray_command(address: str, head: str, port: int, cpus: int, pool: str) -> list[str]:
    """Starts a Ray node in the foreground; without `head` the head, at this port."""
    # Without what nobody uses here; the autoscaler's monitor would listen on all interfaces. Ray's own client cannot be left
    # out, but has a port that all heads on a machine would share.
    bare = ("--include-dashboard=false", "--no-monitor", f"--ray-client-server-port={free_port(address)}")
    where = [f"--address={head}"] if head else ["--head", f"--port={port}", *bare]
    return [
        sys.executable,
        *("-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", f"--node-ip-address={address}"),
        *where,
        *([f"--num-cpus={cpus}"] if cpus else []),
        *([f"--resources={json.dumps({mark_of(pool): PLENTY})}"] if pool else []),
    ]


def _listens(address: str, port: int, node: ManagedProcess, leash: Leash) -> bool:
    deadline = time.monotonic() + HEAD_SECONDS
    while node.alive() and not leash.ended.is_set() and time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=1.0):
                return True
        except OSError:
            time.sleep(LOOK_SECONDS)
    return False


def _run(args: argparse.Namespace, leash: Leash) -> int:
    command = subprocess.Popen(args.command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pass_on(number: signal.Signals) -> None:
        if command.poll() is None:
            command.send_signal(number)

    leash.on_signal = pass_on
    leash.hold()
    while command.poll() is None and not leash.ended.wait(LOOK_SECONDS):
        pass
    pass_on(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(args.stop)
    # The command, when it did not listen, and what it left behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    code = command.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
