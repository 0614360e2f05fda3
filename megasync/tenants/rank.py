"""A trainer rank of a service: beside what every rank does, it trains the adapters of many models."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megasync.errors import MegasyncError
from megasync.observe import trace
from megasync.trainer.rank import TrainerRank

if TYPE_CHECKING:
    from megasync.layout.adapter import AdapterShape
    from megasync.tenants.adapter_bank import AdapterBank
    from megasync.tenants.passes import LossPass, PassPart
    from megasync.tenants.saved_adapter import SavedAdapter
    from megasync.trainer.adam import Adam


class TenantTrainerRank(TrainerRank):
    """A rank of many models (`adapter_bank.AdapterBank`). Its methods are collectives, as those of every rank."""

    @cached_property
    def _bank(self) -> AdapterBank:
        from megasync.tenants.adapter_bank import AdapterBank

        return AdapterBank(self._learner)

    def create_model(self, model: str, shape: AdapterShape, seed: int) -> None:
        """Makes new adapters."""
        self._bank.create(model, shape, seed)

    def compute_passes(self, passes: list[tuple[str, LossPass]]) -> list[PassPart | MegasyncError]:
        """Computes passes of several models, those of each in their order."""
        with trace.span("step", "passes", passes=len(passes)):
            return self._bank.compute(passes)

    def update_model(self, model: str, adam: Adam) -> tuple[bool, float]:
        """Takes an optimizer step; returns whether it was applied, and the norm of the gradient before clipping."""
        with trace.span("step", "update"):
            update = self._bank.update(model, adam)
        return update.applied, update.grad_norm

    def copy_model(self, model: str, moments: bool) -> SavedAdapter | None:
        """The state of a model, from the first rank; see `AdapterBank.copied`."""
        return self._bank.copied(model, moments)

    def load_model(self, model: str, shape: AdapterShape, folder: str, moments: bool) -> None:
        """Makes a model what a folder holds; see `AdapterBank.load`."""
        self._bank.load(model, shape, Path(folder), moments)

    def unload_model(self, model: str) -> None:
        """Forgets a model."""
        self._bank.unload(model)
