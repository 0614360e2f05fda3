"""Sharded checkpoints that are either whole or absent.

All ranks write into ``<path>.partial``, and each syncs its files to the disk: on a network file system no other host can
do that for it. Only when every rank has finished does rank 0 add the marker COMPLETE and rename the folder, durably.
Whatever goes wrong before that leaves earlier checkpoints as they were, and no folder with the final name. Tensors are read back without unpickling objects.

    <path>/model-{rank}.safetensors         weights, each written by the first of the ranks that hold it
    <path>/optimizer-{rank}.pt              moments, main weights and random state of each rank
    <path>/layout.json                      topology, layer spec, dtype and the model's config.json
    <path>/state.json                       what the caller wants back
    <path>/COMPLETE
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasync.errors import CheckpointError
from megasync.files import atomic_write, durable_rename, fsync
from megasync.layout.layout import Layout
from megasync.layout.shards import LAYOUT, ShardFiles, describe, read_layout, save_written
from megasync.trainer.collectives import all_agree, first_failure

log = logging.getLogger(__name__)

STATE = "state.json"
MARKER = "COMPLETE"
PARTIAL = ".partial"
FOLDER = "checkpoints"


@dataclass(frozen=True)
class Shard:
    """What one rank contributes to a checkpoint."""

    layout: Layout
    dtype: str
    rank: int
    params: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def step_path(run_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of a training step lies."""
    return Path(run_dir) / FOLDER / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The training step of a checkpoint that `step_path` named."""
    return int(path.name.removeprefix("step-"))


def complete(run_dir: str | Path) -> list[Path]:
    """All whole checkpoints of a run, oldest first."""
    folder = Path(run_dir) / FOLDER
    found = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(path for path in found if (path / MARKER).is_file())


def latest(run_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    return next(reversed(complete(run_dir)), None)


def prune(run_dir: str | Path, keep: int) -> list[Path]:
    """Removes all but the newest ``keep`` whole checkpoints, and what broken saves left; returns what was removed.

    Call it from one process, while no save is running.
    """
    folder = Path(run_dir) / FOLDER
    doomed = complete(run_dir)[: -keep or None] if keep > 0 else []
    doomed += sorted(folder.glob(f"step-*{PARTIAL}"))
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return doomed


def read_state(path: str | Path) -> dict[str, Any]:
    """The ``state`` that a whole checkpoint was saved with.

    Raises:
        CheckpointError: there is no whole checkpoint at ``path``.
    """
    path = Path(path)
    if not (path / MARKER).is_file():
        raise CheckpointError(f"{path} is not a whole checkpoint: it has no {MARKER} file")
    return json.loads((path / STATE).read_text())


def save(path: Path, shard: Shard, state: dict[str, Any], device: torch.device) -> None:
    """Writes a checkpoint; a collective over all ranks, which must see one file system.

    Raises:
        CheckpointError: on every rank, when any rank could not write its part; nothing is left at ``path``.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        run_collectively(lambda: _make_room(path, partial) if shard.rank == 0 else None, "prepare", path, device)
        run_collectively(lambda: _write_shard(partial, shard), "write", path, device)
        run_collectively(
            lambda: _finish(path, partial, shard, state) if shard.rank == 0 else None, "finish", path, device
        )
    except CheckpointError:
        if shard.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        # No rank goes on while the remains still take up the disk.
        all_agree(True, device)
        raise
    log.info("saved %s", path)


def run_collectively(work: Callable[[], None], what: str, path: Path, device: torch.device) -> None:
    """Runs ``work`` on every rank and fails on all of them if it failed on one."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:  # noqa: BLE001 - every kind of failure must be shared, or the other ranks wait forever
        error = caught
    failure = first_failure(error, device)
    if failure is not None:
        raise CheckpointError(f"could not {what} checkpoint {path}: {failure}") from error


def _make_room(path: Path, partial: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_shard(partial: Path, shard: Shard) -> None:
    save_written(partial, shard.layout, shard.rank, shard.params)
    saved = {"optimizer": shard.optimizer, "random": torch.get_rng_state()}
    _write_objects(saved, partial / _optimizer_file(shard.rank))


def _write_objects(saved: dict[str, Any], path: Path) -> None:
    """`torch.save`, down to the disk, that raises the OSError of a failed write; torch only says that a position is wrong."""
    with path.open("wb") as file:
        try:
            torch.save(saved, file)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error
        file.flush()
        os.fsync(file.fileno())


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank}.pt"


def _finish(path: Path, partial: Path, shard: Shard, state: dict[str, Any]) -> None:
    atomic_write(partial / LAYOUT, json.dumps(describe(shard.layout, shard.dtype), indent=1))
    atomic_write(partial / STATE, json.dumps(state, indent=1))
    atomic_write(partial / MARKER, "")
    durable_rename(partial, path)
    # The folder of all checkpoints may be new too.
    fsync(path.parent.parent)


def load(
    path: Path, layout: Layout, dtype: str, rank: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """(weights, optimizer state, caller's state) of one rank; restores torch's random state. A collective.

    Raises:
        CheckpointError: on every rank, when a file is missing or unreadable on any, or when the checkpoint was written
            by another topology, layer spec or dtype.
    """
    found: dict[str, Any] = {}

    def read() -> None:
        found["state"] = read_state(path)
        _check_same(path, layout, dtype)
        with ShardFiles(path) as files:
            found["params"] = files.load(layout, rank)
        saved = torch.load(path / _optimizer_file(rank), map_location="cpu", weights_only=True)
        found["optimizer"] = saved["optimizer"]
        torch.set_rng_state(saved["random"])

    run_collectively(read, "read", path, device)
    return found["params"], found["optimizer"], found["state"]


def _check_same(path: Path, layout: Layout, dtype: str) -> None:
    saved, saved_dtype = read_layout(path)
    for what, there, here in (
        ("topology", saved.topology, layout.topology),
        ("layer spec", saved.spec, layout.spec),
        ("model sizes", saved.sizes, layout.sizes),
        ("value head", saved.value_head, layout.value_head),
        ("dtype", saved_dtype, dtype),
    ):
        if there != here:
            raise CheckpointError(
                f"its {what} is {there}, this run's is {here}; resume with the same layout, or export the checkpoint "
                f"and start from the exported model"
            )
