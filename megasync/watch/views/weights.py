"""Whether the update is sound: gaps between trainer and servers, norms, and what was clipped, masked or rejected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nicegui import ui
from plotly.graph_objects import Figure

from megasync.watch import figures, units
from megasync.watch.chart import chart_card
from megasync.watch.elements import Reading, Table, card, text, trouble, why_none
from megasync.watch.run_folder import RunFolder
from megasync.watch.view import Place, Update, together

CHARTS: tuple[Callable[[RunFolder], Figure | None], ...] = (
    figures.gaps,
    figures.norms,
    figures.layer_gradients,
    figures.layer_weights,
    figures.clipping,
    figures.entropy,
    figures.sync_phases,
    figures.sync_rate,
)
# The KL of servers against trainer, by the age of the tokens in versions.
KL_BY_AGE = "train/server_kl@"


def build(run: RunFolder, place: Place) -> Update:
    """Draws what the run measured of its weights and updates."""
    parts = [trouble(run), _readings(run)]
    empty = text("div", "", "empty")
    with ui.element("div").classes("grid"):
        cards = [*(chart_card(partial(draw, run), "half") for draw in CHARTS), _by_age(run)]

    def update() -> None:
        shown = [show() for show in cards]
        empty.say("" if any(shown) else why_none(run, "gaps, norms or shares"))

    return together([*parts, update])


def _readings(run: RunFolder) -> Update:
    with ui.element("div").classes("readings"):
        of_updates = [_of_updates(run)] if run.buffered else []
        norm, skipped = Reading("Gradient norm"), Reading("Steps skipped")

    def update() -> None:
        norm.show(units.number(run.metrics.latest("train/grad_norm")), below=_largest(run, "train/grad_norm"))
        all_skipped = float(run.values("train/skipped").sum()) if run.step else None
        skipped.show(units.number(all_skipped), below="loss or gradient not finite")

    return together([update, *of_updates])


def _of_updates(run: RunFolder) -> Update:
    """Draws what only a run with servers has."""
    gap, parity = Reading("Log-prob gap"), Reading("Parity of probes")
    clipped, rejected = Reading("Tokens clipped"), Reading("Tokens rejected")

    def update() -> None:
        latest = run.metrics.latest
        gap.show(units.number(latest("train/logprob_diff")), "nats", _largest(run, "train/logprob_diff"))
        failures = latest("sync/parity_failures")
        below = f"{failures:.0f} servers above the threshold" if failures else _largest(run, "sync/parity")
        parity.show(units.number(latest("sync/parity")), "nats", below)
        outside = latest("train/is_outside_fraction")
        below = "" if outside is None else f"{units.share(outside)} out of bounds"
        clipped.show(units.share(latest("train/clip_fraction")), below=below)
        effective = latest("train/is_effective_share")
        below = "" if effective is None else f"effective sample {units.share(effective)}"
        rejected.show(units.share(latest("train/is_rejected_fraction")), below=below)

    return update


def _largest(run: RunFolder, name: str) -> str:
    values = run.series(name).finite
    if not len(values):
        return "not measured"
    at = int(values.values.argmax())
    return f"largest {units.number(float(values.values[at]))}, step {values.steps[at]}"


def _by_age(run: RunFolder) -> Callable[[], bool]:
    """How far the servers' policy was from the trainer's, by how many versions old a token was; whether it is known."""
    with card("KL of servers against trainer", "by the age of the trained tokens", "half") as box:
        table = Table(
            ("age in versions", "latest", "median", "largest", "steps"),
            ("latest", "median", "largest", "steps"),
            "age in versions",
        )

    def update() -> bool:
        rows = []
        for name in run.under(KL_BY_AGE):
            values = run.values(name)
            if len(values):
                middle = float(sorted(values)[len(values) // 2])
                largest = float(values.max())
                numbers = (units.number(float(values[-1])), units.number(middle), units.number(largest))
                rows.append((name.removeprefix(KL_BY_AGE), *numbers, str(len(values))))
        table.show(rows)
        box.set_visibility(bool(rows))
        return bool(rows)

    return update
