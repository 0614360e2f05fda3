"""The first look at a run: six large numbers, the curves behind them, and what every part of it does now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from nicegui import ui
from plotly.graph_objects import Figure

from megasync.observe import names
from megasync.observe.events import CHECKPOINT, END, FAULT, RECOVERY, SYNC, Event
from megasync.observe.state_file import ProcessState, RunState
from megasync.watch import figures, units
from megasync.watch.chart import Chart
from megasync.watch.elements import Cell, Reading, Shares, Table, card, first_line, text, trouble, why_none
from megasync.watch.run_folder import ACTIVE, RunFolder
from megasync.watch.view import Place, Update, together
from megasync.watch.views import tenants

# What a step of the trainer consists of, and the states of the buffer's slots; colours are those of page.css.
TRAINER_TIMES = {
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
LOOKS = {"healthy": "good", "up": "good", "dead": "bad"}
# Steps over which shares of time are taken.
RECENT_STEPS = 20
# More processes of one kind are counted by their state, and those in unusual states are named, up to as many.
NAMED_PROCESSES = 8
SHOWN_MESSAGES = 12
# Heights in pixels.
LARGE_CHART, SMALL_CHART = 380, 260


def build(run: RunFolder, place: Place) -> Update:
    """Draws the overview of a run."""
    if run.served:
        parts = [trouble(run), tenants.readings(run)]
        with ui.element("div").classes("grid"):
            return together([*parts, tenants.cards(run), _processes(run), _messages(run)])
    parts = [trouble(run), _readings(run)]
    with ui.element("div").classes("grid"):
        main = (figures.losses, "losses") if run.supervised else (figures.reward, "rewards and scores")
        parts.append(_chart(run, *main, "two-thirds"))
        with ui.element("div").classes("third pile"):
            parts.append(_times(run))
            if not run.supervised:
                parts.append(_buffer(run))
        parts += [_processes(run), _messages(run)]
        if not run.supervised:
            parts.append(_chart(run, figures.throughput, "rates of tokens", "half"))
            parts.append(_chart(run, figures.staleness, "ages of trained responses", "half"))
    return together(parts)


# The large numbers


def _readings(run: RunFolder) -> Update:
    with ui.element("div").classes("readings"):
        step = Reading("Step")
        others = _losses(run) if run.supervised else _scores(run)
        rest = Reading("Remaining")

    def update() -> None:
        total = run.total_steps
        version = "" if run.supervised else f"version {run.version}"
        step.show(str(run.step), f"of {total}" if total else "", version)
        others()
        seconds = _step_seconds(run)
        pace = "" if seconds is None else f"{units.duration(seconds)} a step"
        if run.status in ACTIVE:
            rest.show(units.duration(_remaining_seconds(run, seconds)), below=pace, name="Remaining")
        else:
            rest.show(units.duration(run.seconds), below=pace, name="Duration")

    return update


def _scores(run: RunFolder) -> Update:
    reward, score, speed = Reading("Reward"), Reading("Held-out score"), Reading("Generated")
    staleness = Reading("Staleness, mean")

    def update() -> None:
        latest = run.metrics.latest
        spread = latest("train/reward_std")
        below = _change(run, names.REWARD) + ("" if spread is None else f", deviation {units.fixed(spread, 2)}")
        reward.show(units.fixed(latest(names.REWARD)), below=below.removeprefix(", "))
        score.show(units.fixed(latest(names.SCORE)), below=_best(run.statistic(names.SCORE, np.max)))
        trained = latest(names.TRAINED_RATE)
        below = "" if trained is None else f"{units.number(trained)} tokens/s trained"
        speed.show(units.number(latest(names.SAMPLED_RATE)), "tokens/s", below)
        oldest = latest(names.STALENESS_MAX)
        bound = run.pacing.staleness_bound if run.pacing else None
        limits = {"oldest": None if oldest is None else units.number(oldest), "bound": bound}
        below = ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)
        staleness.show(units.fixed(latest(names.STALENESS_MEAN), 2), "versions", below)

    return update


def _losses(run: RunFolder) -> Update:
    training, held_out, norm = Reading("Training loss"), Reading("Validation loss"), Reading("Gradient norm")

    def update() -> None:
        training.show(units.fixed(run.metrics.latest(names.TRAINING_LOSS)), below=_change(run, names.TRAINING_LOSS))
        best = _best(run.statistic(names.VALIDATION_LOSS, np.min))
        held_out.show(units.fixed(run.metrics.latest(names.VALIDATION_LOSS)), below=best)
        norm.show(units.number(run.metrics.latest("train/grad_norm")))

    return update


def _best(value: float | None) -> str:
    return "not evaluated yet" if value is None else f"best {units.fixed(value)}"


def _change(run: RunFolder, name: str) -> str:
    """The latest value against that of ten steps before."""
    values = run.values(name)[-11:]
    return f"{values[-1] - values[0]:+.3f} in {len(values) - 1} steps" if len(values) > 1 else ""


def _step_seconds(run: RunFolder) -> float | None:
    return run.statistic("time/step", lambda seconds: seconds[-RECENT_STEPS:].mean())


def _remaining_seconds(run: RunFolder, step_seconds: float | None) -> float | None:
    """The driver's own estimate; else, steps that are left by the pace of the latest ones."""
    if run.state is not None:
        return run.state.eta_seconds
    if step_seconds is None or run.total_steps is None:
        return None
    return step_seconds * max(0, run.total_steps - run.step)


