"""Checkpoints of a run: ranks write one beside the training, and some are exported as Hugging Face folders.

Invariant: at most one checkpoint is being written. None is finished, which removes older ones, while one of them is
exported; `finish` guarantees both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.errors import CheckpointError, MegasyncError

if TYPE_CHECKING:
    from megasync.config.schema import CheckpointConfig
    from megasync.control.interfaces import Observer, Trainer


@dataclass
class Checkpoints:
    """Has the ranks save steps, one at a time."""

    config: CheckpointConfig
    trainer: Trainer
    observer: Observer
    # The last step that is saved; at first that of the checkpoint, or of the start, which the ranks hold.
    saved: int
    # `export(path)` writes a checkpoint as a Hugging Face folder; None if nobody wants any.
    export: Callable[[Path], Awaitable[None]] | None
    # Awaited for each complete checkpoint, with its step and the oldest one that is kept.
    recorded: Callable[[int, int], Awaitable[None]] | None = None
    # Wraps what has a deadline of its own.
    bounded: Callable[[], AbstractContextManager[None]] = nullcontext
    # The step whose checkpoint is being written, and the export that is.
    begun: int | None = field(default=None, init=False)
    _exporting: asyncio.Task[None] | None = field(default=None, init=False)

    def returned(self, step: int) -> None:
        """The ranks were restarted from the checkpoint of this step. What they were writing is lost."""
        self.saved, self.begun = step, None

    async def begin(self, step: int, state: dict[str, Any]) -> None:
        """Begins the checkpoint of this step; with `checkpoint.background` ranks write it while they train.

        The one before is finished.
        """
        with self.bounded():
            await self.trainer.begin_save(step, state)
        self.begun = step
        await self.finish(wait=not self.config.background)

    async def finish(self, wait: bool) -> None:
        """Finishes a checkpoint that was begun, if its ranks have written it or ``wait`` is true."""
        if self.begun is None or (not wait and self._exporting is not None and not self._exporting.done()):
            return
        await self.exported()
        try:
            with self.bounded():
                complete = await self.trainer.finish_save(wait)
        except CheckpointError:
            # Nothing is left of it, so the step may be saved again.
            self.begun = None
            raise
        if complete is None:
            return
        self.saved, self.begun = self.begun, None
        if self.recorded is not None:
            await self.recorded(self.saved, complete.oldest_step)
        self.observer.checkpoint(self.saved, complete.path)
        every = self.config.export_every
        if self.export is not None and every and self.saved % every == 0:
            self._exporting = asyncio.create_task(self._export_now(self.export(complete.path)), name="export")

    async def exported(self) -> None:
        """Waits for an export that was begun."""
        if self._exporting is not None:
            with self.bounded():
                await self._exporting
            self._exporting = None

    async def _export_now(self, export: Awaitable[None]) -> None:
        try:
            await export
        except MegasyncError as error:
            self.observer.message(f"the run goes on without an export: {error}")
