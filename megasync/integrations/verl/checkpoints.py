"""Checkpoints at the paths that verl expects.

<local_path>/megasync/      a sharded checkpoint (`trainer.checkpoint`): model, optimizer, extra state
<local_path>/huggingface/   the model as a Hugging Face folder, if hf_model is among the contents
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megasync.base.files import remove_tree, sweep
from megasync.layout.shards import export_checkpoint
from megasync.trainer.checkpoint import run_collectively
from megasync.trainer.learner import MegatronLearner
from megasync.trainer.offload import OPTIMIZER, WEIGHTS, Offload

SHARDS = "megasync"
EXPORT = "huggingface"


class Checkpoints:
    """Saves, loads and prunes checkpoints. Every method is a collective over ranks that share a file system."""

    def __init__(self, engine: MegatronLearner, offload: Offload, exports: bool) -> None:
        """With ``exports``, each checkpoint includes a Hugging Face folder."""
        self._engine = engine
        self._offload = offload
        self._exports = exports
        # Paths that this process has saved, oldest first.
        self._saved: list[Path] = []

    def save(self, local_path: str, state: dict[str, Any], keep: int | None) -> None:
        """Writes a checkpoint, replacing an existing one.

        Then removes all but the newest ``keep`` that this process has saved; None keeps all. Raises CheckpointError on
        every rank if any could not write its part.
        """
        path = Path(local_path)
        self._on_first_rank(lambda: _clear(path), "make room for", path)
        with self._offload.present(WEIGHTS, OPTIMIZER):
            self._engine.save(path / SHARDS, state)
        if self._exports:
            model = self._engine.model_config.path
            self._on_first_rank(lambda: export_checkpoint(path / SHARDS, model, path / EXPORT), "export", path)
        self._saved = [old for old in self._saved if old != path] + [path]
        while keep and len(self._saved) > keep:
            oldest = self._saved.pop(0)
            self._on_first_rank(lambda old=oldest: _remove(old), "remove", oldest)

    def load(self, local_path: str) -> dict[str, Any]:
        """Restores the engine and returns the saved state. Raises CheckpointError like `MegatronLearner.load`."""
        with self._offload.present(WEIGHTS, OPTIMIZER):
            return self._engine.load(Path(local_path) / SHARDS)

    def _on_first_rank(self, work: Callable[[], object], what: str, path: Path) -> None:
        run_collectively(work if self._engine.rank == 0 else None, what, path, self._engine.device.torch_device)


def _clear(path: Path) -> None:
    for name in (SHARDS, EXPORT):
        _remove(path / name)


def _remove(path: Path) -> None:
    sweep(path.parent)
    with suppress(FileNotFoundError):
        remove_tree(path)
