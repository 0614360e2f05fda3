"""Brings a job up on its machines and takes it down again. Runs where the job was asked for.

step                     waits for                    until
-----------------------  ---------------------------  ------------------------------------------
head                     its line                     HEAD_SECONDS; an error ends the job
other nodes              nothing: the doctor does     one that cannot execute its command ends the job
doctor                   all nodes, then its checks   `wait` seconds for the nodes; a failure ends the job
run                      its end                      it ends; a node that is lost meanwhile is started again,
                                                      but for the head, with which the run ends
taking down              each machine                 END_SECONDS each, all at once, the head last
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from megasync.config import Config
from megasync.config.access import GENERATION_KEY_VARIABLE, given_generation_key
from megasync.errors import MegasyncError
from megasync.launch.hosts import Host
from megasync.launch.node import HEAD_SECONDS, READY, STOP_SECONDS
from megasync.launch.remote import SSH, Remote, shell_command

log = logging.getLogger(__name__)

END_SECONDS = STOP_SECONDS + 15.0
# The status of a job that was stopped before its run began.
STOPPED = 130
# With which `megasync train` ends by itself: done, refused or failed with a reason, stopped.
OWN_ENDS = (0, 2, STOPPED)
# With which a shell ends that cannot execute a command, or does not find it.
NOT_EXECUTED = (126, 127)
# Between two tries to bring a lost node back: the first, and at most.
AGAIN_SECONDS, AGAIN_MOST = 5.0, 60.0
# Stands for what is known only when the head is up.
HEAD_PLACE = "HEAD:PORT"
# What each machine adds to the commands by itself.
DRY_RUN_NOTE = (
    "# Each host runs what is below with LD_PRELOAD=ray_bind.so, which its C compiler makes of ray_bind.c beside the "
    "environment, and MEGASYNC_BIND=ADDRESS, so that Ray listens on that address alone."
)


@dataclass(frozen=True)
class Job:
    """What is to run, and how its machines are reached."""

    hosts: list[Host]
    config: Config
    config_file: Path
    # `key=value`, as `config` has them already.
    changes: list[str]
    folder: Path
    shell: str = SSH
    interface: str = ""
    python: str = sys.executable
    # Names the run to go on with; null begins a new one.
    continue_file: Path | None = None
    # Seconds for all nodes to come up.
    wait: float = 300.0
    # Where each machine keeps the log of its Ray node.
    logs: Path = field(default_factory=lambda: Path("runs") / "launch")

    def ray_node(self, host: Host, head: str) -> list[str]:
        cluster = self.config.cluster
        words = ["ray", "--device", cluster.device, "--devices", str(cluster.devices_per_node)]
        words += ["--head", head] if head else []
        words += ["--pool", host.pool] if host.pool else []
        return self._node(host, [*words, "--log", str(self.logs / f"ray-{host.name}.log")])

    def on_head(self, command: Sequence[str], stop: float = STOP_SECONDS) -> list[str]:
        return self._node(self.hosts[0], ["run", "--stop", f"{stop:g}", *command])

    def doctor(self, head: str) -> list[str]:
        nodes = ["--nodes", str(len(self.hosts)), "--wait", f"{self.wait:g}"]
        return [self.python, "-m", "megasync", "doctor", "--cluster", head, *nodes, *self._config()]

    def driver(self, head: str) -> list[str]:
        named = ["--continue", str(self.continue_file)] if self.continue_file else []
        place = [f"cluster.address={head}", "cluster.host=auto"]
        return [self.python, "-m", "megasync", "train", *named, *self._config(), *place]

    @property
    def patience(self) -> float:
        """Seconds that a run which was asked to end may take: it finishes its step and saves."""
        limits = self.config.timeouts
        return limits.train_step + limits.weight_sync + limits.shutdown

    def _config(self) -> list[str]:
        return [str(self.config_file), *self.changes]

    def _node(self, host: Host, words: list[str]) -> list[str]:
        """The way to the head, and the head's to some other machine, chooses the interface."""
        head, *others = self.hosts
        peer = head.called if host is not head else others[0].called if others else ""
        node = [self.python, "-m", "megasync.launch.node", "--folder", str(self.folder), "--peer", peer]
        node += ["--interface", self.interface] if self.interface else []
        return shell_command(host.shell or self.shell, host.name, node + words)


def dry_run(job: Job) -> list[str]:
    """The command lines of a job, in order, as they could be typed, behind a note; its secrets go another way."""
    head, *others = job.hosts
    commands = [job.ray_node(head, "")]
    commands += [job.ray_node(host, HEAD_PLACE) for host in others]
    commands += [job.on_head(job.doctor(HEAD_PLACE)), job.on_head(job.driver(HEAD_PLACE), job.patience)]
    return [DRY_RUN_NOTE, *(shlex.join(command) for command in commands)]


