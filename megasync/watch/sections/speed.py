"""Why a run is as fast as it is: what the trainer's time was spent on, the servers' side, and the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megasync.observe import names
from megasync.watch import figures, units
from megasync.watch.document import Cell, Number, Section, Table, Text, charts, number, seconds, share, size
from megasync.watch.metric_table import Floats
from megasync.watch.run_folder import RunFolder

# Waits that are listed.
LONGEST_WAITS = 8
# From this share of its time on, what a trainer waits for is worth a sentence.
NOTABLE_WAIT = 0.1

PHASES = {
    "time/train": "Training: scoring, forward and backward passes, optimizer",
    "time/wait_for_groups": "Waiting for finished groups",
    "time/sync": "Publishing weights",
    "time/turns": "Handing devices over",
}


def speed(run: RunFolder) -> Section:
    section = Section("Why it is as fast as it is")
    if text := _bottleneck(run):
        section.add(Text(text))
    section.add(*charts(run, figures.throughput, figures.utilization, figures.per_device))
    section.add(*charts(run, figures.time_shares, wide=True), _time_table(run), _waits(run))
    section.add(*charts(run, figures.buffer_slots), _server_table(run))
    section.add(*charts(run, figures.servers, figures.sync_phases), _sync_table(run))
    section.add(*charts(run, figures.sync_rate))
    return section


def _phase_seconds(run: RunFolder) -> tuple[Any, Floats]:
    """Steps [steps], and the seconds of the step and of its phases: [1 + phases, steps]."""
    steps, values = run.metrics.aligned(["time/step", *PHASES])
    measured = np.isfinite(values[0]) if len(steps) else np.zeros(0, bool)
    return steps[measured], np.nan_to_num(values[:, measured])


def _bottleneck(run: RunFolder) -> str:
    steps, values = _phase_seconds(run)
    total = float(values[0].sum()) if len(steps) else 0.0
    if total <= 0:
        return ""
    shares = dict(zip(PHASES, values[1:].sum(axis=1) / total, strict=True))
    waiting, publishing = shares["time/wait_for_groups"], shares["time/sync"]
    sentences = [
        f"The trainer trained during {units.share(shares['time/train'])} of the steps' time, waited for finished "
        f"groups during {units.share(waiting)} and published weights during {units.share(publishing)}."
    ]
    if waiting >= NOTABLE_WAIT:
        sentences.append(
            "The servers are slower than the trainer: more of them, or shorter responses, make steps faster."
        )
    elif (full := _buffer_full(run)) is not None and full >= 0.5:
        sentences.append(
            f"Every slot of the buffer held a finished or trained group at the end of {units.share(full)} of the "
            "steps, so the servers waited for the trainer: more ranks make steps faster."
        )
    if publishing >= NOTABLE_WAIT:
        sentences.append("Publishing takes a notable part: see the phases of the sync below.")
    return " ".join(sentences)


def _buffer_full(run: RunFolder) -> float | None:
    """Share of steps at whose end no group was generated and none waited to be."""
    steps, values = run.metrics.aligned(["buffer/generating", "buffer/returned"])
    return float((np.nan_to_num(values).sum(axis=0) == 0).mean()) if len(steps) else None


def _time_table(run: RunFolder) -> Table | None:
    steps, values = _phase_seconds(run)
    if not len(steps):
        return None
    total, parts = values[0], values[1:]
    rows: list[Sequence[Cell]] = [
        _spent(label, part, total, steps) for label, part in zip(PHASES.values(), parts, strict=True) if part.any()
    ]
    rows.append(_spent("Everything else", np.maximum(total - parts.sum(axis=0), 0), total, steps))
    rows.append(_spent("Steps", total, total, steps))
    headings = ("Phase", "Total", "Share", "Median", "95th percentile", "Longest", "Step of the longest")
    return Table("The trainer's time by phase.", headings, rows)


def _spent(label: str, part: Floats, total: Floats, steps: Any) -> Sequence[Cell]:
    longest = int(part.argmax())
    return (
        label,
        seconds(float(part.sum())),
        share(float(part.sum() / total.sum())) if total.sum() else None,
        seconds(float(np.median(part))),
        seconds(float(np.quantile(part, 0.95))),
        seconds(float(part[longest])),
        Number(int(steps[longest]), str(steps[longest])),
    )


def _waits(run: RunFolder) -> Table | None:
    """The longest waits of the trainer, with the faults during their steps."""
    steps, values = _phase_seconds(run)
    kinds = [("time/wait_for_groups", "for groups"), ("time/sync", "for a publish"), ("time/turns", "for the devices")]
    order = list(PHASES)
    waits = [
        (float(value), int(step), what)
        for name, what in kinds
        for step, value in zip(steps, values[1 + order.index(name)], strict=True)
        if value > 0
    ]
    ends = dict(zip(run.series("time/step").steps.tolist(), run.series("time/step").times.tolist(), strict=True))
    durations = dict(zip(steps.tolist(), values[0].tolist(), strict=True))
    rows: list[Sequence[Cell]] = []
    for waited, step, what in sorted(waits, reverse=True)[:LONGEST_WAITS]:
        during = [fault.what for fault in run.faults if ends[step] - durations[step] <= fault.time <= ends[step]]
        rows.append((Number(step, str(step)), what, seconds(waited), ", ".join(dict.fromkeys(during)) or "–"))
    return Table("The longest waits of the trainer.", ("Step", "Waited", "Duration", "Faults meanwhile"), rows)


def _server_table(run: RunFolder) -> Table | None:
    """Tabulates what keeps the servers from generating, as far as the driver measures it."""
    rows: list[Sequence[Cell]] = []
    paused, total = run.values("sync/pause_seconds"), run.values("time/step").sum()
    if len(paused):
        rows.append(("Paused to take weights, total", seconds(float(paused.sum()))))
        rows.append(("The same as a share of the steps' time", share(float(paused.sum() / total)) if total else None))
    for name, label, show in (
        ("rollout/inflight_requests", "Requests at the servers when a step ended, median", number),
        ("rollout/inflight_limit", "Limit of requests, median", number),
        ("rollout/kv_usage", "Use of the fullest server's cache, median", share),
    ):
        if (median := run.statistic(name, np.median)) is not None:
            rows.append((label, show(median)))
    generated, trained = run.series("rollout/tokens").total, run.values(names.TRAINED_TOKENS).sum()
    if generated:
        rows.append(("Generated tokens", number(generated)))
        rows.append(("Trained tokens, as a share of them", share(float(trained / generated))))
    return Table("The servers' side.", ("Quantity", "Value"), rows)


def _sync_table(run: RunFolder) -> Table | None:
    rows: list[Sequence[Cell]] = []
    phases = [name for name in run.under("sync/") if name.endswith("_seconds")]
    for name in sorted(phases, key=lambda name: -run.values(name).sum()):
        series = run.series(name).finite
        if len(series):
            longest = int(series.values.argmax())
            label = name.removeprefix("sync/").removesuffix("_seconds").replace("_", " ")
            rows.append(
                (
                    label,
                    *_quantiles(series.values, seconds),
                    Number(int(series.steps[longest]), str(series.steps[longest])),
                )
            )
    sent, rate = run.values("sync/bytes"), figures.sync_bytes_per_second(run).finite.values
    if len(sent):
        rows.append(("bytes sent", *_quantiles(sent, size), None))
    if len(rate):
        rows.append(("bytes/s", *_quantiles(rate, lambda value: size(value, "/s")), None))
    headings = ("Phase", "Median", "95th percentile", "Largest", "Step of the largest")
    return Table("Weight sync, of the slowest rank or server. Phases overlap.", headings, rows)


def _quantiles(values: Floats, show: Callable[[float | None], Cell]) -> tuple[Cell, Cell, Cell]:
    return show(float(np.median(values))), show(float(np.quantile(values, 0.95))), show(float(values.max()))
