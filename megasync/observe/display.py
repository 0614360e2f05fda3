"""The live terminal view of a run, or plain lines if the output is not a terminal.

The view is redrawn from a fresh snapshot several times a second, so its timers advance while a step runs. Warnings and
errors are printed in full above the view and stay in the scrollback.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megasync.base.terminal import Terminal
from megasync.observe.state_file import TenantState

REFRESH_PER_SECOND = 4
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
# An activity that lasts longer than this is shown in yellow.
LONG_WAIT_SECONDS = 30.0
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Activity:
    """The work of one component at present, and for how many seconds it goes on."""

    part: str
    doing: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state of a run at one moment. None means "not known yet"; unknown values are never replaced by zero."""

    name: str
    run_dir: Path
    step: int
    total_steps: int
    version: int
    # Seconds since the start of the run, and seconds per step over the latest steps.
    seconds: float
    step_seconds: float | None = None
    # Mean reward of each trained step, oldest first; held-out greedy scores as (step, score).
    rewards: tuple[float | None, ...] = ()
    scores: tuple[tuple[int, float], ...] = ()
    # Of supervised training: the loss of each step, oldest first, and of the held-out rows as (step, loss).
    losses: tuple[float, ...] = ()
    validation_losses: tuple[tuple[int, float], ...] = ()
    # The latest score of each named held-out set.
    set_scores: dict[str, float] = field(default_factory=dict)
    target: float | None = None
    # Tokens per second of wall time over the latest steps.
    trained_rate: float | None = None
    sampled_rate: float | None = None
    # Versions between sampling and training in the latest step, and the bound that the buffer enforces.
    staleness_mean: float | None = None
    staleness_max: float | None = None
    staleness_limit: int = 0
    # Active groups by state, such as {"generating": 12, "finished": 4}; at most `capacity` in total.
    buffer: dict[str, int] = field(default_factory=dict)
    capacity: int = 0
    activities: tuple[Activity, ...] = ()
    # The latest messages, newest last.
    messages: tuple[str, ...] = ()
    # Of a service; None for a run of another kind.
    tenants: tuple[TenantState, ...] | None = None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until `total_steps` at the current speed; a target score may end the run earlier."""
        if self.step_seconds is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_seconds


class LiveDisplay:
    """Context manager that shows a run; `snapshot` is called at every redraw.

    With `live=False`, or if the console is not a terminal, it prints one line per `step` and per `message` instead.
    """

    def __init__(self, snapshot: Callable[[], RunSnapshot], *, live: bool = True, console: Console | None = None):
        self._snapshot = snapshot
        self._console = console or Terminal()
        self._live: Live | None = None
        if live and self._console.is_terminal:
            self._live = Live(
                get_renderable=lambda: view(self._snapshot()),
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
            )
        self._handler = _ConsoleHandler(self._console)

    def __enter__(self) -> Self:
        logging.getLogger("megasync").addHandler(self._handler)
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        logging.getLogger("megasync").removeHandler(self._handler)

    def step(self) -> None:
        """Prints a line about the latest step, unless there is a live view."""
        if self._live is None:
            self._console.print(line(self._snapshot()), highlight=False, markup=False, soft_wrap=True)

    def message(self, text: str) -> None:
        """Prints a message, unless there is a live view, which shows the snapshot's messages."""
        if self._live is None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class _ConsoleHandler(logging.Handler):
    """Prints warnings and errors, including tracebacks, above the live view."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        self._console.print(Text(self.format(record), style=style), soft_wrap=True)


def line(snap: RunSnapshot) -> str:
    """The latest step as one plain line."""
    if snap.losses:
        held_out = number(snap.validation_losses[-1][1], 4) if snap.validation_losses else UNKNOWN
        return (
            f"[{duration(snap.seconds)}] step {snap.step}/{snap.total_steps}  loss {number(snap.losses[-1], 4)}  "
            f"validation {held_out}  trained {number(snap.trained_rate, 0)} tok/s"
        )
    score = number(snap.scores[-1][1], 3) if snap.scores else UNKNOWN
    reward = number(snap.rewards[-1], 3) if snap.rewards else UNKNOWN
    return (
        f"[{duration(snap.seconds)}] step {snap.step}/{snap.total_steps}  version {snap.version}  reward {reward}  "
        f"held-out {score}  "
        f"trained {number(snap.trained_rate, 0)} tok/s  sampled {number(snap.sampled_rate, 0)} tok/s  "
        f"staleness {number(snap.staleness_mean, 2)} (max {number(snap.staleness_max, 0)})"
    )


def view(snap: RunSnapshot) -> RenderableType:
    """The live view of a snapshot."""
    if snap.tenants is not None:
        parts = [_tenants(snap), "", _activities(snap)]
    else:
        numbers = _losses(snap) if snap.losses or snap.validation_losses else _numbers(snap)
        parts = [_progress(snap), "", numbers, "", _activities(snap)]
    if snap.messages:
        parts += ["", *(Text(message, style="dim", overflow="fold") for message in snap.messages)]
    return Panel(Group(*parts), title=snap.name, subtitle=Text(str(snap.run_dir), style="dim"), title_align="left")


def _progress(snap: RunSnapshot) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    left = UNKNOWN if snap.eta_seconds is None else duration(snap.eta_seconds)
    table.add_row(
        f"step [bold]{snap.step}[/] of {snap.total_steps}",
        ProgressBar(total=snap.total_steps, completed=snap.step),
        f"{duration(snap.seconds)} elapsed, at most {left} left",
    )
    return table


def _tenants(snap: RunSnapshot) -> Table:
    """A row for each tenant of a service."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column(f"{duration(snap.seconds)} elapsed", style="cyan", no_wrap=True)
    for heading in ("models", "steps", "loss", "waiting", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tenant in snap.tenants or ():
        loss = number(tenant.models[0].loss if tenant.models else None, 4)
        counts = str(len(tenant.models)), str(tenant.steps), loss, str(tenant.promises)
        table.add_row(tenant.name, *counts, number(tenant.rate, 0))
    return table


def _losses(snap: RunSnapshot) -> Table:
    table = _rows()
    held_out = [loss for _, loss in snap.validation_losses]
    for name, values in (("loss", snap.losses), ("validation loss", held_out)):
        table.add_row(name, number(values[-1], 4) if values else UNKNOWN, sparkline(values))
    table.add_row("tokens/s", f"{number(snap.trained_rate, 0)} trained", "")
    return table


def _rows() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    return table


def _numbers(snap: RunSnapshot) -> Table:
    scores = [score for _, score in snap.scores]
    held_out = number(scores[-1], 3) if scores else UNKNOWN
    if snap.target is not None:
        held_out += f"  (stops above {snap.target:g})"
    table = _rows()
    active = sum(snap.buffer.values())
    states = ", ".join(f"{count} {state}" for state, count in snap.buffer.items() if count)
    rows = [
        ("reward", number(snap.rewards[-1], 3) if snap.rewards else UNKNOWN, sparkline(snap.rewards)),
        ("held-out score", held_out, sparkline(scores)),
        *[(f"  {name}", number(score, 3), "") for name, score in snap.set_scores.items()],
        ("tokens/s", f"{number(snap.sampled_rate, 0)} sampled, {number(snap.trained_rate, 0)} trained", ""),
        (
            "staleness",
            f"{number(snap.staleness_mean, 2)} mean, {number(snap.staleness_max, 0)} max, limit {snap.staleness_limit}",
            "",
        ),
        ("weights", f"version {snap.version}", ""),
        ("buffer", f"{active} of {snap.capacity} groups", states),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _activities(snap: RunSnapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for activity in snap.activities:
        slow = activity.seconds > LONG_WAIT_SECONDS
        table.add_row(
            activity.part, activity.doing, Text(duration(activity.seconds), style="yellow" if slow else "dim")
        )
    return table


def sparkline(values: Sequence[float | None]) -> str:
    """The latest values as block characters, scaled to their range; a gap where a value is missing or not finite."""
    shown = list(values)[-SPARK_WIDTH:]
    finite = [v for v in shown if v is not None and math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)

    def block(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        return BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] if span else BLOCKS[0]

    return "".join(map(block, shown))


def number(value: float | None, digits: int) -> str:
    """A value with thousands separators and this many decimals, or "-" if unknown."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """Seconds as text, such as 4s, 2m 05s or 3h 07m."""
    total = int(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m {total % 60:02d}s"
    return f"{total // 3600}h {total % 3600 // 60:02d}m"
