"""The outcome of a chaos experiment: facts from metrics, ledger and checkpoint, the checks on them, and tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megasync.buffer.groups import LIVE, TRAINED, GroupState
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.config import Config
from megasync.config.pacing import Pacing
from megasync.observe import names
from megasync.observe.metrics import METRICS_FILE, read_rows
from megasync.planning.render import facts
from megasync.trainer import checkpoint

# The output of the run's process, in `run_root`.
OUTPUT_FILE = "chaos.log"


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault."""

    kind: str
    # The signal, or a description with the duration.
    how: str
    # Seconds since the start of the run.
    at: float
    # The last step before it.
    step: int
    # Seconds from its end until the next trained step; None when none followed.
    recovered: float | None


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Groups by how they ended, from the ledger."""

    admitted: int
    trained: int
    dropped: int
    live: int


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """The outcome of an experiment. `problems` is empty when the run recovered from every fault and lost nothing."""

    run_dir: Path
    faults: Sequence[Fault]
    steps: int
    groups: GroupCounts
    staleness: float
    staleness_bound: int
    scores: Sequence[float]
    problems: Sequence[str]


def read_steps(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each trained step."""
    return [row for row in read_rows(run_dir / METRICS_FILE) if "time/step" in row]


def make_report(run_dir: Path, config: Config, faults: Sequence[Fault], status: int) -> ChaosReport:
    """Checks a run that has ended with this exit status."""
    rows, groups = read_rows(run_dir / METRICS_FILE), read_ledger(run_dir / LEDGER_FILE)
    trained_steps = read_steps(run_dir)
    steps = int(trained_steps[-1]["step"]) if trained_steps else 0
    staleness = max((row[names.STALENESS_MAX] for row in rows if names.STALENESS_MAX in row), default=0.0)
    bound = Pacing.of(config.schedule).staleness_bound
    # From the checkpoint, not the metrics: a run that is stopped while new ranks load a checkpoint has gone back to it.
    saved = checkpoint.latest(run_dir)
    expected = (0 if saved is None else checkpoint.step_of(saved)) * config.schedule.groups_per_step
    # A run that was resumed to its end, or stopped by the experiment, exits with 0.
    checks = (
        (status == 0, f"the run ended with status {status}; its output is in {config.run_root}/{OUTPUT_FILE}"),
        (
            all(fault.recovered is not None for fault in faults) or steps == config.schedule.total_steps,
            "the run did not recover from a fault",
        ),
        (bool(faults), "no fault was injected: the run was too short, or no process of that kind was found"),
        (groups.admitted == groups.trained + groups.dropped + groups.live, "the ledger does not balance"),
        (
            groups.trained == expected,
            f"{groups.trained} groups are trained according to the ledger, {expected} according to the checkpoint",
        ),
        (staleness <= bound, "a trajectory over the staleness bound was trained"),
    )
    return ChaosReport(
        run_dir=run_dir,
        faults=faults,
        steps=steps,
        groups=groups,
        staleness=staleness,
        staleness_bound=bound,
        scores=[row[names.SCORE] for row in rows if names.SCORE in row],
        problems=[problem for holds, problem in checks if not holds],
    )


def read_ledger(path: Path) -> GroupCounts:
    """Counts the groups of a run that has ended. A live run holds its ledger exclusively."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30.0) as db:
        by_state = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    return GroupCounts(
        admitted=sum(by_state.values()),
        trained=sum(by_state.get(state.value, 0) for state in TRAINED),
        dropped=by_state.get(GroupState.DROPPED.value, 0),
        live=sum(by_state.get(state.value, 0) for state in LIVE),
    )


def report_tables(report: ChaosReport) -> RenderableType:
    """The tables at the end of `megasync chaos`."""
    faults = Table("at", "after step", "fault", "how", "recovery time")
    for fault in report.faults:
        recovered = "never" if fault.recovered is None else f"{fault.recovered:.1f} s"
        faults.add_row(f"{fault.at:.0f} s", str(fault.step), fault.kind, fault.how, recovered)
    groups = report.groups
    balance = f"{groups.trained} trained + {groups.dropped} dropped + {groups.live} live"
    scores = " -> ".join(f"{score:.3f}" for score in (*report.scores[:1], *report.scores[-1:])) or "-"
    rows = {
        "run": str(report.run_dir),
        "steps": str(report.steps),
        "ledger": f"{groups.admitted} admitted = {balance}",
        "staleness": f"at most {report.staleness:.0f} of {report.staleness_bound} allowed",
        "held-out score": scores,
    }
    outcome = "\n".join(report.problems) or "nothing was lost"
    return Group(faults, facts(rows), Text(outcome, style="red" if report.problems else "green"))
