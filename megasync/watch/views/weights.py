"""Whether the update is sound: gaps between trainer and servers, norms, and what was clipped, masked or rejected."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui
from plotly.graph_objects import Figure

from megasync.watch import figures, units
from megasync.watch.chart import Chart
from megasync.watch.elements import Reading, Table, card, text, trouble
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
    with ui.element("div").classes("grid"):
        parts += [_chart(run, draw) for draw in CHARTS]
        parts.append(_by_age(run))
    return together(parts)


def _readings(run: RunFolder) -> Update:
    with ui.element("div").classes("readings"):
        gap, parity, norm = Reading("Log-prob gap"), Reading("Parity of probes"), Reading("Gradient norm")
        clipped, rejected, skipped = Reading("Tokens clipped"), Reading("Tokens rejected"), Reading("Steps skipped")

    def update() -> None:
        latest = run.metrics.latest
        gap.show(units.number(latest("train/logprob_diff")), "nats", _largest(run, "train/logprob_diff"))
        failures = latest("sync/parity_failures")
        below = f"{failures:.0f} servers above the threshold" if failures else _largest(run, "sync/parity")
        parity.show(units.number(latest("sync/parity")), "nats", below)
        norm.show(units.number(latest("train/grad_norm")), below=_largest(run, "train/grad_norm"))
        outside = latest("train/is_outside_fraction")
        below = "" if outside is None else f"{units.share(outside)} out of bounds"
        clipped.show(units.share(latest("train/clip_fraction")), below=below)
        effective = latest("train/is_effective_share")
        below = "" if effective is None else f"effective sample {units.share(effective)}"
        rejected.show(units.share(latest("train/is_rejected_fraction")), below=below)
        all_skipped = run.series("train/skipped").finite.values.sum()
        skipped.show(units.number(float(all_skipped)), below="loss or gradient not finite")

    return update


def _largest(run: RunFolder, name: str) -> str:
    values = run.series(name).finite
    if not len(values):
        return "not measured"
    at = int(values.values.argmax())
    return f"largest {units.number(float(values.values[at]))}, step {values.steps[at]}"


def _chart(run: RunFolder, draw: Callable[[RunFolder], Figure | None]) -> Update:
    """A chart's card, which is there only once the run has measured something for it."""
    box = ui.element("section").classes("card chart-card half")
    with box:
        chart = Chart(lambda: draw(run))

    def update() -> None:
        chart.update()
        box.set_visibility(chart.drawn)

    return update


def _by_age(run: RunFolder) -> Update:
    """How far the servers' policy was from the trainer's, by how many versions old a token was."""
    with card("KL of servers against trainer", "by the age of the trained tokens", "half"):
        table = Table(
            ("age in versions", "latest", "median", "largest", "steps"),
            ("latest", "median", "largest", "steps"),
            "age in versions",
        )
        empty = text("div", "", "empty")

    def update() -> None:
        rows = []
        for name in run.under(KL_BY_AGE):
            values = run.series(name).finite.values
            if len(values):
                middle = float(sorted(values)[len(values) // 2])
                largest = float(values.max())
                numbers = (units.number(float(values[-1])), units.number(middle), units.number(largest))
                rows.append((name.removeprefix(KL_BY_AGE), *numbers, str(len(values))))
        table.show(rows)
        empty.say("" if rows else "Not measured.")

    return update
