"""Sharded checkpoints that are either complete or absent.

All ranks write into ``<path>.partial``, and each syncs its own files to disk, because on a network file system no other
host can. Only after every rank has finished does rank 0 write the marker COMPLETE and durably rename the folder. A
failure before that leaves no folder with the final name and does not touch earlier checkpoints. Tensors are loaded
without unpickling objects.

    <path>/model-{rank}.safetensors         weights, each written by the first rank that holds it
    <path>/optimizer-{rank}.pt              moments, main weights and random state of each rank
    <path>/layout.json                      topology, layer spec, dtype and the model's config.json
    <path>/state.json                       the caller's state
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
    """One rank's part of a checkpoint."""

    layout: Layout
    dtype: str
    rank: int
    params: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def step_path(run_dir: str | Path, step: int) -> Path:
    """The path of the checkpoint of a training step."""
    return Path(run_dir) / FOLDER / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The training step of a checkpoint path from `step_path`."""
    return int(path.name.removeprefix("step-"))


def complete(run_dir: str | Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    folder = Path(run_dir) / FOLDER
    paths = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(path for path in paths if (path / MARKER).is_file())


def latest(run_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    return next(reversed(complete(run_dir)), None)


def prune(run_dir: str | Path, keep: int) -> list[Path]:
    """Removes all but the newest ``keep`` complete checkpoints, and the remains of failed saves.

    Returns the removed paths. Call it from one process, while no save is running.
    """
    folder = Path(run_dir) / FOLDER
    removed = complete(run_dir)[: -keep or None] if keep > 0 else []
    removed += sorted(folder.glob(f"step-*{PARTIAL}"))
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def read_state(path: str | Path) -> dict[str, Any]:
    """The ``state`` that a complete checkpoint was saved with.

    Raises CheckpointError if there is no complete checkpoint at ``path``.
    """
    path = Path(path)
    if not (path / MARKER).is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MARKER} file")
    return json.loads((path / STATE).read_text())


def save(path: Path, shard: Shard, state: dict[str, Any], device: torch.device) -> None:
    """Writes a checkpoint. A collective over all ranks, which must share a file system.

    Raises CheckpointError on every rank if any could not write its part; then nothing is left at ``path``.
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
        # No rank continues before the remains are removed from the disk.
        all_agree(True, device)
        raise
    log.info("Saved %s", path)


def run_collectively(work: Callable[[], object], what: str, path: Path, device: torch.device) -> None:
    """Runs ``work`` on every rank; raises CheckpointError on all ranks if it failed on one."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:  # noqa: BLE001 - every failure must be shared, or the other ranks wait forever
        error = caught
    failure = first_failure(error, device)
    if failure is not None:
        raise CheckpointError(f"could not {what} checkpoint {path}: {failure}") from error


def _make_room(path: Path, partial: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} already exists")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_shard(partial: Path, shard: Shard) -> None:
    save_written(partial, shard.layout, shard.rank, shard.params)
    saved = {"optimizer": shard.optimizer, "random": torch.get_rng_state()}
    _write_objects(saved, partial / _optimizer_file(shard.rank))


def _write_objects(saved: dict[str, Any], path: Path) -> None:
    """`torch.save` with fsync, which raises the OSError of a failed write; torch reports only a wrong position."""
    with path.open("wb") as file:
        try:
            torch.save(saved, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank}.pt"


def _finish(path: Path, partial: Path, shard: Shard, state: dict[str, Any]) -> None:
    atomic_write(partial / LAYOUT, json.dumps(describe(shard.layout, shard.dtype), indent=1))
    atomic_write(partial / STATE, json.dumps(state, indent=1))
    atomic_write(partial / MARKER, "")
    durable_rename(partial, path)
    # The folder of all checkpoints may be new as well.
    fsync(path.parent.parent)


def load(
    path: Path, layout: Layout, dtype: str, rank: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """(weights, optimizer state, caller's state) of one rank; restores torch's random state. A collective.

    Raises CheckpointError on every rank if a file is missing or unreadable on any of them, or if the checkpoint has a
    different topology, layer spec or dtype.
    """
    content: dict[str, Any] = {}

    def read() -> None:
        content["state"] = read_state(path)
        _check_layout(path, layout, dtype)
        with ShardFiles(path) as files:
            content["params"] = files.load(layout, rank)
        saved = torch.load(path / _optimizer_file(rank), map_location="cpu", weights_only=True)
        content["optimizer"] = saved["optimizer"]
        torch.set_rng_state(saved["random"])

    run_collectively(read, "read", path, device)
    return content["params"], content["optimizer"], content["state"]


def _check_layout(path: Path, layout: Layout, dtype: str) -> None:
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
                f"its {what} is {there}, but this run's is {here}; resume with the same layout, or export the "
                f"checkpoint and start from the exported model"
            )
