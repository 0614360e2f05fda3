"""`megasync chaos`: trains as a configuration says, injects faults at random moments, and reports the outcome.

The run is a process of its own, as a person starts it, and every fault comes from outside. Its processes are found
among its descendants on this machine.

    kind                                 fault                                   ends
    -----------------------------------  --------------------------------------  --------------------------------
    server, router, rank, buffer         SIGKILL, or SIGSTOP                     when the run has recovered by itself
    controller                           SIGKILL, then `megasync resume`         with the resumed run
    slow                                 a server at a fifth of its speed        after `hold` seconds
    disk                                 no space is left for the run            the same; `megasync resume` if it ended
    cut                                  a link to a host is down                the same
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import psutil

from megasync.app.run_lock import holder
from megasync.buffer.groups import LIVE, TRAINED, GroupState
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.chaos.inject import PERIOD_SECONDS, STOPPED_SHARE, Disk, Link, slowed
from megasync.config import Config
from megasync.config.pacing import Pacing
from megasync.errors import ConfigError, MegasyncError
from megasync.observe import names
from megasync.observe.metrics import METRICS_FILE, TIME, read_rows
from megasync.trainer import checkpoint

# What a process of each kind has in its command line, or in the title that Ray gives it.
MARKS = {
    "server": "sglang::scheduler",
    "router": "sglang::router",
    "rank": "TrainerRank",
    "buffer": "AsyncBuffer",
}
CONTROLLER = "controller"
KINDS = (*MARKS, CONTROLLER)
# Faults that last for a while.
SLOW, DISK, CUT = "slow", "disk", "cut"
LOOK_SECONDS = 0.2
OUTPUT_FILE = "chaos.log"


@dataclass(frozen=True, slots=True)
class Fault:
    """What was injected, and how long it took until a step was trained after its end; None when none was."""

    kind: str
    # The signal, or what was done for how long.
    how: str
    # Seconds since the run was started.
    at: float
    step: int
    recovered: float | None


@dataclass
class Verdict:
    """The outcome of the run."""

    run_dir: Path
    faults: list[Fault]
    status: int
    steps: int
    # Groups by how they ended, from the ledger.
    admitted: int
    trained: int
    dropped: int
    live: int
    staleness: float
    staleness_bound: int
    scores: list[float]
    problems: list[str] = field(default_factory=list)


class Chaos:
    """One run under faults. `say` is told of each fault as it is injected.

    `pause` is the longest random wait between the step that follows a fault and the next fault, `patience` the longest
    wait for that step, `hold` how long a slow server, a full disk and a cut link last, in seconds.
    """

    def __init__(
        self,
        config: Path,
        loaded: Config,
        overrides: Sequence[str],
        kinds: Sequence[str],
        seed: int,
        *,
        stop: bool,
        pause: float,
        patience: float,
        hold: float = 20.0,
        slow: bool = False,
        disk: Path | None = None,
        cut: str | None = None,
        say: Callable[[str], None],
    ) -> None:
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ConfigError(f"--kill {','.join(unknown)} names no part of a run; choose from {', '.join(KINDS)}")
        check_patience(loaded, kinds, stop, patience)
        self._disk = None if disk is None else Disk.of(disk, Path(loaded.run_root))
        self._link = None if cut is None else Link.parse(cut)
        self._config = config
        self._loaded = loaded
        self._overrides = list(overrides)
        self._kinds = [*kinds, *([SLOW] if slow else []), *([DISK] if disk else []), *([CUT] if cut else [])]
        if not self._kinds:
            raise ConfigError("there is no fault to inject; name some by --kill, --slow, --disk or --cut")
        self._hold = hold
        self._chance = random.Random(seed)
        self._stop = stop
        self._pause = pause
        self._patience = patience
        self._say = say
        self._began = time.monotonic()
        self._run_dir: Path | None = None
        self._process: subprocess.Popen | None = None

    def run(self, minutes: float, rounds: int | None = None) -> Verdict:
        """Injects faults until the time is over, each kind was had `rounds` times, or the run has ended; ends and judges it."""
        faults: list[Fault] = []
        self._start("train", str(self._config), *self._overrides)
        try:
            if self._wait_for_step(0.0, self._patience) is not None:
                for kind in islice(self._order(), None if rounds is None else rounds * len(self._kinds)):
                    if self._sleep(self._chance.uniform(0.0, self._pause), self._began + 60.0 * minutes):
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
        return self._judge(faults, status)

    def _sleep(self, seconds: float, deadline: float) -> bool:
        """Whether the time, or the run, is over."""
        time.sleep(max(0.0, min(seconds, deadline - time.monotonic())))
        return time.monotonic() >= deadline or self._process.poll() is not None

    def _order(self) -> Iterator[str]:
        """Every kind once in each round, in random order."""
        while True:
            yield from self._chance.sample(self._kinds, len(self._kinds))

    # The run's process

    def _start(self, *arguments: str) -> None:
        before = set(self._run_dirs())
        output = Path(self._loaded.run_root) / OUTPUT_FILE
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megasync", *arguments], stdout=out, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + self._patience
        while self._run_dir is None:
            mine = [path for path in self._run_dirs() if path not in before and self._is_mine(path)]
            self._run_dir = mine[0] if mine else None
            if self._process.poll() is not None:
                raise MegasyncError(f"the run ended before it began; its output is in {output}")
            if time.monotonic() >= deadline:
                self._process.kill()
                raise MegasyncError(f"the run did not begin within {self._patience:g} s; its output is in {output}")
            time.sleep(LOOK_SECONDS)

    def _run_dirs(self) -> list[Path]:
        return sorted(Path(self._loaded.run_root).glob(f"{self._loaded.name}-*"))

    def _is_mine(self, run_dir: Path) -> bool:
        who = holder(run_dir)
        return who is not None and who["pid"] == self._process.pid

    def _end(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        timeouts = self._loaded.timeouts
        try:
            return self._process.wait(timeouts.train_step + timeouts.weight_sync + timeouts.shutdown)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    # Injecting

    def _inject(self, kind: str) -> Fault | None:
        """One fault of the kind; None when the run ended, or none of its processes came up, before it could."""
        return self._last(kind) if kind in (SLOW, DISK, CUT) else self._signal(kind)

    def _signal(self, kind: str) -> Fault | None:
        number = self._chance.choice([signal.SIGKILL, signal.SIGSTOP]) if self._stop else signal.SIGKILL
        if kind == CONTROLLER:
            # A stopped driver has nobody who could resume it.
            number, found = signal.SIGKILL, [psutil.Process(self._process.pid)]
        else:
            found = self._wait_for(kind)
        if not found:
            return None
        at, now, step = time.monotonic() - self._began, time.time(), self._last_step()
        try:
            self._chance.choice(found).send_signal(number)
        except psutil.NoSuchProcess:
            return None
        self._say(f"{at:6.1f} s, after step {step}: {number.name} to a {kind}")
        if kind == CONTROLLER:
            self._process.wait()
            self._start("resume", str(self._run_dir))
        recovered = self._wait_for_step(now, self._patience)
        return Fault(kind, number.name, at, step, recovered)

    def _last(self, kind: str) -> Fault | None:
        """A fault that lasts `hold` seconds. A full disk may end the run, which then is resumed."""
        if kind == SLOW:
            # A stopped one must not be continued.
            found = [p for p in self._wait_for("server") if p.status() != psutil.STATUS_STOPPED]
            if not found:
                return None
            how = f"stopped {STOPPED_SHARE:.0%} of each {PERIOD_SECONDS:g} s for {self._hold:g} s"
            fault = slowed([self._chance.choice(found)])
        elif kind == DISK:
            how, fault = f"{self._disk.mount} full for {self._hold:g} s", self._disk.filled()
        else:
            how = f"{self._link.namespace}/{self._link.interface} down for {self._hold:g} s"
            fault = self._link.cut()
        at, step = time.monotonic() - self._began, self._last_step()
        self._say(f"{at:6.1f} s, after step {step}: {kind}: {how}")
        with fault:
            # To the end of the fault, also when the run ends in it.
            time.sleep(self._hold)
        now = time.time()
        recovered = self._wait_for_step(now, self._patience)
        if kind == DISK and recovered is None and self._process.poll():
            self._say(f"the run ended with status {self._process.poll()}; resuming it")
            self._start("resume", str(self._run_dir))
            recovered = self._wait_for_step(now, self._patience)
        return Fault(kind, how, at, step, recovered)

    def _wait_for(self, kind: str) -> list[psutil.Process]:
        """The processes of the kind; one that was hit before may still be starting again."""
        deadline = time.monotonic() + self._patience
        while self._process.poll() is None and time.monotonic() < deadline:
            if found := self._processes(kind):
                return sorted(found, key=lambda process: process.pid)
            time.sleep(LOOK_SECONDS)
        return []

    def _processes(self, kind: str) -> list[psutil.Process]:
        found, parents = [], set()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if MARKS[kind] in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                        parents.add(process.ppid())
                        found.append(process)
        # A supervisor has its child's command line behind its own.
        return [p for p in found if p.pid not in parents]

    # Looking

    def _steps(self) -> list[dict]:
        return [row for row in read_rows(self._run_dir / METRICS_FILE) if "time/step" in row]

    def _last_step(self) -> int:
        steps = self._steps()
        return steps[-1]["step"] if steps else 0

    def _wait_for_step(self, after: float, limit: float) -> float | None:
        """Seconds until a step was trained after that moment of the wall clock; None when none came or the run ended."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            over = self._process.poll() is not None
            late = [row[TIME] for row in self._steps() if row[TIME] > after]
            if late:
                return late[0] - after
            if over:
                return None
            time.sleep(LOOK_SECONDS)
        return None

    # Judging

    def _judge(self, faults: list[Fault], status: int) -> Verdict:
        rows = read_rows(self._run_dir / METRICS_FILE)
        counts = read_ledger(self._run_dir / LEDGER_FILE)
        steps = self._last_step()
        verdict = Verdict(
            run_dir=self._run_dir,
            faults=faults,
            status=status,
            steps=steps,
            **counts,
            staleness=max((row[names.STALENESS_MAX] for row in rows if names.STALENESS_MAX in row), default=0.0),
            staleness_bound=Pacing.of(self._loaded.schedule).staleness_bound,
            scores=[row[names.SCORE] for row in rows if names.SCORE in row],
        )
        # Not the last step in the metrics: a run that is stopped while new ranks take up a checkpoint has gone back to
        # it.
        saved = checkpoint.latest(self._run_dir)
        wanted = (0 if saved is None else checkpoint.step_of(saved)) * self._loaded.schedule.groups_per_step
        # A run that was resumed to its end, or stopped by us, ends with 0.
        for holds, problem in (
            (
                status == 0,
                f"the run ended with status {status}; its output is in {self._loaded.run_root}/{OUTPUT_FILE}",
            ),
            (
                all(fault.recovered is not None for fault in faults) or steps == self._loaded.schedule.total_steps,
                "the run did not recover from a fault",
            ),
            (bool(faults), "no fault was injected: the run was too short, or no process of that kind was found"),
            (verdict.admitted == verdict.trained + verdict.dropped + verdict.live, "the ledger does not balance"),
            (
                verdict.trained == wanted,
                f"{verdict.trained} groups are trained by the ledger, {wanted} by the checkpoint",
            ),
            (verdict.staleness <= verdict.staleness_bound, "a trajectory over the staleness bound was trained"),
        ):
            if not holds:
                verdict.problems.append(problem)
        return verdict