class Launcher:
    """`say` gets what a person should see. One job; not reusable."""

    def __init__(self, job: Job, say: Callable[[str], None] = print) -> None:
        self._job = job
        self._say = say
        self._environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Environment variables that only the driver gets.
        self._secrets = {} if (key := given_generation_key()) is None else {GENERATION_KEY_VARIABLE: key}
        self._driver: Remote | None = None
        self._stopping = asyncio.Event()
        # Why the job ended, where that was not the run's own doing.
        self._lost = ""
        self._begun = False
        self._farewell: asyncio.Task | None = None
        # What the machines have said of themselves, by host.
        self._places: dict[str, dict[str, str]] = {}

    async def run(self) -> int:
        """The driver's exit status. Whatever happens, every machine has put its part away when this returns or raises.

        Raises MegasyncError when the nodes do not come up, the doctor finds something, or the head is lost.
        """
        async with AsyncExitStack() as stack:
            head, mourner = await self._start_head(stack)
            keepers = [
                asyncio.create_task(self._keep(host, head), name=f"node {host.name}") for host in self._job.hosts[1:]
            ]
            for keeper in keepers:
                keeper.add_done_callback(self._report)
            stack.push_async_callback(_cancel, keepers)
            code = await self._work(head)
            if code not in OWN_ENDS and not self._stopping.is_set():
                # Ray takes the driver with it; which of the two is heard of first is chance.
                await asyncio.wait([mourner], timeout=END_SECONDS)
            if self._lost:
                raise MegasyncError(self._lost)
            return code

    async def _work(self, head: str) -> int:
        code = await self._on_head(self._job.doctor(head), STOP_SECONDS)
        if self._stopping.is_set():
            return code or STOPPED
        if code:
            raise MegasyncError(
                "the machines are not ready; what to do stands above, and the Ray nodes' logs are in "
                f"{self._job.logs} of each machine"
            )
        self._begun = True
        self._say("starting the run")
        return await self._on_head(self._job.driver(head), self._job.patience)

    async def request_stop(self, number: signal.Signals) -> None:
        """Passes a signal on to the run; once more makes it leave at once."""
        self._stopping.set()
        if self._driver is not None:
            await self._driver.send(number)

    async def _start_head(self, stack: AsyncExitStack) -> tuple[str, asyncio.Task]:
        """Its address, and the task that ends when it is lost."""
        host = self._job.hosts[0]
        node = await self._start_node(host, "")
        stack.push_async_callback(node.end, END_SECONDS)
        ended = asyncio.create_task(node.wait())
        deadline = asyncio.get_running_loop().time() + HEAD_SECONDS + END_SECONDS
        while host.name not in self._places:
            late = asyncio.get_running_loop().time() >= deadline
            if late or ended.done() or self._stopping.is_set():
                ended.cancel()
                test = shlex.join(shell_command(host.shell or self._job.shell, host.name, ["true"]))
                raise MegasyncError(
                    "stopped while Ray's head was starting"
                    if self._stopping.is_set()
                    else f"Ray's head did not start on {host.name}; is the project there at {self._job.folder}, and does "
                    f"`{test}` work?"
                )
            await asyncio.sleep(0.05)
        ended.cancel()
        mourner = asyncio.create_task(self._mourn(node), name="head")
        stack.push_async_callback(_cancel, [mourner])
        return self._places[host.name]["head"], mourner

    async def _mourn(self, head: Remote) -> None:
        """Without its head nothing of the Ray cluster answers any more: the run is told to leave at once."""
        code = await head.wait()
        self._lost = (
            f"Ray's head on {head.host} was lost (status {code}), and the run with it; `megasync resume`, or the same "
            "command where it has --continue, goes on from the last checkpoint"
        )
        for _ in range(2):
            await self.request_stop(signal.SIGINT)

    async def _start_node(self, host: Host, head: str) -> Remote:
        def said(line: str) -> None:
            if not line.startswith(READY):
                self._say(f"[{host.name}] {line}")
                return
            place = self._places[host.name] = json.loads(line.removeprefix(READY))
            self._say(f"[{host.name}] Ray node at {place['address']}, interface {place['interface']}")

        node = Remote(host.name, self._job.ray_node(host, head), said)
        try:
            await node.start(self._environment)
        except OSError as error:
            raise MegasyncError(f"cannot execute the remote shell {self._job.shell!r}: {error}") from error
        return node

    async def _keep(self, host: Host, head: str) -> None:
        """Starts the node, and starts it again whenever it is lost."""
        pause = AGAIN_SECONDS
        while True:
            node = await self._start_node(host, head)
            began = asyncio.get_running_loop().time()
            try:
                code = await node.wait()
            finally:
                await node.end(END_SECONDS)
            if code in NOT_EXECUTED and not self._begun:
                raise MegasyncError(
                    f"{host.name} cannot execute {self._job.python}; the checkout must lie at {self._job.folder} there, "
                    "with its environment made by launch/setup.sh"
                )
            if asyncio.get_running_loop().time() - began > AGAIN_MOST:
                pause = AGAIN_SECONDS
            self._say(f"[{host.name}] its node ended with status {code}; trying again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, AGAIN_MOST)

    def _report(self, keeper: asyncio.Task) -> None:
        """A node that nobody keeps any more is not started again. A run that has begun may go on without it."""
        if keeper.cancelled() or (error := keeper.exception()) is None:
            return
        self._say(f"{keeper.get_name()} is given up: {error}")
        if not self._begun:
            self._lost = str(error)
            self._farewell = asyncio.create_task(self.request_stop(signal.SIGINT))

    async def _on_head(self, command: Sequence[str], stop: float) -> int:
        remote = Remote(self._job.hosts[0].name, self._job.on_head(command, stop), self._say)
        await remote.start(self._environment | self._secrets)
        self._driver = remote
        try:
            if self._stopping.is_set():
                # Asked for while it was being started.
                await remote.send(signal.SIGINT)
            return await remote.wait()
        finally:
            self._driver = None
            await remote.end(stop + END_SECONDS)


async def _cancel(tasks: Sequence[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
