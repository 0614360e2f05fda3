"""Sharded checkpoints that are either complete or absent, and fit any topology.

All ranks write into ``<path>.partial``, and each syncs its own files to disk, because on a network file system no other
host can. Only after every rank has finished does rank 0 write the marker COMPLETE and durably rename the folder. A
failure before that leaves no folder with the final name and does not touch earlier checkpoints. Nothing is unpickled.

    <path>/model-{rank}.safetensors         weights, each written by the first rank that holds it
    <path>/optimizer-{rank}.safetensors     main weights and moments of a range of each parameter; random state
    <path>/layout.json                      topology, layer spec, dtype, the model's config.json, optimizer steps
    <path>/state.json                       the caller's state
    <path>/critic/                          a checkpoint of the critic, if there is one, with the same files
    <path>/COMPLETE

Weights, main weights and moments are read by the rectangles of the layout that wrote them, so ranks of another
topology, or of another kind of device, load exactly the same values. Each rank reads only what it holds.

Training waits only until everything is copied to host memory (`begin`). A thread of each rank writes the files, which
does not hold the GIL, and `finish`, between later steps, makes the checkpoint complete.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # annotated as bare dict

from megasync.base.files import atomic_write, durable_rename, fsync, remove_tree, sweep
from megasync.device import pin, synchronize, unpin
from megasync.errors import CheckpointError, raised_as
from megasync.layout.layout import Box, Layout
from megasync.layout.shards import (
    LAYOUT,
    ShardFiles,
    TensorFiles,
    describe,
    fill_params,
    fill_rows,
    layout_of,
    pieces_by_param,
    read_json,
    read_layout,
    reading_parts,
    save_written,
    shard_file,
)
from megasync.trainer.collectives import all_agree, first_failure

log = logging.getLogger(__name__)

STATE = "state.json"
MARKER = "COMPLETE"
PARTIAL = ".partial"
CRITIC = "critic"
FOLDER = "checkpoints"
# Other names beside checkpoints, such as copies, are their owner's.
_NAME = re.compile(r"step-([0-9]{8,})")

# Of layout.json; the first one had pickled optimizer states that fit one topology only.
FORMAT = 2
RANDOM = "random_state"
MAIN_WEIGHT = "main_weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Slice(NamedTuple):
    """The slice of a parameter that a rank's optimizer holds: vectors of one length by kind.

    Kinds are the `MOMENTS` after the first step, and with a bfloat16 model the `MAIN_WEIGHT`. To be saved, moments may
    be in another dtype than float32; loaded, all are float32.
    """

    # The element at which the slice begins.
    start: int
    tensors: dict[str, torch.Tensor]
    # Functions that make such a vector, so that only one of them is in memory at a time.
    made: Mapping[str, Callable[[], torch.Tensor]] = MappingProxyType({})

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Slice:
        """The slice with a copy of each vector, and with all of them made."""
        made = {kind: copy(make()) for kind, make in self.made.items()}
        return Slice(self.start, {kind: copy(tensor) for kind, tensor in self.tensors.items()} | made)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a checkpoint."""

    layout: Layout
    dtype: str
    rank: int
    params: dict[str, torch.Tensor]
    optimizer: dict[str, Slice]
    # Data-parallel ranks hold different slices of a parameter, not the whole.
    sharded: bool
    # Optimizer steps.
    updates: int
    # The dtypes of moments by name.
    moments: dict[str, str] = field(default_factory=lambda: dict.fromkeys(MOMENTS, "float32"))
    random_state: torch.Tensor = field(default_factory=torch.get_rng_state)


def step_path(run_dir: str | Path, step: int) -> Path:
    """The path of the checkpoint of a training step."""
    return Path(run_dir) / FOLDER / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The training step of a checkpoint path from `step_path`. Raises CheckpointError for any other name."""
    match = _NAME.fullmatch(path.name)
    if match is None or step_path("", step := int(match[1])).name != path.name:
        raise CheckpointError(f"{path} is not named like a checkpoint of a run, such as {step_path('', 20).name}")
    return step


def reference_step(step: int, every: int) -> int:
    """The step whose weights are the reference after a step; 0 for the initial ones. `algorithm.reference_every`."""
    return step // every * every if every else 0


def complete(run_dir: str | Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first. Other names in the folder, such as copies, are left out."""
    return [path for path in _named(run_dir) if (path / MARKER).is_file()]