# Curves, and who waits


def _chart(run: RunFolder, draw: Callable[[RunFolder], Figure | None], what: str, width: str) -> Update:
    with ui.element("section").classes(f"card chart-card {width}"):
        height = LARGE_CHART if width == "two-thirds" else SMALL_CHART
        return Chart(lambda: draw(run), height, lambda: why_none(run, what)).update


def _times(run: RunFolder) -> Update:
    """Draws what the trainer does and waits for, as shares of the latest steps' time, and how busy the servers are."""
    with card("Who waits", f"latest {RECENT_STEPS} steps"):
        empty = text("div", "", "empty")
        with ui.element("div") as box:
            text("div", "Trainer", "row-name")
            trainer = Shares(units.share)
            if not run.supervised:
                text("div", "Servers", "row-name")
            servers = Shares(units.share)

    def update() -> None:
        of_trainer = _trainer_shares(run)
        trainer.show(of_trainer, 1.0)
        servers.show(_server_shares(run), 1.0)
        box.set_visibility(bool(of_trainer))
        empty.say("" if of_trainer else why_none(run, "times of steps"))

    return update


def _trainer_shares(run: RunFolder) -> dict[str, tuple[float, str]]:
    steps, values = run.metrics.aligned(["time/step", *TRAINER_TIMES])
    if not len(steps):
        return {}
    total, *spent = (float(seconds) for seconds in np.nan_to_num(values[:, -RECENT_STEPS:]).sum(axis=1))
    if total <= 0:
        return {}
    looks = zip(TRAINER_TIMES.values(), spent, strict=True)
    parts = {label: (seconds / total, colour) for (label, colour), seconds in looks if seconds > 0}
    rest = 1 - sum(share for share, _ in parts.values())
    return parts | ({"other": (rest, "var(--gray)")} if rest >= 0.005 else {})


def _server_shares(run: RunFolder) -> dict[str, tuple[float, str]]:
    """Paused for a sync; for the rest of the time, by whether the servers had requests at the end of each step.

    How many requests they could take says little: long before that, a server's device may have all it can do.
    """
    steps, values = run.metrics.aligned(["time/step", "sync/pause_seconds", "rollout/inflight_requests"])
    if not len(steps):
        return {}
    recent = np.nan_to_num(values[:, -RECENT_STEPS:])
    total, pause = recent[0].sum(), recent[1].sum()
    if total <= 0:
        return {}
    paused = min(1.0, float(pause / total))
    busy = (1 - paused) * float((recent[2] > 0).mean())
    return {
        "working on requests": (busy, "var(--sky)"),
        "paused for syncs": (paused, "var(--green)"),
        "without requests": (1 - paused - busy, "var(--gray)"),
    }


def _buffer(run: RunFolder) -> Update:
    with card("Buffer", "groups in its slots"):
        shares = Shares(units.number)
        waits = text("div", "", "note lines")
        empty = text("div", "", "empty")

    def update() -> None:
        state = run.state.buffer if run.state is not None else None
        logged = {name: run.metrics.latest(f"{names.BUFFER_PREFIX}{name}") for name in SLOTS}
        counts: Mapping[str, float | None] = state.slots if state is not None else logged
        slots = {name: (count, SLOTS.get(name, "var(--gray)")) for name, count in counts.items() if count}
        taken = sum(count for count, _ in slots.values())
        capacity = state.capacity if state is not None else run.pacing.capacity if run.pacing else 0
        empty.say("" if taken or capacity else why_none(run, "counts of groups"))
        if taken or capacity:
            shares.show(slots | {"free": (max(0, capacity - taken), "var(--line)")}, max(capacity, taken))
        waiting = state.waiting if state is not None and run.status in ACTIVE else {}
        waits.say("\n".join(f"{call} waits for {reason}" for call, reason in waiting.items()))

    return update


# What every part does


def _processes(run: RunFolder) -> Update:
    with card("Parts of the run", width="two-thirds"):
        note = text("div", "", "note")
        table = Table(("part", "state", "now", "for"), ("for",), wide="now")

    def update() -> None:
        state = run.state
        if state is None:
            note.say("This run has no state.json; the servers are those of its latest step.")
            table.show(_logged_servers(run))
            return
        active = run.status in ACTIVE
        note.say("" if active else f"As of {units.day_and_clock(state.time)}, when the driver last wrote its state.")
        table.show(_process_rows(state, active))

    return update


