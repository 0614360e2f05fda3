"""What a report says about one run: what was run, how it went, why it is as fast as it is, what went wrong.

Every number comes from the run's own files; a statement for which they have no number is left out.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megasync.config import CONFIG_FILE, CUSTOM_FILE
from megasync.observe import names
from megasync.observe.curve import held_out_name
from megasync.observe.registry import CHAPTERS, metric_of
from megasync.observe.samples import before_and_after
from megasync.watch import configuration, figures, units
from megasync.watch.document import (
    Cell,
    Chart,
    Document,
    Facts,
    Number,
    Readings,
    Section,
    Table,
    Text,
    Verbatim,
    fixed,
    number,
    seconds,
    share,
    size,
)
from megasync.watch.metric_table import Floats, Series
from megasync.watch.run_folder import ACTIVE, CRASHED, FAILED, FINISHED, STOPPED, RunFolder
from megasync.watch.sections.responses import responses
from megasync.watch.sections.timeline import timeline

# Rows of the table of the course of a run, and of its longest waits.
COURSE_ROWS, LONGEST_WAITS = 12, 8
# Sample responses, and characters of each that are shown.
SHOWN_ANSWERS, SHOWN_CHARACTERS = 8, 600
# Faults that are listed; more are counted.
SHOWN_FAULTS = 200
# From this share of its time on, what a trainer waits for is worth a sentence.
NOTABLE_WAIT = 0.1

PHASES = {
    "time/train": "Training: scoring, forward and backward passes, optimizer",
    "time/wait_for_groups": "Waiting for finished groups",
    "time/sync": "Publishing weights",
    "time/turns": "Handing devices over",
}
# Columns of the course of a run: heading, metric, how it is shown.
COURSE: Sequence[tuple[str, str, Callable[[float | None], Cell]]] = (
    ("Reward", names.REWARD, fixed),
    ("Score", names.SCORE, fixed),
    ("Loss", names.TRAINING_LOSS, fixed),
    ("Validation loss", names.VALIDATION_LOSS, fixed),
    ("Staleness", names.STALENESS_MEAN, number),
    ("Generated tokens/s", names.SAMPLED_RATE, number),
    ("Trained tokens/s", names.TRAINED_RATE, number),
    ("Length", "rollout/response_length", number),
    ("Entropy", "train/entropy", number),
    ("Gradient norm", "train/grad_norm", number),
)
ENDINGS = {
    FINISHED: "and finished",
    STOPPED: "and was stopped",
    FAILED: "and failed",
    CRASHED: "and crashed: its driver ended without a word",
}


def make_report(run: RunFolder) -> Document:
    """The report on a run in any state."""
    sections = [_what_was_run(run), _how_it_went(run), _speed(run), timeline(run), _troubles(run), _answers(run)]
    sections += [responses(run), _again(run), _appendix(run)]
    return Document(
        title=run.name,
        subtitle=_subtitle(run),
        status=run.status,
        abstract=_abstract(run),
        readings=Readings(_readings(run)),
        sections=sections,
        notes=run.missing,
    )


# The head


def _subtitle(run: RunFolder) -> str:
    kind = "Supervised run" if run.supervised else "Reinforcement learning run"
    if run.start is None or run.end is None:
        return kind
    last = "as of" if run.status in ACTIVE else "to"
    return f"{kind} of megasync, {units.day_and_clock(run.start)} {last} {units.day_and_clock(run.end)}"


def _abstract(run: RunFolder) -> str:
    """What a reader in a hurry takes home."""
    model = run.settings.get("model.path")
    trained = "Trained" if model is None else f"Trained {model}"
    data = _data(run)
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
    oldest = run.series(names.STALENESS_MAX).finite.values
    if len(oldest) and run.pacing is not None:
        mean = run.series(names.STALENESS_MEAN).finite.values.mean()
        sentences.append(
            f"Trained responses were {mean:.2f} versions old on average and {oldest.max():g} at most, with a bound of "
            f"{run.pacing.staleness_bound}."
        )
    if faults := run.faults:
        sentences.append(f"{_count(len(faults), 'fault')} happened.")
    return " ".join(sentences)


def _data(run: RunFolder) -> str:
    place = "sft.train" if run.supervised else "data.train"
    parts = [run.settings.get(f"{place}.{key}") for key in ("kind", "source")]
    return "/".join(str(part) for part in parts if part)


# What was run


def _what_was_run(run: RunFolder) -> Section:
    section = Section("What was run")
    section.add(Facts(_facts(run)))
    section.add(
        Table(
            "Settings that differ from the defaults.",
            ("Key", "Value", "Default"),
            [
                (item.key, configuration.shown(item.values[0], item.key), configuration.shown(item.default, item.key))
                for item in configuration.changed(run.settings)
            ],
        )
    )
    return section


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    get = run.settings.get
    facts = [("Model", _joined(get("model.path"), get("model.dtype"))), ("Training data", _data(run))]
    if run.supervised:
        rows = get("sft.rows_per_step")
        facts.append(("Batch", f"{rows} rows a step" if rows else ""))
    else:
        facts.append(("Held-out data", _joined(get("data.eval.kind"), get("data.eval.source"), separator="/")))
        facts.append(("Algorithm", _joined(get("algorithm.advantage"), get("algorithm.loss"), _correction(run))))
        facts.append(("Batch", _batch(run)))
        facts.append(("Servers", _servers(run)))
    facts.append(("Trainer", _trainer(run)))
    facts.append(("Optimizer", "" if get("trainer.optimizer.lr") is None else f"lr {get('trainer.optimizer.lr'):g}"))
    facts.append(("Devices", _devices(run)))
    if run.state is not None:
        facts.append(("Driver", _joined(f"process {run.state.pid}", f"on {run.state.host}", separator=" ")))
    facts += [(name, version) for name, version in run.versions.items()]
    facts.append(("Directory", str(run.path)))
    return [(name, text) for name, text in facts if text]


def _correction(run: RunFolder) -> str | None:
    value = run.settings.get("algorithm.correction")
    return None if value is None else f"off-policy correction {value}"


def _batch(run: RunFolder) -> str:
    groups, samples = (run.settings.get(f"schedule.{key}") for key in ("groups_per_step", "samples_per_group"))
    if not isinstance(groups, int) or not isinstance(samples, int):
        return ""
    pacing = run.pacing
    bound = (
        "" if pacing is None else f"; staleness at most {pacing.staleness_bound}, {pacing.capacity} groups in flight"
    )
    return f"{groups} groups of {samples} = {groups * samples} responses a step{bound}"


def _servers(run: RunFolder) -> str:
    external = run.settings.get("rollout.external")
    count = len(external) if isinstance(external, list) and external else run.settings.get("rollout.servers")
    tensor = run.settings.get("rollout.tensor_parallel")
    return "" if count is None else f"{_count(count, 'SGLang server')}{f', tensor parallel {tensor}' if tensor else ''}"


def _trainer(run: RunFolder) -> str:
    sizes = {
        kind: run.settings.get(f"trainer.{kind}_parallel")
        for kind in ("tensor", "pipeline", "context", "data", "expert")
    }
    known = {kind: value for kind, value in sizes.items() if isinstance(value, int)}
    if not {"tensor", "pipeline", "data"} <= known.keys():
        return ""
    ranks = known["tensor"] * known["pipeline"] * known["data"] * known.get("context", 1)
    described = ", ".join(f"{kind} {value}" for kind, value in known.items() if value > 1)
    return f"{_count(ranks, 'Megatron rank')}{f': parallel {described}' if described else ''}"


def _devices(run: RunFolder) -> str:
    """Those of the trainer by name, and the number of hosts; of a run that did not record names, their kind."""
    ranks, servers = (run.state.ranks, run.state.servers) if run.state is not None else ([], [])
    kinds = Counter(rank.device for rank in ranks if rank.device)
    named = [f"{count} × {name}" for name, count in kinds.items()] or [str(run.settings.get("cluster.device") or "")]
    hosts = {rank.node for rank in ranks if rank.node}
    places = [f"trainer on {units.counted(len(hosts), 'host')}"] if hosts else []
    if addresses := {server.url.rpartition(":")[0] for server in servers if server.url}:
        places.append(f"servers on {units.counted(len(addresses), 'host')}")
    return "; ".join(part for part in (" and ".join(named), ", ".join(places)) if part)


# How it went


def _how_it_went(run: RunFolder) -> Section:
    section = Section("How it went")
    section.add(_chart(run, figures.reward, "Mean reward in training, and scores on held-out prompts.", wide=True))
    if run.supervised:
        section.add(_chart(run, figures.losses, "Negative log-probability of a trained token.", wide=True))
    section.add(_score_table(run), _course(run))
    section.add(
        _chart(
            run, figures.staleness, "Versions between the weights that sampled a response and those that it trained."
        )
    )
    section.add(_chart(run, figures.staleness_ages, "Ages of the trained tokens, in versions."))
    section.add(_chart(run, figures.lengths, "Lengths of the latest responses, and of the trained ones if measured."))
    section.add(_chart(run, figures.truncated, "Responses that reached the maximum length."))
    section.add(_chart(run, figures.entropy, "Entropy of the policy at the trained tokens."))
    section.add(_chart(run, figures.gaps, "How far the servers' probabilities are from the trainer's."))
    section.add(
        _chart(run, figures.clipping, "Tokens that the loss clipped, and those that the off-policy correction changed.")
    )
    if not run.supervised:
        section.add(_chart(run, figures.losses, "Loss of the policy, with its KL and entropy terms."))
    section.add(_chart(run, figures.norms, "Norm of all gradients before clipping."))
    return section


def _readings(run: RunFolder) -> list[tuple[str, Cell, str]]:
    tokens = run.series(names.TRAINED_TOKENS).finite.values
    rows: list[tuple[str, Cell, str]] = [
        ("Steps", Number(run.step, str(run.step)), "" if run.total_steps is None else f"of {run.total_steps}"),
        ("Duration", seconds(run.seconds), _pace(run)),
        ("Trained tokens", number(float(tokens.sum())) if len(tokens) else None, ""),
    ]
    for title, name, places in (
        ("Held-out score", names.SCORE, 3),
        ("Reward", names.REWARD, 3),
        ("Loss", names.TRAINING_LOSS, 4),
        ("Validation loss", names.VALIDATION_LOSS, 4),
    ):
        values = run.series(name).finite.values
        if len(values):
            rows.append((title, fixed(float(values[-1]), places), f"from {values[0]:.{places}f}"))
    for title, name in (("Generated tokens/s", names.SAMPLED_RATE), ("Trained tokens/s", names.TRAINED_RATE)):
        values = run.series(name).finite.values
        if len(values):
            rows.append((title, number(float(np.median(values))), f"median; at most {units.number(values.max())}"))
    utilization = run.series("train/mfu").finite.values
    if len(utilization):
        rows.append(("Model FLOPs utilization", share(float(np.median(utilization))), "median"))
    oldest = run.series(names.STALENESS_MAX).finite.values
    if len(oldest):
        mean = float(run.series(names.STALENESS_MEAN).finite.values.mean())
        bound = "" if run.pacing is None else f", bound {run.pacing.staleness_bound}"
        rows.append(("Staleness, mean", number(mean), f"oldest {oldest.max():g}{bound}"))
    return rows


def _pace(run: RunFolder) -> str:
    values = run.series("time/step").finite.values
    return f"{units.duration(float(np.median(values)))} a step, median" if len(values) else ""


def _score_table(run: RunFolder) -> Table:
    """First, best and last of every held-out score."""
    rows: list[Sequence[Cell]] = []
    for name, series in run.scores.items():
        known = series.finite
        if len(known):
            best = int(known.values.argmax())
            rows.append(
                (
                    held_out_name(name) or name,
                    *(fixed(float(known.values[at])) for at in (0, best, -1)),
                    Number(int(known.steps[best]), str(known.steps[best])),
                    Number(len(known), str(len(known))),
                )
            )
    headings = ("Set", "First", "Best", "Last", "Step of the best", "Evaluations")
    return Table("Scores on held-out prompts: share of right answers.", headings, rows)


def _course(run: RunFolder) -> Table | None:
    """The run at evenly spaced steps."""
    steps = np.unique(np.concatenate([run.series(name).steps for _, name, _ in COURSE])).astype(np.int64)
    if not len(steps):
        return None
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, COURSE_ROWS).round().astype(int))]
    columns = [(heading, run.series(name).finite, show) for heading, name, show in COURSE]
    columns = [column for column in columns if len(column[1])]
    clock = run.series("version") if len(run.series("version")) else columns[0][1]
    rows = []
    for step in chosen.tolist():
        at = _up_to(clock, step)
        passed = None if at is None else float(run.elapsed(clock.times[at : at + 1])[0])
        cells = [show(_value_up_to(series, step)) for _, series, show in columns]
        rows.append((Number(step, str(step)), seconds(passed), *cells))
    headings = ("Step", "Time", *(heading for heading, *_ in columns))
    return Table("The run at evenly spaced steps; each number is the latest measured by then.", headings, rows)


# Why it is as fast as it is


def _speed(run: RunFolder) -> Section:
    section = Section("Why it is as fast as it is")
    if text := _bottleneck(run):
        section.add(Text(text))
    section.add(_chart(run, figures.throughput, "Tokens per second of wall time."))
    section.add(_chart(run, figures.utilization, "Operations of the model by the peak of the devices."))
    section.add(_chart(run, figures.per_device, "Tokens of prompts and responses that one device computes."))
    section.add(_chart(run, figures.time_shares, "What the trainer's time was spent on.", wide=True))
    section.add(_time_table(run), _waits(run))
    section.add(_chart(run, figures.buffer_slots, "Groups in the buffer by state, when a step ended."))
    section.add(_server_table(run))
    section.add(_chart(run, figures.servers, "Servers by state, when a step ended."))
    section.add(_chart(run, figures.sync_phases, "Duration of a publish, by phases that follow one another."))
    section.add(_sync_table(run))
    section.add(_chart(run, figures.sync_rate, "Bytes that left the trainer, by the time in which they moved."))
    return section


def _phase_seconds(run: RunFolder) -> tuple[Any, Floats]:
    """Steps [steps], and the seconds of the step and of its phases: [1 + phases, steps]."""
    steps, values = run.metrics.aligned(["time/step", *PHASES])
    known = np.isfinite(values[0]) if len(steps) else np.zeros(0, bool)
    return steps[known], np.nan_to_num(values[:, known])


def _bottleneck(run: RunFolder) -> str:
    steps, values = _phase_seconds(run)
    whole = float(values[0].sum()) if len(steps) else 0.0
    if whole <= 0:
        return ""
    shares = dict(zip(PHASES, values[1:].sum(axis=1) / whole, strict=True))
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
    whole, parts = values[0], values[1:]
    rows: list[Sequence[Cell]] = [
        _spent(label, part, whole, steps) for label, part in zip(PHASES.values(), parts, strict=True) if part.any()
    ]
    rows.append(_spent("Everything else", np.maximum(whole - parts.sum(axis=0), 0), whole, steps))
    rows.append(_spent("Steps", whole, whole, steps))
    headings = ("Phase", "Total", "Share", "Median", "95th percentile", "Longest", "Step of the longest")
    return Table("The trainer's time by phase.", headings, rows)


def _spent(label: str, part: Floats, whole: Floats, steps: Any) -> Sequence[Cell]:
    longest = int(part.argmax())
    return (
        label,
        seconds(float(part.sum())),
        share(float(part.sum() / whole.sum())) if whole.sum() else None,
        seconds(float(np.median(part))),
        seconds(float(np.quantile(part, 0.95))),
        seconds(float(part[longest])),
        Number(int(steps[longest]), str(steps[longest])),
    )


def _waits(run: RunFolder) -> Table | None:
    """The longest waits of the trainer, with the faults during their steps."""
    steps, values = _phase_seconds(run)
    waits = [("time/wait_for_groups", "for groups"), ("time/sync", "for a publish"), ("time/turns", "for the devices")]
    order = list(PHASES)
    found = [
        (float(value), int(step), what)
        for name, what in waits
        for step, value in zip(steps, values[1 + order.index(name)], strict=True)
        if value > 0
    ]
    ends = dict(zip(run.series("time/step").steps.tolist(), run.series("time/step").times.tolist(), strict=True))
    durations = dict(zip(steps.tolist(), values[0].tolist(), strict=True))
    rows: list[Sequence[Cell]] = []
    for waited, step, what in sorted(found, reverse=True)[:LONGEST_WAITS]:
        during = [fault.what for fault in run.faults if ends[step] - durations[step] <= fault.time <= ends[step]]
        rows.append((Number(step, str(step)), what, seconds(waited), ", ".join(dict.fromkeys(during)) or "–"))
    return Table("The longest waits of the trainer.", ("Step", "Waited", "Duration", "Faults meanwhile"), rows)


def _server_table(run: RunFolder) -> Table | None:
    """What keeps the servers from generating, as far as the driver measures it."""
    rows: list[Sequence[Cell]] = []
    paused, whole = run.series("sync/pause_seconds").finite.values, run.series("time/step").finite.values.sum()
    if len(paused):
        rows.append(("Paused to take weights, total", seconds(float(paused.sum()))))
        rows.append(("The same as a share of the steps' time", share(float(paused.sum() / whole)) if whole else None))
    for name, label, show in (
        ("rollout/inflight_requests", "Requests at the servers when a step ended, median", number),
        ("rollout/inflight_limit", "Limit of requests, median", number),
        ("rollout/kv_usage", "Use of the fullest server's cache, median", share),
    ):
        values = run.series(name).finite.values
        if len(values):
            rows.append((label, show(float(np.median(values)))))
    generated, trained = _total(run.series("rollout/tokens")), run.series(names.TRAINED_TOKENS).finite.values.sum()
    if generated:
        rows.append(("Generated tokens", number(generated)))
        rows.append(("Trained tokens, as a share of them", share(float(trained / generated))))
    return Table("The servers' side.", ("Quantity", "Value"), rows)


def _sync_table(run: RunFolder) -> Table | None:
    rows: list[Sequence[Cell]] = []
    phases = [name for name in run.under("sync/") if name.endswith("_seconds")]
    for name in sorted(phases, key=lambda name: -run.series(name).finite.values.sum()):
        known = run.series(name).finite
        if len(known):
            longest = int(known.values.argmax())
            label = name.removeprefix("sync/").removesuffix("_seconds").replace("_", " ")
            rows.append(
                (
                    label,
                    *_quantiles(known.values, seconds),
                    Number(int(known.steps[longest]), str(known.steps[longest])),
                )
            )
    sent, rate = run.series("sync/bytes").finite.values, figures.sync_bytes_per_second(run).finite.values
    if len(sent):
        rows.append(("bytes sent", *_quantiles(sent, size), None))
    if len(rate):
        rows.append(("bytes/s", *_quantiles(rate, lambda value: size(value, "/s")), None))
    headings = ("Phase", "Median", "95th percentile", "Largest", "Step of the largest")
    return Table("Weight sync, of the slowest rank or server. Phases overlap.", headings, rows)


def _quantiles(values: Floats, show: Callable[[float | None], Cell]) -> tuple[Cell, Cell, Cell]:
    return show(float(np.median(values))), show(float(np.quantile(values, 0.95))), show(float(values.max()))


# What went wrong


def _troubles(run: RunFolder) -> Section:
    section = Section("What went wrong")
    faults = run.faults
    rows: list[Sequence[Cell]] = [
        (
            units.duration(float(run.elapsed(np.array([fault.time]))[0])),
            fault.what,
            _shortened(fault.text),
            None if fault.recovered is None else seconds(fault.recovered - fault.time),
            seconds(fault.seconds_to_next_step),
        )
        for fault in faults[:SHOWN_FAULTS]
    ]
    more = f" The first {SHOWN_FAULTS} of {len(faults)}." if len(faults) > SHOWN_FAULTS else ""
    headings = ("After", "What", "Fault", "Recovered after", "Next step after")
    section.add(Table(f"Faults.{more}", headings, rows, texts=("Fault",)))
    if not faults:
        recorded = "No fault was recorded." if run.events else "The run recorded no events: its faults are not known."
        section.add(Text(recorded))
    section.add(_counts(run), _drops(run))
    return section


def _counts(run: RunFolder) -> Table:
    """Counters of what should not happen, those that are not zero."""
    rows: list[Sequence[Cell]] = []
    for name in [
        *run.under("faults/"),
        *run.under("fleet/"),
        *run.under("rollout/"),
        *run.under("groups/"),
        *run.under("train/skipped"),
    ]:
        known = metric_of(name)
        if (
            known is None
            or not (known.counts or name == "train/skipped")
            or name in EXPECTED_COUNTS
            or "dropped" in name
        ):
            continue
        total = _total(run.series(name)) if known.counts else float(run.series(name).finite.values.sum())
        if total:
            rows.append((name, Number(total, f"{total:g}"), known.unit, known.meaning))
    return Table("Counters of faults and losses that are not zero.", ("Metric", "Total", "Unit", "Meaning"), rows)


# Counters that grow in every run.
EXPECTED_COUNTS = {"rollout/tokens", "rollout/groups", "groups/admitted", "groups/trained"}


def _drops(run: RunFolder) -> Table | None:
    balance = run.balance
    if balance is None:
        return None
    rows: list[Sequence[Cell]] = [
        ("admitted", Number(balance.admitted, str(balance.admitted))),
        ("trained", Number(balance.trained, str(balance.trained))),
        *((f"dropped: {reason}", Number(count, str(count))) for reason, count in sorted(balance.dropped.items())),
        ("live: neither trained nor dropped yet", Number(balance.live, str(balance.live))),
        ("unaccounted for", Number(balance.lost, str(balance.lost))),
    ]
    verdict = "Every admitted prompt is accounted for" if balance.lost == 0 else "Prompts are unaccounted for"
    return Table(f"{verdict}, by {balance.source}.", ("Prompts", "Groups"), rows)


# Responses


def _answers(run: RunFolder) -> Section:
    section = Section("Responses before and after training")
    pairs = before_and_after(run.answers)[:SHOWN_ANSWERS]
    rows: list[Sequence[Cell]] = [
        (
            _shortened(early.prompt),
            _shortened(early.text),
            fixed(early.reward, 2),
            _shortened(late.text),
            fixed(late.reward, 2),
        )
        for early, late in pairs
    ]
    if pairs:
        first, last = min(early.step for early, _ in pairs), max(late.step for _, late in pairs)
        headings = ("Prompt", f"Step {first}", "Reward", f"Step {last}", "Reward ")
        caption = "The most likely responses to the same held-out prompts."
        section.add(Table(caption, headings, rows, texts=(headings[0], headings[1], headings[3])))
    return section


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"


# Again


def _again(run: RunFolder) -> Section:
    section = Section("How to reproduce it")
    command = "sft" if run.supervised else "train"
    path = shlex.quote(str(run.path))
    lines = [
        "# the same configuration and seed, in a new run directory",
        f"megasync {command} {shlex.quote(str(run.path / CONFIG_FILE))}",
        "# continue this run from its newest checkpoint",
        f"megasync resume {path}",
    ]
    if not run.supervised:
        lines += ["# score its newest checkpoint", f"megasync eval {path}"]
    lines += ["# look at it, and write this report again", f"megasync watch {path}", f"megasync report {path}"]
    section.add(Verbatim("\n".join(lines), "bash"))
    if custom := run.custom:
        section.add(
            Text(
                f"The run got {', '.join(custom)} from Python ({CUSTOM_FILE}), so it is started by the program that "
                "calls AsyncTrainer, not by these commands."
            )
        )
    return section


# All of it


def _appendix(run: RunFolder) -> Section:
    section = Section("All metrics and settings")
    order = {metric.name: at for at, metric in enumerate(metric for chapter in CHAPTERS for metric in chapter.metrics)}
    known = {name: metric_of(name) for name in run.metrics.names}

    def place(name: str) -> tuple[int, str]:
        metric = known[name]
        return (len(order) if metric is None else order[metric.name]), name

    rows: list[Sequence[Cell]] = []
    for name in sorted(known, key=place):
        series, metric = run.series(name).finite, known[name]
        if not len(series):
            continue
        values = series.values
        rows.append(
            (
                name,
                metric.unit if metric else "",
                Number(len(values), str(len(values))),
                *(_exact(value) for value in (values[0], values[-1], values.min(), values.mean(), values.max())),
                metric.meaning if metric else "",
            )
        )
    headings = ("Metric", "Unit", "Values", "First", "Last", "Smallest", "Mean", "Largest", "Meaning")
    section.add(Table("Every metric that was logged.", headings, rows, folded=True))
    settings = [(key, configuration.shown(value, key)) for key, value in run.settings.items()]
    section.add(Table("The whole configuration.", ("Key", "Value"), settings, folded=True))
    return section


# Small things


def _chart(run: RunFolder, draw: Callable[[RunFolder], Any], caption: str, wide: bool = False) -> Chart | None:
    figure = draw(run)
    if figure is None:
        return None
    note = figure.layout.meta["note"]
    return Chart(f"{caption} {note[0].upper()}{note[1:]}." if note else caption, figure, wide)


def _exact(value: Any) -> Number:
    return Number(float(value), f"{float(value):.4g}")


def _total(series: Series) -> float:
    """The sum over all starts of a counter that begins again when a run is resumed."""
    values = series.finite.values
    if not len(values):
        return 0.0
    return float(values[np.flatnonzero(np.diff(values) < 0)].sum() + values[-1])


def _up_to(series: Series, step: int) -> int | None:
    """Index of the last value at or before the step."""
    at = int(np.searchsorted(series.steps, step, side="right")) - 1
    return at if at >= 0 else None


def _value_up_to(series: Series, step: int) -> float | None:
    at = _up_to(series, step)
    return None if at is None else float(series.values[at])


def _joined(*parts: object, separator: str = ", ") -> str:
    return separator.join(str(part) for part in parts if part)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
