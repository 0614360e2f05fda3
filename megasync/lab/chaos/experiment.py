"""One chaos experiment: trains from a configuration, injects faults at random times, and reports the outcome.

The run is a separate process, started as a user would start it, and every fault comes from outside. Its processes are
found among its descendants on this machine.

    kind                           fault                              ends
    -----------------------------  ---------------------------------  ------------------------------------------------
    server, router, rank,          SIGKILL, or SIGSTOP                when the run has recovered
    worker (`rollout.workers`)
    controller                     SIGKILL, then `megasync resume`    with the resumed run
    slow                           a server at a fifth of its speed   after `hold` seconds
    disk                           the run's filesystem is full       the same; `megasync resume` if the run ended
    cut                            a link to a host is down           the same
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

from megasync.app.run_lock import holder
from megasync.config import Config
from megasync.errors import ConfigError, MegasyncError
from megasync.lab.chaos.faults import PERIOD_SECONDS, STOPPED_SHARE, Disk, NetworkInterface, slowed
from megasync.lab.chaos.report import OUTPUT_FILE, ChaosReport, Fault, make_report, read_steps
from megasync.observe.metrics import TIME

# What identifies a process of each kind: part of its command line, or of the title that Ray gives it.
MARKS = {
    "server": "sglang::scheduler",
    "router": "sglang::router",
    "rank": "TrainerRank",
    "worker": "RolloutWorker",
}
CONTROLLER = "controller"
KINDS = (*MARKS, CONTROLLER)
# Faults with a duration.
SLOW, DISK, CUT = "slow", "disk", "cut"
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The kinds of faults to inject."""

    # Kinds of processes to kill.
    kill: Sequence[str] = ()
    # Also stop them, as often as they are killed.
    stop: bool = False
    slow: bool = False
    # The filesystem to fill.
    disk: Path | None = None
    # The link to take down, NAMESPACE/INTERFACE.
    cut: str | None = None


@dataclass(frozen=True, slots=True)
class ChaosTiming:
    """The seconds that an experiment waits and that its faults last."""

    # The longest random wait between the step that follows a fault and the next fault.
    pause: float
    # The longest wait for that step.
    patience: float
    # How long a slow server, a full disk and a cut link last.
    hold: float = 20.0