def _logged_servers(run: RunFolder) -> list[Sequence[Cell]]:
    states = ("healthy", "suspect", "stale", "restarting", "isolated", "dead")
    counts = {state: run.metrics.latest(f"fleet/{state}") for state in states}
    return [("servers", (state, _look(state)), f"{count:.0f}", "") for state, count in counts.items() if count]


def _process_rows(state: RunState, active: bool) -> list[Sequence[Cell]]:
    def since(moment: float | None) -> str:
        return units.coarse(state.time - moment) if moment and active else ""

    def chip(word: str) -> Cell:
        return (word, _look(word) if active else "")

    rows: list[Sequence[Cell]] = [
        (part, "", doing, since(begun)) for part, (doing, begun) in state.activities.items() if active
    ]
    router = [state.router] if state.router is not None else []
    for kind, processes in (
        ("servers", state.servers),
        ("router", router),
        ("workers", state.workers),
        ("frozen models", state.frozen_models),
    ):
        rows += [
            (process.name, chip(process.state), describe(process), since(process.since)) for process in named(processes)
        ]
        rows += [
            (f"{len(several)} {kind}", chip(word), _describe_several(several), "")
            for word, several in counted(processes)
        ]
    if state.ranks:
        nodes = {rank.node for rank in state.ranks if rank.node}
        where = f"on {len(nodes)} node{'s' * (len(nodes) != 1)}" if nodes else ""
        up = sum(rank.pid is not None for rank in state.ranks)
        word = "up" if up == len(state.ranks) else f"{up} up"
        rows.append((f"{len(state.ranks)} rank{'s' * (len(state.ranks) != 1)}", chip(word), where, ""))
    return rows


def named(processes: Sequence[ProcessState]) -> list[ProcessState]:
    """All of few processes; of many, those that are not as they should be."""
    if len(processes) <= NAMED_PROCESSES:
        return list(processes)
    return [process for process in processes if _look(process.state) != "good"][:NAMED_PROCESSES]


def counted(processes: Sequence[ProcessState]) -> list[tuple[str, list[ProcessState]]]:
    """Groups by state the processes that `named` leaves out."""
    shown = {process.name for process in named(processes)}
    by_state: dict[str, list[ProcessState]] = {}
    for process in processes:
        if process.name not in shown:
            by_state.setdefault(process.state, []).append(process)
    return list(by_state.items())


def describe(process: ProcessState) -> str:
    facts = [
        None if process.version is None else f"version {process.version}",
        None if process.running is None else f"{process.running} running",
        None if not process.waiting else f"{process.waiting} waiting",
        None if process.cache_use is None else f"cache {units.share(process.cache_use)}",
        None if process.throughput is None else f"{units.number(process.throughput)} tokens/s",
        None if process.groups is None else f"{process.groups} groups",
        f"started {process.starts} times" if process.starts > 1 else None,
        first_line(process.reason) or None,
    ]
    return " · ".join(fact for fact in facts if fact)


def _describe_several(processes: Iterable[ProcessState]) -> str:
    members = list(processes)
    versions = {process.version for process in members if process.version is not None}
    running = [process.running for process in members if process.running is not None]
    rates = [process.throughput for process in members if process.throughput is not None]
    facts = [
        f"version {min(versions)}" + (f" to {max(versions)}" if len(versions) > 1 else "") if versions else None,
        f"{units.number(sum(running))} running" if running else None,
        f"{units.number(sum(rates))} tokens/s" if rates else None,
    ]
    return " · ".join(fact for fact in facts if fact)


def _look(state: str) -> str:
    return LOOKS.get(state, "warn")


def _messages(run: RunFolder) -> Update:
    with card("Newest messages", width="third"):
        with ui.element("div").classes("scroll low"):
            table = Table(("time", "message"), wide="message")
        empty = text("div", "", "empty")

    def update() -> None:
        # Each step publishes a version; the other views show what that costs.
        told = sorted((event for event in run.events if event.kind != SYNC), key=lambda event: event.time)
        table.show([(units.clock(event.time), _message(run, event)) for event in reversed(told[-SHOWN_MESSAGES:])])
        empty.say("" if told else "This run recorded no messages.")

    return update


def _message(run: RunFolder, event: Event) -> str:
    if event.kind == FAULT:
        return f"{event.what} failed: {first_line(event.text)}"
    if event.kind == RECOVERY:
        return f"{event.what} works again: {first_line(event.text)}"
    if event.kind == CHECKPOINT:
        return f"checkpoint {Path(event.text).name}"
    if event.kind == END and not event.text:
        return f"run {event.fields.get('status', 'ended')}"
    # Paths below the run directory are as short as they can be.
    return first_line(event.text).replace(f"{run.path.resolve()}/", "")