def check_patience(config: Config, kinds: Sequence[str], stop: bool, patience: float) -> None:
    """Raises ConfigError when a hung rank would be found, and the ranks started again, only after the wait for a step."""
    timeouts = config.timeouts
    needed = timeouts.train_step + timeouts.trainer_start + timeouts.weight_sync
    if stop and "rank" in kinds and patience <= needed:
        raise ConfigError(
            f"--patience {patience:g} must be longer than timeouts.train_step={timeouts.train_step:g} + "
            f"timeouts.trainer_start={timeouts.trainer_start:g} + timeouts.weight_sync={timeouts.weight_sync:g} = "
            f"{needed:g} s, which a stopped rank may take; lower these, for example timeouts.train_step=60 "
            f"timeouts.weight_sync=60, or raise --patience"
        )


def read_ledger(path: Path) -> dict[str, int]:
    """Groups by how they ended: admitted, trained, dropped, live. For a run that has ended: it holds its ledger alone."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30.0) as db:
        by_state = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    of = {
        "trained": sum(by_state.get(state.value, 0) for state in TRAINED),
        "dropped": by_state.get(GroupState.DROPPED.value, 0),
        "live": sum(by_state.get(state.value, 0) for state in LIVE),
    }
    return {"admitted": sum(by_state.values()), **of}
