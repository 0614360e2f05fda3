"""Starts a job on its hosts and shuts it down again. Runs where the user started the job, or, where a scheduler starts
the same command on every host (`Job.rank`), on each of them for that host alone.

phase         waits for                           deadline and failure
------------  ----------------------------------  --------------------------------------------------------------
head          the head node's READY line          HEAD_SECONDS; a failure ends the job
other nodes   nothing (the doctor waits)          a host that cannot execute the command ends the job
doctor        all nodes, then its own checks      `wait` seconds for the nodes; a failed check ends the job
run           the driver's exit                   none; a lost node is restarted, a lost head ends the run
shutdown      every host, concurrently, the       END_SECONDS per host
              head last
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from megasync.concurrency.event_loop import handle_signals
from megasync.concurrency.tasks import cancel_and_wait, wait_for_first
from megasync.config import Config
from megasync.config.access import GENERATION_KEY_VARIABLE, SESSIONS_KEY_VARIABLE, given_key
from megasync.config.commands import is_served
from megasync.errors import ConfigError, MegasyncError, raised_as
from megasync.launch.hosts import Host
from megasync.launch.node import HEAD_SECONDS, READY, STOP_SECONDS
from megasync.launch.preemption import UNFINISHED, is_complete
from megasync.launch.remote import SSH, Remote, shell_command

log = logging.getLogger(__name__)

END_SECONDS = STOP_SECONDS + 15.0
# Exit status of a job that was stopped before its run started.
STOPPED = 130
# Exit statuses of `megasync train` itself: success, refused or failed, stopped by the user.
DRIVER_CODES = (0, 2, STOPPED)
# Exit statuses of a shell that cannot execute or find a command.
NOT_EXECUTED = (126, 127)
# Delay before restarting a lost node; it doubles from the first value to the second.
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 5.0, 60.0
# Ray's own choice of a head's port, for hosts that must know it in advance.
HEAD_PORT = 6379
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
# In place of a remote shell: the host is the one that this runs on.
LOCAL = "sh -c 'exec \"$@\"'"
# Placeholder for an address that is known only once the head is up.
HEAD_PLACE = "HEAD:PORT"
# What each host adds to its commands.
DRY_RUN_NOTE = (
    "# Each host runs these commands with MEGASYNC_BIND=ADDRESS and LD_PRELOAD=ray_bind.so (compiled on the host from "
    "patches/ray_bind.c), so that Ray listens on that address only."
)


@dataclass(frozen=True)
class Job:
    """The run to launch, and how to reach its hosts."""

    hosts: list[Host]
    config: Config
    config_file: Path
    # Overrides as `key=value`, already applied to `config`.
    changes: list[str]
    folder: Path
    shell: str = SSH
    interface: str = ""
    python: str = sys.executable
    # Records the run to resume; None starts a new one.
    continue_file: Path | None = None
    # The only host, by its number, that this launcher is for; None for all.
    rank: int | None = None
    # Seconds for all nodes to join.
    wait: float = 300.0
    # Where each host keeps the log of its Ray node.
    logs: Path = field(default_factory=lambda: Path("runs") / "launch")

    def __post_init__(self) -> None:
        if " " in self.python:
            raise ConfigError(
                f"Ray cannot start its nodes by {self.python}, because that path has a space, at which a shell would "
                "divide it. Make the environment in a folder without one, at the same path on all hosts"
            )

    def ray_node(self, host: Host, head: str) -> list[str]:
        """The command that starts a Ray node on `host`; the head node if `head` (its address) is ""."""
        cluster = self.config.cluster
        words = ["ray", "--device", cluster.device, "--devices", str(cluster.devices_per_node)]
        words += ["--head", head] if head else ["--port", str(HEAD_PORT)] if self.rank is not None else []
        words += ["--pool", host.pool] if host.pool else []
        return self._node(host, [*words, "--log", str(self.logs / f"ray-{host.name}.log")])

    @property
    def known_head(self) -> str:
        """The head's address, where it is the same before the head is up."""
        return f"{self.hosts[0].reachable_at}:{HEAD_PORT}"

    def on_head(self, command: Sequence[str], stop_seconds: float = STOP_SECONDS) -> list[str]:
        """The command that runs `command` on the head's host; it has `stop_seconds` to exit when asked to."""
        return self._node(self.hosts[0], ["run", "--stop", f"{stop_seconds:g}", *command])

    def doctor(self, head: str) -> list[str]:
        nodes = ["--nodes", str(len(self.hosts)), "--wait", f"{self.wait:g}"]
        return [self.python, "-m", "megasync", "doctor", "--cluster", head, *nodes, *self._config()]

    def driver(self, head: str) -> list[str]:
        named = ["--continue", str(self.continue_file)] if self.continue_file else []
        place = [f"cluster.address={head}", "cluster.host=auto"]
        command = "serve" if is_served(self.config) else "train"
        return [self.python, "-m", "megasync", command, *named, *self._config(), *place]

    @property
    def stop_seconds(self) -> float:
        """Seconds that the run may take to stop: it finishes its step and saves a checkpoint."""
        limits = self.config.timeouts
        return limits.train_step + limits.weight_sync + limits.shutdown

    def _config(self) -> list[str]:
        return [str(self.config_file), *self.changes]

    def _node(self, host: Host, words: list[str]) -> list[str]:
        """A node command. Its interface is the one that routes to the head, or on the head to some other host.

        Where a scheduler starts each host, others may not be there yet: then the head takes its default route.
        """
        head, *others = self.hosts
        peer = others[0].reachable_at if others and self.rank is None else ""
        peer = peer if host is head else head.reachable_at
        node = [self.python, "-m", "megasync.launch.node", "--folder", str(self.folder), "--peer", peer]
        node += ["--interface", self.interface] if self.interface else []
        return shell_command(host.shell or self.shell, host.name, node + words)


