"""The first look at a run: six large numbers, the curves behind them, and what every part of it does now."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from nicegui import ui
from plotly.graph_objects import Figure

from megasync.observe import names
from megasync.watch import figures, units
from megasync.watch.chart import Chart
from megasync.watch.elements import Reading, Shares, Table, card, notice
from megasync.watch.run_folder import ACTIVE, RunFolder
from megasync.watch.view import Place, Update

# A trainer's time, and a server's: what a step consists of. Colours are those of page.css.
TRAINER_WAITS = {
    "time/train": ("train", "var(--blue)"),
    "time/wait_for_groups": ("wait for groups", "var(--orange)"),
    "time/sync": ("publish weights", "var(--green)"),
    "time/turns": ("hand over devices", "var(--purple)"),
}
SLOTS = {
    "generating": "var(--sky)",
    "returned": "var(--purple)",
    "finished": "var(--green)",
    "leased": "var(--blue)",
    "unpublished": "var(--orange)",
}
FLEET = {
    "healthy": "good", "suspect": "warn", "stale": "warn", "restarting": "warn", "isolated": "warn", "dead": "bad",
}  # fmt: skip
# Steps over which shares of time are taken.
RECENT_STEPS = 20


def build(run: RunFolder, place: Place) -> Update:
    """Draws the overview of a run."""
    parts = [_missing(run), _readings(run)]
    with ui.element("div").classes("grid"):
        parts += [_chart(run, figures.reward, "two-thirds"), _trainer_time(run)]
        parts += [_buffer(run), _servers(run)]
        parts += [_chart(run, draw, "half") for draw in (figures.throughput, figures.staleness)]

    def update() -> None:
        for part in parts:
            part()

    update()
    return update


def _missing(run: RunFolder) -> Update:
    box = ui.element("div")
    shown: list[str] = []

    def update() -> None:
        if run.missing != shown:
            shown[:] = run.missing
            box.clear()
            with box:
                for sentence in shown:
                    notice(sentence)

    return update


def _readings(run: RunFolder) -> Update:
    with ui.element("div").classes("readings"):
        step, reward, score = Reading("Step"), Reading("Reward"), Reading("Held-out score")
        speed, staleness, remaining = Reading("Generated"), Reading("Staleness, mean"), Reading("Remaining")

    def update() -> None:
        latest = run.metrics.latest
        total = run.total_steps
        step.show(str(run.step), f"/ {total}" if total is not None else "", f"version {run.version}")
        reward.show(units.fixed(latest(names.REWARD)), below=_change(run, names.REWARD))
        scores = run.series(names.SCORE).finite
        best = f"best {units.fixed(float(scores.values.max()))}" if len(scores) else "not evaluated"
        score.show(units.fixed(latest(names.SCORE)), below=best)
        trained = latest(names.TRAINED_RATE)
        speed.show(
            units.number(latest(names.SAMPLED_RATE)),
            "tokens/s",
            "" if trained is None else f"{units.number(trained)} tokens/s trained",
        )
        bound = run.pacing.staleness_bound if run.pacing else None
        oldest = f"oldest {units.number(latest(names.STALENESS_MAX))}"
        staleness.show(
            units.number(latest(names.STALENESS_MEAN), 2),
            "versions",
            oldest if bound is None else f"{oldest}, bound {bound}",
        )
        seconds = _recent_step_seconds(run)
        left = None if seconds is None or total is None else seconds * max(0, total - run.step)
        pace = "" if seconds is None else f"{units.duration(seconds)} a step"
        if run.status in ACTIVE:
            remaining.show(units.duration(left), below=pace, name="Remaining")
        else:
            remaining.show(units.duration(run.seconds), below=pace, name="Duration")

    return update


def _change(run: RunFolder, name: str) -> str:
    """The latest value against that of ten steps before."""
    values = run.series(name).finite.values
    if len(values) < 2:
        return ""
    return f"{values[-1] - values[max(0, len(values) - 11)]:+.3f} in {min(10, len(values) - 1)} steps"


def _recent_step_seconds(run: RunFolder) -> float | None:
    seconds = run.series("time/step").finite.values[-RECENT_STEPS:]
    return float(seconds.mean()) if len(seconds) else None


def _chart(run: RunFolder, draw: Callable[[RunFolder], Figure | None], width: str) -> Update:
    with ui.element("section").classes(f"card {width}"):
        return Chart(lambda: draw(run)).update


def _trainer_time(run: RunFolder) -> Update:
    """What the trainer does, and what it waits for, as shares of the latest steps' time."""
    with card("The trainer's time", f"latest {RECENT_STEPS} steps", "third"):
        shares = Shares(units.share)

    def update() -> None:
        steps, values = run.metrics.aligned(["time/step", *TRAINER_WAITS])
        seconds = np.nan_to_num(values[:, -RECENT_STEPS:]).sum(axis=1) if len(steps) else np.zeros(5)
        whole = float(seconds[0])
        if whole <= 0:
            return
        parts = {
            label: (float(spent) / whole, colour)
            for (label, colour), spent in zip(TRAINER_WAITS.values(), seconds[1:], strict=True)
            if spent > 0
        }
        parts["other"] = (max(0.0, 1 - sum(amount for amount, _ in parts.values())), "var(--gray)")
        shares.show(parts, 1.0)

    return update


def _buffer(run: RunFolder) -> Update:
    with card("Buffer", "groups in its slots, by state", "third"):
        shares = Shares(units.number)

    def update() -> None:
        latest = {state: run.metrics.latest(f"{names.BUFFER_PREFIX}{state}") for state in SLOTS}
        counts = {state: (count, SLOTS[state]) for state, count in latest.items() if count is not None}
        taken = sum(count for count, _ in counts.values())
        capacity = max(taken, run.pacing.capacity if run.pacing else 0)
        counts["free"] = (capacity - taken, "var(--line)")
        shares.show(counts, capacity)

    return update


def _servers(run: RunFolder) -> Update:
    with card("Servers", width="third"):
        table = Table(("state", "servers"), ("servers",))

    def update() -> None:
        latest = {state: run.metrics.latest(f"fleet/{state}") for state in FLEET}
        table.show([((state, FLEET[state]), units.number(count)) for state, count in latest.items() if count])

    return update
