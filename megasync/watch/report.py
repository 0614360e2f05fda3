"""What a report says about one run: what was run, how it went, why it is as fast as it is, what went wrong.

Every number comes from the run's own files; a statement for which they have no number is left out.
"""

from __future__ import annotations

import numpy as np

from megasync.observe import names
from megasync.watch import units
from megasync.watch.document import Cell, Document, Number, Readings, fixed, number, seconds, share
from megasync.watch.run_folder import ACTIVE, CRASHED, FAILED, FINISHED, STOPPED, RunFolder
from megasync.watch.sections.appendix import appendix, reproduction
from megasync.watch.sections.course import course
from megasync.watch.sections.responses import responses, samples
from megasync.watch.sections.setup import setup, training_data
from megasync.watch.sections.speed import speed
from megasync.watch.sections.timeline import timeline
from megasync.watch.sections.troubles import troubles

ENDINGS = {
    FINISHED: "and finished",
    STOPPED: "and was stopped",
    FAILED: "and failed",
    CRASHED: "and crashed: its driver ended without a word",
}


def make_report(run: RunFolder) -> Document:
    """The report on a run in any state."""
    sections = [
        setup(run),
        course(run),
        speed(run),
        timeline(run),
        troubles(run),
        samples(run),
        responses(run),
        reproduction(run),
        appendix(run),
    ]
    return Document(
        title=run.name,
        subtitle=_subtitle(run),
        status=run.status,
        abstract=_abstract(run),
        readings=Readings(_readings(run)),
        sections=sections,
        notes=run.missing,
    )


def _subtitle(run: RunFolder) -> str:
    kind = "Service" if run.served else "Supervised run" if run.supervised else "Reinforcement learning run"
    if run.start is None or run.end is None:
        return kind
    last = "as of" if run.status in ACTIVE else "to"
    return f"{kind} of megasync, {units.day_and_clock(run.start)} {last} {units.day_and_clock(run.end)}"


def _abstract(run: RunFolder) -> str:
    """Sums a run up for a reader in a hurry."""
    model = run.settings.get("model.path")
    trained = "Trained" if model is None else f"Trained {model}"
    data = training_data(run)
    total = "" if run.total_steps is None else f" of {run.total_steps}"
    so_far = "so far" if run.status in ACTIVE else ENDINGS[run.status]
    reason = f" ({run.reason})" if run.reason else ""
    target = run.settings.get("schedule.stop_at_score")
    if run.status == FINISHED and run.total_steps and run.step < run.total_steps and target is not None:
        reason = f" because the held-out score reached {target}"
    sentences = [
        f"{trained}{f' on {data}' if data else ''} for {run.step}{total} steps"
        f"{'' if run.seconds is None else f' in {units.duration(run.seconds)}'}, {so_far}{reason}."
    ]
    for name, word in ((names.SCORE, "held-out score"), (names.VALIDATION_LOSS, "validation loss")):
        values = run.series(name).finite
        if len(values) > 1:
            best = (values.values.min if name == names.VALIDATION_LOSS else values.values.max)()
            sentences.append(
                f"The {word} went from {values.values[0]:.3f} at step {values.steps[0]} to {values.values[-1]:.3f} at "
                f"step {values.steps[-1]}; the best is {best:.3f}."
            )
    oldest = run.statistic(names.STALENESS_MAX, np.max)
    if oldest is not None and run.pacing is not None:
        mean = run.values(names.STALENESS_MEAN).mean()
        sentences.append(
            f"Trained responses were {mean:.2f} versions old on average and {oldest:g} at most, with a bound of "
            f"{run.pacing.staleness_bound}."
        )
    if faults := run.faults:
        sentences.append(f"{units.counted(len(faults), 'fault')} happened.")
    return " ".join(sentences)


def _readings(run: RunFolder) -> list[tuple[str, Cell, str]]:
    rows: list[tuple[str, Cell, str]] = [
        ("Steps", Number(run.step, str(run.step)), "" if run.total_steps is None else f"of {run.total_steps}"),
        ("Duration", seconds(run.seconds), _pace(run)),
        ("Trained tokens", number(run.statistic(names.TRAINED_TOKENS, np.sum)), ""),
    ]
    for title, name, places in (
        ("Held-out score", names.SCORE, 3),
        ("Reward", names.REWARD, 3),
        ("Loss", names.TRAINING_LOSS, 4),
        ("Validation loss", names.VALIDATION_LOSS, 4),
    ):
        values = run.values(name)
        if len(values):
            rows.append((title, fixed(float(values[-1]), places), f"from {values[0]:.{places}f}"))
    for title, name in (("Generated tokens/s", names.SAMPLED_RATE), ("Trained tokens/s", names.TRAINED_RATE)):
        values = run.values(name)
        if len(values):
            rows.append((title, number(float(np.median(values))), f"median; at most {units.number(values.max())}"))
    if (utilization := run.statistic("train/mfu", np.median)) is not None:
        rows.append(("Model FLOPs utilization", share(utilization), "median"))
    if (oldest := run.statistic(names.STALENESS_MAX, np.max)) is not None:
        bound = "" if run.pacing is None else f", bound {run.pacing.staleness_bound}"
        mean = number(run.statistic(names.STALENESS_MEAN, np.mean))
        rows.append(("Staleness, mean", mean, f"oldest {oldest:g}{bound}"))
    return rows


def _pace(run: RunFolder) -> str:
    median = run.statistic("time/step", np.median)
    return "" if median is None else f"{units.duration(median)} a step, median"