def _named(run_dir: str | Path, suffix: str = "") -> list[Path]:
    """What is named like a checkpoint of a run, followed by a suffix; by step."""
    folder = Path(run_dir) / FOLDER
    paths: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith(suffix):
            with suppress(CheckpointError):
                paths[step_of(path.with_name(path.name.removesuffix(suffix)))] = path
    return [paths[step] for step in sorted(paths)]


def latest(run_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    return next(reversed(complete(run_dir)), None)


def prune(run_dir: str | Path, keep: int, needed: Collection[int] = ()) -> list[Path]:
    """Removes all but the newest ``keep`` complete checkpoints and those of ``needed`` steps, and what is incomplete.

    Returns the removed paths. Call it from one process, while no save is running.
    """
    sweep(Path(run_dir) / FOLDER)
    old = complete(run_dir)[: -keep or None] if keep > 0 else []
    removed: list[Path] = []
    for path in [path for path in old if step_of(path) not in needed] + _named(run_dir, PARTIAL):
        try:
            remove_tree(path)
        except OSError as error:
            log.warning("Could not remove %s: %s", path, error)
        else:
            removed.append(path)
    return removed


def read_state(path: str | Path) -> dict[str, Any]:
    """The ``state`` that a complete checkpoint was saved with.

    Raises CheckpointError if there is no complete checkpoint at ``path``.
    """
    path = Path(path)
    if not (path / MARKER).is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MARKER} file")
    return read_json(path / STATE)


def check_readable(path: Path) -> None:
    """Raises CheckpointError, with the fix, for a complete checkpoint of which a file is missing or damaged.

    Of tensors only headers are read, so this takes seconds, before any process starts.
    """
    fix = "put it back, or remove that checkpoint to resume from the one before it"
    critic = path / CRITIC
    with raised_as(CheckpointError, f"{path} cannot be resumed from", fix, of=CheckpointError):
        for folder in (path, critic) if critic.is_dir() else (path,):
            read_state(folder)
            layout, _ = read_layout(folder)
            with ShardFiles(folder) as files:
                for rank in range(layout.topology.world):
                    files.shapes(_optimizer_file(rank))
                    if rank in layout.writers(rank).values():
                        files.shapes(shard_file(rank))


