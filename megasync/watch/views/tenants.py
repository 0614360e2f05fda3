"""The overview of a training service: what its tenants have, ask for and wait for."""

from __future__ import annotations

from nicegui import ui

from megasync.base.files import bytes_text
from megasync.observe.state_file import TenantState
from megasync.watch import figures, units
from megasync.watch.chart import Chart
from megasync.watch.elements import Reading, Table, card, text
from megasync.watch.run_folder import RunFolder
from megasync.watch.view import Update, together

# Of more models the newest are listed.
SHOWN_MODELS = 100
HEIGHT = 260
NO_TENANTS = "No tenant is known: this service has not run yet."
NO_LINES = "Nothing yet: lines come once a tenant has trained or sampled."


def readings(run: RunFolder) -> Update:
    """Draws the sums over all tenants."""
    with ui.element("div").classes("readings"):
        steps, models, waiting, speed = map(Reading, ("Optimizer steps", "Models", "Waiting", "Throughput"))

    def update() -> None:
        tenants = _tenants(run)
        steps.show(units.number(sum(tenant.steps for tenant in tenants)), below="of all tenants")
        count = sum(len(tenant.models) for tenant in tenants)
        models.show(str(count), below=f"of {units.counted(len(tenants), 'tenant')}")
        held = units.number(sum(tenant.tokens_in_flight for tenant in tenants))
        waiting.show(str(sum(tenant.promises for tenant in tenants)), "requests", f"{held} tokens")
        total = units.number(sum(tenant.tokens for tenant in tenants))
        speed.show(units.number(sum(tenant.rate for tenant in tenants)), "tokens/s", f"{total} tokens trained")

    return update


def cards(run: RunFolder) -> Update:
    """Draws tables of tenants and models, and their curves, into a grid."""
    with card("Tenants"):
        columns = ("tenant", "sessions", "models", "steps", "waiting", "waited", "tokens/s", "samplers", "checkpoints")
        columns += ("on disk",)
        tenants = Table(columns, columns[1:], wide="tenant")
        empty = text("div", "", "empty")
    charts = [_chart(run, figures.tenant_losses), _chart(run, figures.tenant_rates)]
    with card("Models", "newest first", "third"), ui.element("div").classes("scroll"):
        columns = ("model", "rank", "steps", "loss", "waiting")
        models = Table(columns, columns[1:], wide="model")

    def update() -> None:
        present = _tenants(run)
        empty.say("" if present else NO_TENANTS)
        tenants.show(
            [
                (
                    tenant.name,
                    str(tenant.sessions),
                    str(len(tenant.models)),
                    units.number(tenant.steps),
                    f"{tenant.promises} ({units.number(tenant.tokens_in_flight)} tokens)" if tenant.promises else "0",
                    units.duration(tenant.waited),
                    units.number(tenant.rate),
                    str(tenant.samplers),
                    str(tenant.checkpoints),
                    bytes_text(tenant.disk_bytes),
                )
                for tenant in present
            ]
        )
        named = [(tenant.name, model) for tenant in present for model in tenant.models]
        models.show(
            [
                (
                    f"{name} {model.name}",
                    str(model.rank),
                    units.number(model.steps),
                    units.fixed(model.loss),
                    str(model.waiting),
                )
                for name, model in named[:SHOWN_MODELS]
            ]
        )

    return together([update, *charts])


def _tenants(run: RunFolder) -> list[TenantState]:
    return run.state.tenants if run.state is not None else []


def _chart(run: RunFolder, draw: figures.Draw) -> Update:
    with ui.element("section").classes("card chart-card third"):
        return Chart(lambda: draw(run), HEIGHT, lambda: NO_LINES).update