def dry_run(job: Job) -> list[str]:
    """A note, then the command lines of a job in order, ready for a shell. They contain no secrets."""
    head, *others = job.hosts
    if job.rank:
        return [DRY_RUN_NOTE, shlex.join(job.ray_node(job.hosts[job.rank], job.known_head))]
    commands = [job.ray_node(head, "")]
    commands += [job.ray_node(host, HEAD_PLACE) for host in others] if job.rank is None else []
    commands += [job.on_head(job.doctor(HEAD_PLACE)), job.on_head(job.driver(HEAD_PLACE), job.stop_seconds)]
    return [DRY_RUN_NOTE, *(shlex.join(command) for command in commands)]


class Launcher:
    """Runs one job; not reusable. `notify` receives the lines that the user should see."""

    def __init__(self, job: Job, notify: Callable[[str], None] = print) -> None:
        self._job = job
        self._notify = notify
        self._environment = {"RAY_AUTH_MODE": "token", TOKEN_VARIABLE: _token(job)}
        # Environment variables that only the driver receives.
        variables = GENERATION_KEY_VARIABLE, SESSIONS_KEY_VARIABLE
        self._secrets = {name: key for name in variables if (key := given_key(name)) is not None}
        # The command running on the head node: the doctor, then the driver.
        self._driver: Remote | None = None
        self._stopping = asyncio.Event()
        # Why the job failed, if the cause is not the run itself.
        self._failure = ""
        self._run_started = False
        self._stop_request: asyncio.Task[None] | None = None
        # Set by the first node that is ready: the others start after it.
        self._head_ready = asyncio.Event()
        # What each Ray node reported when it was ready, by host name.
        self._nodes: dict[str, dict[str, str]] = {}

    async def run(self) -> int:
        """Runs the job and returns the driver's exit status. Every host has shut down its part when this returns or
        raises.

        Raises MegasyncError if the nodes do not start, the doctor finds a failure or the head node is lost.
        """
        if self._job.rank:
            return await self._join(self._job.hosts[self._job.rank])
        async with AsyncExitStack() as stack:
            head, head_watch = await self._start_head(stack)
            supervisors = [
                asyncio.create_task(self._supervise_node(host, head), name=f"node {host.name}")
                for host in (self._job.hosts[1:] if self._job.rank is None else ())
            ]
            for supervisor in supervisors:
                supervisor.add_done_callback(self._on_supervisor_done)
            stack.push_async_callback(cancel_and_wait, *supervisors)
            code = await self._run_doctor_and_driver(head)
            if code not in DRIVER_CODES and not self._stopping.is_set():
                # Losing the head kills the driver too. Either loss may be noticed first.
                await asyncio.wait([head_watch], timeout=END_SECONDS)
            if self._failure:
                raise MegasyncError(self._failure)
            return code

    async def _join(self, host: Host) -> int:
        """Keeps a node of this host in the cluster of the first one, until the run is complete or a signal ends it."""
        node = asyncio.create_task(self._supervise_node(host, self._job.known_head), name=f"node {host.name}")
        stopping = asyncio.create_task(self._stopping.wait(), name="stop")
        return STOPPED if await wait_for_first(node, stopping) else 0

    async def _run_doctor_and_driver(self, head: str) -> int:
        code = await self._run_on_head(self._job.doctor(head), STOP_SECONDS)
        if self._stopping.is_set():
            return code or STOPPED
        if code:
            raise MegasyncError(
                "the hosts are not ready; the checks above say what to fix. Logs of the Ray nodes are in "
                f"{self._job.logs} on each host"
            )
        self._run_started = True
        self._notify("starting the run")
        return await self._run_on_head(self._job.driver(head), self._job.stop_seconds)

    async def request_stop(self, number: signal.Signals) -> None:
        """Passes a signal on to the run. A second one makes the run stop immediately."""
        self._stopping.set()
        if self._driver is not None:
            await self._driver.send(number)

    async def _start_head(self, stack: AsyncExitStack) -> tuple[str, asyncio.Task[None]]:
        """The head's address, and a task that finishes when the head is lost."""
        host = self._job.hosts[0]
        node = await self._start_node(host, "")
        stack.push_async_callback(node.end, END_SECONDS)
        events = (self._head_ready.wait(), node.wait(), self._stopping.wait())
        waits = [asyncio.create_task(event) for event in events]
        try:
            await asyncio.wait(waits, timeout=HEAD_SECONDS + END_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*waits)
        if not self._head_ready.is_set():
            if self._stopping.is_set():
                raise MegasyncError("stopped while the Ray head was starting")
            test = shlex.join(shell_command(host.shell or self._job.shell, host.name, ["true"]))
            raise MegasyncError(
                f"the Ray head did not start on {host.name}; check that the checkout is at {self._job.folder} there "
                f"and that `{test}` works"
            )
        head_watch = asyncio.create_task(self._watch_head(node), name="head")
        stack.push_async_callback(cancel_and_wait, head_watch)
        return self._nodes[host.name]["head"], head_watch

    async def _watch_head(self, head: Remote) -> None:
        """Stops the run at once when the head is lost, because nothing in the Ray cluster works without it."""
        code = await head.wait()
        self._failure = (
            f"lost the Ray head on {head.host} (status {code}), which ends the run; to resume from the last "
            "checkpoint, use `megasync resume`, or run the same command again if it has --continue"
        )
        for _ in range(2):
            await self.request_stop(signal.SIGINT)

    async def _start_node(self, host: Host, head: str) -> Remote:
        def on_line(line: str) -> None:
            if not line.startswith(READY):
                self._notify(f"[{host.name}] {line}")
                return
            node = self._nodes[host.name] = json.loads(line.removeprefix(READY))
            self._notify(f"[{host.name}] Ray node ready at {node['address']}, interface {node['interface']}")
            self._head_ready.set()

        with raised_as(MegasyncError, f"cannot execute the remote shell {self._job.shell!r}"):
            return await Remote.start(host.name, self._job.ray_node(host, head), self._environment, on_line)

    async def _supervise_node(self, host: Host, head: str) -> None:
        """Starts a node, and restarts it with backoff whenever it is lost. For a rank it returns with the run's end."""
        backoff = BACKOFF_SECONDS
        while True:
            node = await self._start_node(host, head)
            started = asyncio.get_running_loop().time()
            try:
                code = await node.wait()
            finally:
                await node.end(END_SECONDS)
            if code in NOT_EXECUTED and not self._run_started:
                raise MegasyncError(
                    f"{host.name} cannot execute {self._job.python}; the checkout must be at {self._job.folder} there, "
                    "with its environment (megasync install, or launch/setup.sh in a checkout)"
                )
            if self._job.rank and await asyncio.to_thread(is_complete, self._job.continue_file):
                self._notify(f"[{host.name}] the run is complete")
                return
            if asyncio.get_running_loop().time() - started > MAX_BACKOFF_SECONDS:
                backoff = BACKOFF_SECONDS
            self._notify(f"[{host.name}] Ray node exited with status {code}; restarting it in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _on_supervisor_done(self, supervisor: asyncio.Task[None]) -> None:
        """Reports a node that will not be restarted. Before the run has started this fails the job."""
        if supervisor.cancelled() or (error := supervisor.exception()) is None:
            return
        self._notify(f"giving up on {supervisor.get_name()}: {error}")
        if not self._run_started:
            self._failure = str(error)
            self._stop_request = asyncio.create_task(self.request_stop(signal.SIGINT))

    async def _run_on_head(self, command: Sequence[str], stop_seconds: float) -> int:
        command = self._job.on_head(command, stop_seconds)
        environment = self._environment | self._secrets
        self._driver = remote = await Remote.start(self._job.hosts[0].name, command, environment, self._notify)
        try:
            if self._stopping.is_set():
                # The stop was requested while the command was starting.
                await remote.send(signal.SIGINT)
            return await remote.wait()
        finally:
            self._driver = None
            await remote.end(stop_seconds + END_SECONDS)


async def run_job(job: Job, requeue: Callable[[], None] | None) -> int:
    """Runs a job until it ends, or the user ends it, and returns its exit status. At SIGUSR1 it calls `requeue`."""
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
        return STOPPED
    except MegasyncError:
        if not received:
            raise
        code = STOPPED
    if requeue is not None and signal.SIGUSR1 in received:
        outcome = f"exited with status {code}" if code else "saved a checkpoint"
        _print_line(f"the run {outcome}; requeueing the job")
        await asyncio.to_thread(requeue)
    elif code:
        _print_line(f"the run exited with status {code}")
    elif job.rank == 0 and not await asyncio.to_thread(is_complete, job.continue_file):
        _print_line("the run was stopped before its goal; the same command continues it")
        return UNFINISHED
    return code


def _token(job: Job) -> str:
    """The token of the job's Ray cluster: new, or the given one where several launchers need the same.

    Raises ConfigError if those have none.
    """
    if job.rank is None or len(job.hosts) == 1:
        return secrets.token_hex(32)
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    raise ConfigError(
        f"--rank with {len(job.hosts)} hosts needs the same {TOKEN_VARIABLE} in the environment of each; make one with "
        "`openssl rand -hex 32`, and give it as a secret of the scheduler"
    )


def _print_line(line: str) -> None:
    """Prints a line; a full disk or a closed reader loses the line, not the run."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