class Saving:
    """A checkpoint that a thread of each rank is writing; create it with `begin`. ``shards`` are by their folders."""

    def __init__(self, path: Path, shards: dict[str, Shard], state: dict[str, Any], device: torch.device) -> None:
        self._path = path
        self._shards = shards
        self._rank = shards[""].rank
        self._state = state
        self._device = device
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            for folder, shard in self._shards.items():
                _write_shard(partial_path(self._path) / folder, shard)
        except Exception as error:  # noqa: BLE001 - `finish` raises it on every rank
            self._error = error

    def finish(self, wait: bool) -> bool:
        """Makes the checkpoint complete once all ranks have written their parts. A collective over all ranks.

        Returns false, without ``wait``, while one of them still writes. Raises CheckpointError on every rank if any
        could not write its part; then nothing is left at the path.
        """
        if wait:
            self._thread.join()
        if not all_agree(not self._thread.is_alive(), self._device):
            return False
        with _nothing_left_on_failure(self._path, self._rank, self._device):
            run_collectively(self._raise, "write", self._path, self._device)
            finish = partial(_finish, self._path, partial_path(self._path), self._shards, self._state)
            run_collectively(finish if self._rank == 0 else None, "finish", self._path, self._device)
        log.info("Saved %s", self._path)
        return True

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class HostMemory:
    """Memory for the copies that a rank's checkpoints are written from, kept from one to the next.

    Copying into fresh pages takes seven times as long as into pages that the process has. For tensors of a GPU they are
    page-locked, if the system allows it.
    """

    BLOCK = 2**28
    ALIGNMENT = 64

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        # What is taken of each block.
        self._taken: list[int] = []
        self._pinned: list[torch.Tensor] = []

    def close(self) -> None:
        """Unlocks the memory; no copies are made afterwards."""
        for block in self._pinned:
            unpin(block)
        self._blocks, self._pinned = [], []

    def clear(self) -> None:
        """Lets the next copies overwrite all that were made."""
        self._taken = [0] * len(self._blocks)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy, complete once the device is synchronized."""
        memory = self._take(tensor.nbytes, tensor.is_cuda).view(tensor.dtype).view(tensor.shape)
        return memory.copy_(tensor.detach(), non_blocking=True)

    def _take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        size = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        fits = (place for place, block in enumerate(self._blocks) if self._taken[place] + size <= len(block))
        if (place := next(fits, None)) is None:
            place = len(self._blocks)
            self._blocks.append(self._allocate(max(size, self.BLOCK), pinned))
            self._taken.append(0)
        start = self._taken[place]
        self._taken[place] += size
        return self._blocks[place][start : start + nbytes]

    def _allocate(self, nbytes: int, pinned: bool) -> torch.Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8)
        if pinned:
            try:
                pin(block)
            except RuntimeError as error:
                log.warning("Checkpoints are copied into memory that is not page-locked: %s", error)
            else:
                self._pinned.append(block)
        return block


def begin(
    path: Path,
    shard: Shard,
    state: dict[str, Any],
    device: torch.device,
    memory: HostMemory | None = None,
    inner: Mapping[str, Shard] = MappingProxyType({}),
) -> Saving:
    """Copies what this rank writes to host memory, and begins to write a checkpoint. A collective over all ranks.

    They must share a file system, and have no other checkpoint in the making. Raises CheckpointError on every rank if
    the folder cannot be made. ``memory`` takes the copies, until the next checkpoint begins. ``inner`` are checkpoints
    within this one, by the names of their folders.
    """
    shards, memory = {"": shard, **inner}, memory or HostMemory()
    with _nothing_left_on_failure(path, shard.rank, device):
        prepare = partial(_make_room, path, partial_path(path), shards)
        run_collectively(prepare if shard.rank == 0 else None, "prepare", path, device)
    memory.clear()
    copies = {folder: copied(each, memory, device) for folder, each in shards.items()}
    return Saving(path, copies, state, device)


@contextmanager
def _nothing_left_on_failure(path: Path, rank: int, device: torch.device) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(partial_path(path), ignore_errors=True)
        # No rank continues before the remains are removed from the disk.
        all_agree(True, device)
        raise


def partial_path(path: Path) -> Path:
    """The folder that a checkpoint is written into until it is complete."""
    return path.with_name(path.name + PARTIAL)


def run_collectively(work: Callable[[], object] | None, what: str, path: Path, device: torch.device) -> None:
    """Runs ``work`` on every rank that has any; raises CheckpointError on all ranks if it failed on one."""
    error: Exception | None = None
    try:
        if work is not None:
            work()
    except Exception as caught:  # noqa: BLE001 - every failure must be shared, or the other ranks wait forever
        error = caught
    failure = first_failure(error, device)
    if failure is not None:
        raise CheckpointError(f"could not {what} checkpoint {path}: {failure}") from error


def _make_room(path: Path, partial: Path, folders: Iterable[str]) -> None:
    if path.exists():
        raise FileExistsError(f"{path} already exists")
    shutil.rmtree(partial, ignore_errors=True)
    for folder in folders:
        (partial / folder).mkdir(parents=True)


def copied(shard: Shard, memory: HostMemory, device: torch.device) -> Shard:
    """Copies what this rank writes to ``memory``: the parameters and slices of which it is the first holder."""
    rank, writers = shard.rank, shard.layout.writers(shard.rank)
    peers = slice_peers(shard.layout, shard.sharded)
    local_shard = replace(
        shard,
        params={name: memory.copy(shard.params[name]) for name, writer in writers.items() if writer == rank},
        optimizer={
            name: held.copied(memory.copy)
            for name, held in shard.optimizer.items()
            if name in writers and rank in peers(writers[name], name)
        },
    )
    synchronize(device)
    return local_shard


def _write_shard(partial: Path, shard: Shard) -> None:
    save_written(partial, shard.layout, shard.rank, shard.params)
    tensors = {
        _key(kind, name): tensor for name, held in shard.optimizer.items() for kind, tensor in held.tensors.items()
    }
    starts = json.dumps({name: held.start for name, held in shard.optimizer.items()})
    file = partial / _optimizer_file(shard.rank)
    save_file(tensors | {RANDOM: shard.random_state}, file, metadata={"starts": starts})
    fsync(file)


def slice_peers(layout: Layout, sharded: bool) -> Callable[[int, str], Iterable[int]]:
    """(rank, parameter) -> the ranks whose slices together are the parameter as that rank holds it."""

    @cache
    def experts(rank: int) -> frozenset[str]:
        return frozenset(item.param for item in layout.of_rank(rank) if item.ep is not None)

    @cache
    def peers(rank: int, of_expert: bool) -> tuple[int, ...]:
        topology = layout.topology

        def place(other: int) -> tuple[int, ...]:
            expert = topology.expert_coords(other)
            return (expert.ep, expert.etp) if of_expert else (topology.coords(other).tp,)

        stage = topology.stage_ranks(topology.coords(rank).pp)
        return tuple(other for other in stage if place(other) == place(rank))

    return lambda rank, param: peers(rank, param in experts(rank)) if sharded else (rank,)


def _key(kind: str, param: str) -> str:
    return f"{kind}/{param}"


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank:05d}.safetensors"


def _finish(path: Path, partial: Path, shards: dict[str, Shard], state: dict[str, Any]) -> None:
    # The outer one last.
    for folder, shard in reversed(shards.items()):
        described = describe(shard.layout, shard.dtype)
        described |= {"format": FORMAT, "sharded_optimizer": shard.sharded, "updates": shard.updates}
        described |= {"moments": shard.moments}
        atomic_write(partial / folder / LAYOUT, json.dumps(described, indent=1))
        atomic_write(partial / folder / STATE, json.dumps({} if folder else state, indent=1))
        atomic_write(partial / folder / MARKER, "")
    durable_rename(partial, path)
    # The folder of all checkpoints may be new as well.
    fsync(path.parent.parent)


@dataclass
class Loaded:
    """The part of a checkpoint that a rank holds besides weights: slices of the optimizer, and its number of steps.

    ``moments`` are the dtypes that these were saved in.
    """

    optimizer: dict[str, Slice]
    moments: dict[str, str]
    updates: int
    state: dict[str, Any]


def load(path: Path, layout: Layout, dtype: str, rank: int, held: Mapping[str, range], device: torch.device) -> Loaded:
    """One rank's part of a checkpoint without weights; restores torch's random state if it was saved for this topology.

    A collective. ``held`` are the elements of each parameter whose optimizer state this rank holds. Raises
    CheckpointError on every rank if a file is missing or unreadable on any of them, or if the checkpoint is of another
    model, dtype or format.
    """
    loaded: list[Loaded] = []
    run_collectively(lambda: loaded.append(_read(path, layout, dtype, rank, held)), "read", path, device)
    return loaded[0]


def _read(path: Path, layout: Layout, dtype: str, rank: int, held: Mapping[str, range]) -> Loaded:
    state, described = read_state(path), read_json(path / LAYOUT)
    written = _check(described, layout, dtype)
    with OptimizerFiles(path, written, described["sharded_optimizer"]) as slices:
        kinds = [MAIN_WEIGHT] if dtype != "float32" else []
        kinds += MOMENTS if described["updates"] else []
        readers = {kind: reading_parts(written, partial(slices.part, kind)) for kind in kinds}
        pieces, shapes = pieces_by_param(layout, rank), layout.params(rank)
        optimizer: dict[str, Slice] = {}
        for name, elements in held.items():
            columns = (*shapes[name], 1)[1]
            rows = range(elements.start // columns, -(-elements.stop // columns))
            within = slice(elements.start - rows.start * columns, elements.stop - rows.start * columns)
            optimizer[name] = Slice(
                elements.start,
                {
                    kind: fill_rows(shapes[name], pieces[name], rows, read, torch.float32).view(-1)[within]
                    for kind, read in readers.items()
                },
            )
        if written.topology == layout.topology:
            torch.set_rng_state(slices.random_state(rank))
    moments = described.get("moments", dict.fromkeys(MOMENTS, "float32"))
    return Loaded(optimizer, moments, described["updates"], state)


def read_weights(
    path: Path, layout: Layout, dtype: torch.dtype, rank: int, names: Container[str]
) -> dict[str, torch.Tensor]:
    """Parameters of a rank, as CPU tensors, from a checkpoint that `load` accepts. Raises CheckpointError."""
    written, _ = read_layout(path)
    with ShardFiles(path) as weights:
        return fill_params(layout, rank, reading_parts(written, weights.part), dtype, names)


class OptimizerFiles(TensorFiles):
    """The optimizer files of a checkpoint that ranks of ``layout`` wrote; CheckpointError names what is missing."""

    index = LAYOUT

    def __init__(self, path: Path, layout: Layout, sharded: bool) -> None:
        super().__init__(path)
        self._layout = layout
        self._peers = slice_peers(layout, sharded)
        self._shapes = cache(layout.params)
        self._starts = cache(self._read_starts)

    def random_state(self, rank: int) -> torch.Tensor:
        return self._open(_optimizer_file(rank)).get_tensor(RANDOM)

    def part(self, kind: str, rank: int, param: str, box: Box) -> torch.Tensor:
        """A box of what all ranks hold together of a kind (`Slice`), for a parameter as ``rank`` holds it."""
        shape = self._shapes(rank)[param]
        columns = (*shape, 1)[1]
        begin, end = box.row * columns, (box.row + box.rows) * columns
        values = torch.empty(end - begin, dtype=torch.float32)
        missing = end - begin
        for peer in self._peers(rank, param):
            start = self._starts(peer).get(param)
            if start is None:
                continue
            stored = self._open(_optimizer_file(peer)).get_slice(_key(kind, param))
            first, last = max(begin, start), min(end, start + stored.get_shape()[0])
            if first < last:
                values[first - begin : last - begin] = stored[first - start : last - start]
                missing -= last - first
        if missing:
            raise CheckpointError(f"{self.path} lacks {missing} elements of {kind} of {param!r} of rank {rank}")
        return values if len(shape) == 1 else values.view(box.rows, columns)[:, box.col : box.col + box.cols]

    def _read_starts(self, rank: int) -> dict[str, int]:
        return json.loads(self._open(_optimizer_file(rank)).metadata()["starts"])


def _check(described: Mapping[str, Any], layout: Layout, dtype: str) -> Layout:
    """The layout of a checkpoint, given its layout.json. Raises CheckpointError unless ``layout`` can load it."""
    if (version := described.get("format", 1)) != FORMAT:
        raise CheckpointError(
            f"it has format {version}, but this version of megasync reads format {FORMAT}; export it (megasync export) "
            f"and start a new run from the exported model"
        )
    written, saved_dtype = layout_of(described)
    for what, there, here in (
        ("model sizes", written.sizes, layout.sizes),
        ("value head", written.value_head, layout.value_head),
        ("dtype", saved_dtype, dtype),
    ):
        if there != here:
            raise CheckpointError(
                f"its {what} is {there}, but this run's is {here}; export the checkpoint and start from the exported "
                f"model"
            )
    return written