class ChaosExperiment:
    """One run under faults. Passes a line to `log` for each fault that it injects."""

    _process: subprocess.Popen[bytes]
    _run_dir: Path

    def __init__(
        self,
        config_path: Path,
        config: Config,
        overrides: Sequence[str],
        plan: FaultPlan,
        timing: ChaosTiming,
        seed: int,
        log: Callable[[str], None],
    ) -> None:
        """`config` is the configuration in `config_path` with `overrides`. Raises ConfigError for a bad plan."""
        if unknown := [kind for kind in plan.kill if kind not in KINDS]:
            raise ConfigError(f"--kill {','.join(unknown)} is not a kind of process; choose from {', '.join(KINDS)}")
        if "worker" in plan.kill and not config.rollout.workers:
            raise ConfigError("--kill worker, but rollout.workers=0: the run has no such process; set rollout.workers")
        check_patience(config, plan, timing.patience)
        self._config_path = config_path
        self._config = config
        self._overrides = list(overrides)
        self._kinds = list(plan.kill)
        # By kind: a description of the fault, and the context in which it lasts.
        self._lasting: dict[str, Callable[[], tuple[str, AbstractContextManager[None]] | None]] = {}
        if plan.slow:
            self._lasting[SLOW] = self._slow_server
        if plan.disk is not None:
            disk = Disk.of(plan.disk, Path(config.run_root))
            self._lasting[DISK] = lambda: (f"{disk.mount} full for {timing.hold:g} s", disk.filled())
        if plan.cut is not None:
            link = NetworkInterface.parse(plan.cut)
            how = f"{link.namespace}/{link.interface} down for {timing.hold:g} s"
            self._lasting[CUT] = lambda: (how, link.cut())
        self._kinds += self._lasting
        if not self._kinds:
            raise ConfigError("no fault to inject; choose some with --kill, --slow, --disk or --cut")
        self._stop = plan.stop
        self._timing = timing
        self._random = random.Random(seed)
        self._log = log
        self._began = time.monotonic()

    def run(self, minutes: float, rounds: int | None = None) -> ChaosReport:
        """Injects faults until the time is over, the run has ended, or each kind was injected `rounds` times.

        Then it ends the run and reports on it.
        """
        faults: list[Fault] = []
        self._start("train", str(self._config_path), *self._overrides)
        try:
            if self._wait_for_step(0.0) is not None:
                for kind in islice(self._order(), None if rounds is None else rounds * len(self._kinds)):
                    pause = self._random.uniform(0.0, self._timing.pause)
                    if self._sleep(pause, self._began + 60.0 * minutes):
                        break
                    if (fault := self._inject(kind)) is None:
                        break
                    faults.append(fault)
                    if fault.recovered is None:
                        break
            status = self._end()
        finally:
            if self._process.poll() is None:
                self._process.kill()
        return self._report(faults, status)

    def _report(self, faults: list[Fault], status: int) -> ChaosReport:
        return make_report(self._run_dir, self._config, faults, status)

    def _sleep(self, seconds: float, deadline: float) -> bool:
        """Sleeps; returns whether the time is over or the run has ended."""
        time.sleep(max(0.0, min(seconds, deadline - time.monotonic())))
        return time.monotonic() >= deadline or self._process.poll() is not None

    def _order(self) -> Iterator[str]:
        """Every kind once per round, in random order."""
        while True:
            yield from self._random.sample(self._kinds, len(self._kinds))

    # The run's process

    def _start(self, *arguments: str) -> None:
        """Starts `megasync train` or `megasync resume`; the former finds the run directory."""
        before = set(self._run_dirs())
        output = Path(self._config.run_root) / OUTPUT_FILE
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megasync", *arguments], stdout=out, stderr=subprocess.STDOUT
            )
        if arguments[0] == "train":
            self._run_dir = self._find_run_dir(before, output)

    def _find_run_dir(self, before: set[Path], output: Path) -> Path:
        deadline = time.monotonic() + self._timing.patience
        while True:
            started = [path for path in self._run_dirs() if path not in before and self._is_locked_by_run(path)]
            if self._process.poll() is not None:
                raise MegasyncError(f"the run ended during startup; its output is in {output}")
            if started:
                return started[0]
            if time.monotonic() >= deadline:
                self._process.kill()
                raise MegasyncError(
                    f"the run did not start within {self._timing.patience:g} s; its output is in {output}"
                )
            time.sleep(POLL_SECONDS)

    def _run_dirs(self) -> list[Path]:
        return sorted(Path(self._config.run_root).glob(f"{self._config.name}-*"))

    def _is_locked_by_run(self, run_dir: Path) -> bool:
        owner = holder(run_dir)
        return owner is not None and owner["pid"] == self._process.pid

    def _end(self) -> int:
        """Stops the run; returns its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        timeouts = self._config.timeouts
        try:
            return self._process.wait(timeouts.train_step + timeouts.weight_sync + timeouts.shutdown)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    # Injecting

    def _inject(self, kind: str) -> Fault | None:
        """Injects one fault; None when the run ended, or no process of the kind came up, before it could."""
        return self._hold(kind) if kind in self._lasting else self._signal(kind)

    def _signal(self, kind: str) -> Fault | None:
        number = self._random.choice([signal.SIGKILL, signal.SIGSTOP]) if self._stop else signal.SIGKILL
        if kind == CONTROLLER:
            # Nothing would resume a stopped driver.
            number, processes = signal.SIGKILL, [psutil.Process(self._process.pid)]
        else:
            processes = self._wait_for_processes(kind)
        if not processes:
            return None
        at, now, step = time.monotonic() - self._began, time.time(), self._last_step()
        try:
            self._random.choice(processes).send_signal(number)
        except psutil.NoSuchProcess:
            return None
        self._log(f"{at:6.1f} s, after step {step}: {number.name} to a {kind}")
        if kind == CONTROLLER:
            self._process.wait()
            self._start("resume", str(self._run_dir))
        return Fault(kind, number.name, at, step, self._wait_for_step(now))

    def _hold(self, kind: str) -> Fault | None:
        """Injects a fault for `hold` seconds. If a full disk ends the run, resumes it."""
        if (lasting := self._lasting[kind]()) is None:
            return None
        how, fault = lasting
        at, step = time.monotonic() - self._began, self._last_step()
        self._log(f"{at:6.1f} s, after step {step}: {kind}: {how}")
        with fault:
            # For the whole duration, even if the run ends meanwhile.
            time.sleep(self._timing.hold)
        now = time.time()
        recovered = self._wait_for_step(now)
        if kind == DISK and recovered is None and self._process.poll():
            self._log(f"the run ended with status {self._process.poll()}; resuming it")
            self._start("resume", str(self._run_dir))
            recovered = self._wait_for_step(now)
        return Fault(kind, how, at, step, recovered)

    def _slow_server(self) -> tuple[str, AbstractContextManager[None]] | None:
        # A stopped server must not be continued.
        servers = [p for p in self._wait_for_processes("server") if p.status() != psutil.STATUS_STOPPED]
        if not servers:
            return None
        how = f"stopped {STOPPED_SHARE:.0%} of each {PERIOD_SECONDS:g} s for {self._timing.hold:g} s"
        return how, slowed([self._random.choice(servers)])

    def _wait_for_processes(self, kind: str) -> list[psutil.Process]:
        """The processes of a kind; after an earlier fault they may still be starting."""
        deadline = time.monotonic() + self._timing.patience
        while self._process.poll() is None and time.monotonic() < deadline:
            if processes := self._processes(kind):
                return sorted(processes, key=lambda process: process.pid)
            time.sleep(POLL_SECONDS)
        return []

    def _processes(self, kind: str) -> list[psutil.Process]:
        matching, parents = [], set()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if MARKS[kind] in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                        parents.add(process.ppid())
                        matching.append(process)
        # A supervisor's command line contains its child's.
        return [process for process in matching if process.pid not in parents]

    # Watching

    def _last_step(self) -> int:
        steps = read_steps(self._run_dir)
        return int(steps[-1]["step"]) if steps else 0

    def _wait_for_step(self, after: float) -> float | None:
        """Seconds from `after` (wall clock) until the next trained step; None when none came or the run ended."""
        deadline = time.monotonic() + self._timing.patience
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            times = [row[TIME] for row in read_steps(self._run_dir) if row[TIME] > after]
            if times:
                return times[0] - after
            if ended:
                return None
            time.sleep(POLL_SECONDS)
        return None


def check_patience(config: Config, plan: FaultPlan, patience: float) -> None:
    """Raises ConfigError when a hung rank or worker may not be detected and restarted within the wait for a step."""
    timeouts = config.timeouts
    if plan.stop and "worker" in plan.kill and patience <= timeouts.rollout_worker + timeouts.server_start:
        raise ConfigError(
            f"--patience {patience:g} must be longer than timeouts.rollout_worker={timeouts.rollout_worker:g} + "
            f"timeouts.server_start={timeouts.server_start:g}, the longest recovery from a stopped worker; lower "
            f"these, for example timeouts.rollout_worker=60, or raise --patience"
        )
    needed = timeouts.train_step + timeouts.trainer_start + timeouts.weight_sync
    if plan.stop and "rank" in plan.kill and patience <= needed:
        raise ConfigError(
            f"--patience {patience:g} must be longer than timeouts.train_step={timeouts.train_step:g} + "
            f"timeouts.trainer_start={timeouts.trainer_start:g} + timeouts.weight_sync={timeouts.weight_sync:g} = "
            f"{needed:g} s, the longest recovery from a stopped rank; lower these, for example "
            f"timeouts.train_step=60 timeouts.weight_sync=60, or raise --patience"
        )
