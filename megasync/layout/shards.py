"""Shards in and out of safetensors files: load a rank's slices, assemble tensors, export a checkpoint.

Loading reads only the rectangles that the rank holds, each once; the only other elements written are the zeros of
vocabulary padding. Rectangles of tensors in block FP8 are dequantized as they are read. It reads them from a Hugging
Face folder, or from what ranks of any topology wrote. Export writes the same bytes as a Hugging Face save of the same
weights.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # annotated as bare dict

from megasync.base.files import atomic_write, fsync, new_folder, read_object
from megasync.errors import CheckpointError, ConfigError, raised_as
from megasync.layout import mxfp4
from megasync.layout.adapter import AdapterLayout, AdapterShape, adapter_config
from megasync.layout.block_fp8 import SCALE_DTYPES, SCALES, VALUES, Block, dequantize
from megasync.layout.families import family_of
from megasync.layout.families.value_head import value_model_options
from megasync.layout.layout import Box, Layout, Piece, intersect, split_by_bytes
from megasync.layout.quantized import QuantizedLayout
from megasync.layout.storage import storage_of
from megasync.layout.topology import Topology

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
# Of a PEFT folder.
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
LAYOUT = "layout.json"
# Hugging Face's own limit; larger files are awkward to move and to map.
MAX_FILE_BYTES = 5 * 10**9
# What a server, a tokenizer or a vision tower needs from the source folder besides weights.
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
)

# How a file begins that stands for one in Git LFS.
_LFS_POINTER = b"version https://git-lfs"

# The names in safetensors of dtypes that a cast converts.
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")

Tensors = Mapping[str, torch.Tensor]
# Reads one box of a Hugging Face tensor, by the tensor's name.
Read = Callable[[str, Box], torch.Tensor]
# Reads a parameter of a global rank, by its local name.
ReadParam = Callable[[int, str], torch.Tensor]
# Reads a box of a parameter of a global rank.
ReadPart = Callable[[int, str, Box], torch.Tensor]


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a contiguous tensor, or of a matrix, that a box names; no copy."""
    matrix = tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor
    rows = matrix[box.row : box.row + box.rows]
    return rows if tensor.dim() == 1 else rows[:, box.col : box.col + box.cols]


def piece_of(param: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The view of a parameter that a piece names, as the Hugging Face tensor has it; no copy."""
    return box_of(_turned(param) if piece.turned else param, piece.param_box)


def _turned(param: torch.Tensor) -> torch.Tensor:
    return param.t() if param.dim() == 2 else param[None]


class TensorFiles:
    """The safetensors files of a folder, opened on first use and mapped until closed."""

    # What refers to the files, for the error when one is missing.
    index: str

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in a file. Raises CheckpointError for a missing or damaged one."""
        opened = self._open(file)
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no mapping

    def _open(self, file: str) -> Any:
        """Raises CheckpointError for a missing or damaged file."""
        if file not in self._files:
            path = self.path / file
            if not path.is_file():
                dangling = f" (a link to {path.readlink()}, which does not exist)" if path.is_symlink() else ""
                named = f"; {self.index} refers to it" if (self.path / self.index).is_file() else ""
                raise CheckpointError(f"{path} is missing{dangling}{named}")
            try:
                opened: Any = safe_open(path, framework="pt")
                self._files[file] = self._stack.enter_context(opened)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read as safetensors: {_damage(path) or error}") from error
        return self._files[file]


def _damage(path: Path) -> str:
    """What a file is instead of safetensors, if that is known; empty otherwise."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_LFS_POINTER))
    except OSError:
        return ""
    if begin == _LFS_POINTER:
        return "it is a Git LFS pointer, not the file itself; fetch that with `git lfs pull`"
    return "" if begin else "it is empty"


def part_of(stored: Any, box: Box) -> torch.Tensor:
    """A box of a slice of a safetensors file."""
    rows, cols = slice(box.row, box.row + box.rows), slice(box.col, box.col + box.cols)
    match len(stored.get_shape()):
        case 1:
            return stored[rows]
        case 2:
            return stored[rows, cols]
        case _:
            # Reads the whole of each matrix along the first dimension that the box touches.
            height = stored.get_shape()[1]
            first, last = box.row // height, (box.row + box.rows - 1) // height
            matrix = stored[first : last + 1, :, cols].flatten(0, 1)
            return matrix[box.row - first * height :][: box.rows]


class HfFolder(TensorFiles):
    """The tensors of a Hugging Face folder, one file or many, read by rectangle.

    Raises CheckpointError for a config.json whose quantization is not supported.
    """

    index = INDEX

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        config = self.path / "config.json"
        with raised_as(CheckpointError, str(config), of=ConfigError):
            self._storage = storage_of(read_json(config)) if config.is_file() else None
        self._where = self._index()

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.path / INDEX
        if index.is_file():
            return read_index(index)
        for file in (WEIGHTS, ADAPTER_WEIGHTS):
            # A link into nothing is reported as such when it is opened.
            if (self.path / file).is_file() or (self.path / file).is_symlink():
                return dict.fromkeys(self._open(file).keys(), file)
        raise CheckpointError(f"{self.path} has neither {WEIGHTS} nor {INDEX}; only safetensors folders can be loaded")

    def check(self, shapes: Mapping[str, tuple[int, ...]], absent: Container[str] = ()) -> None:
        """Raises as `reader` unless the folder has each of these tensors; those of ``absent`` may be missing.

        Reads the headers of the files only.
        """
        for name, shape in shapes.items():
            if name in self._where or name not in absent:
                self.reader(name, shape)

    def in_fp8(self) -> frozenset[str]:
        """The names of all tensors in block FP8: those that have scales."""
        return frozenset(name.removesuffix(SCALES) for name in self._where if name.endswith(SCALES))

    def reader(self, name: str, shape: tuple[int, ...]) -> Callable[[Box], torch.Tensor]:
        """A function that reads a box of one tensor; one in block FP8 or MXFP4 becomes float32.

        Raises CheckpointError for a missing tensor, another shape, another quantization, and missing or wrong scales.
        """
        if self._storage == mxfp4.MXFP4 and name + mxfp4.BLOCKS in self._where:
            return self._mxfp4_reader(name, shape)
        if name not in self._where:
            raise CheckpointError(f"{self.path} has no tensor {name!r}, which its config.json requires")
        tensor = self._slice(name)
        stored, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if stored != shape:
            raise CheckpointError(
                f"{name!r} in {self.path} has shape {list(stored)}, but its config.json requires {list(shape)}"
            )
        if dtype in PLAIN_DTYPES:
            return partial(part_of, tensor)
        if dtype != VALUES or not isinstance(self._storage, Block) or len(shape) != 2:
            raise CheckpointError(
                f"{name!r} in {self.path} is stored as {dtype}, which its config.json does not explain; give a folder "
                f"whose matrices are unquantized or in block FP8 (quantization_config.weight_block_size)"
            )
        block, scales = self._storage, self._scales(name, shape, self._storage)

        def read(box: Box) -> torch.Tensor:
            return dequantize(part_of(tensor, box), part_of(scales, block.covering(box)), box, block)

        return read

    def _mxfp4_reader(self, name: str, shape: tuple[int, ...]) -> Callable[[Box], torch.Tensor]:
        if name + mxfp4.SCALES not in self._where:
            raise CheckpointError(
                f"{self.path} has {name!r} in MXFP4 without its scales {name + mxfp4.SCALES!r}; copy the model again"
            )
        stored = [self._slice(name + ending) for ending in (mxfp4.BLOCKS, mxfp4.SCALES)]
        for ending, tensor, wanted in zip(
            (mxfp4.BLOCKS, mxfp4.SCALES), stored, mxfp4.stored_shapes(shape), strict=True
        ):
            actual, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if (actual, dtype) != (wanted, mxfp4.BYTES):
                raise CheckpointError(
                    f"{name + ending!r} in {self.path} has shape {list(actual)} and dtype {dtype}, but its config.json "
                    f"requires {list(wanted)} and {mxfp4.BYTES}"
                )
        return partial(mxfp4.read_box, *stored, shape[1])

    def _slice(self, name: str) -> Any:
        try:
            return self._open(self._where[name]).get_slice(name)
        except SafetensorError as error:
            raise _unlisted(self.path / self._where[name], name) from error

    def _scales(self, name: str, shape: tuple[int, ...], block: Block) -> Any:
        if (scales := name + SCALES) not in self._where:
            raise CheckpointError(
                f"{self.path} has {name!r} in FP8 without its scales {scales!r}; copy the model again"
            )
        tensor = self._slice(scales)
        stored, dtype, grid = tensor.get_shape(), tensor.get_dtype(), block.grid(shape)
        if tuple(stored) != grid:
            raise CheckpointError(
                f"{scales!r} in {self.path} has shape {stored}, but {name!r} of shape {list(shape)} has {list(grid)} "
                f"blocks of quantization_config.weight_block_size={list(block)}; correct it in config.json"
            )
        if dtype not in SCALE_DTYPES:
            raise CheckpointError(f"{scales!r} in {self.path} is stored as {dtype}, not as {' or '.join(SCALE_DTYPES)}")
        return tensor

    def as_stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A whole tensor, in the dtype of its file. Raises as `reader`."""
        self.reader(name, shape)
        return self._slice(name)[:]

    def reading(self, shapes: Mapping[str, tuple[int, ...]], absent: Tensors | None = None) -> Read:
        """Reads boxes of all tensors of these shapes, missing ones from ``absent``.

        First use raises as `reader`, each use CheckpointError for NaN or infinity in the box.
        """
        absent = {name: tensor for name, tensor in (absent or {}).items() if name not in self._where}
        readers: dict[str, Callable[[Box], torch.Tensor]]
        readers = {name: partial(box_of, tensor) for name, tensor in absent.items()}

        def read(name: str, box: Box) -> torch.Tensor:
            if name not in readers:
                readers[name] = self.reader(name, shapes[name])
            part = readers[name](box)
            # They propagate NaN, and cost a tenth of the copy that follows.
            if not all(extreme.isfinite() for extreme in part.aminmax()):
                file = self._where.get(name) or self._where.get(name + mxfp4.BLOCKS, "")
                raise CheckpointError(
                    f"{name!r} in {self.path / file} holds NaN or infinity, with which every log-prob is NaN; copy the "
                    f"model again, or choose another one"
                )
            return part

        return read


def _unlisted(file: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{file} has no tensor {name!r}, although {INDEX} lists it")


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, according to an index. Raises CheckpointError for one that names no files beside it."""
    where = cast("dict[str, Any] | None", read_json(path).get("weight_map"))
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{path} has no weight_map, which names the file of each tensor; copy the model again")
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path} names {file!r} for {name!r}, which is no file beside it; copy the model again"
            )
    return where


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the safetensors files of a folder, whatever they are for, from their headers.

    Raises CheckpointError for a damaged file, and for an index that disagrees with the files.
    """
    index = folder / INDEX
    where = read_index(index) if index.is_file() else None
    stored: dict[str, tuple[int, ...]] = {}
    with TensorFiles(folder) as files:
        files.index = INDEX
        for file in sorted(set(where.values()) if where else (path.name for path in folder.glob("*.safetensors"))):
            shapes = files.shapes(file).items()
            stored |= {name: shape for name, shape in shapes if where is None or where.get(name) == file}
    if where and (missing := next((name for name in where if name not in stored), None)):
        raise _unlisted(folder / where[missing], missing)
    return stored


def served_in_fp8(layout: Layout, folder: Path) -> QuantizedLayout:
    """The layout of the weights as servers of a folder in block FP8 keep them.

    Raises ConfigError for a folder that is not in block FP8, and for tensors that cannot be quantized apart.
    """
    config = read_json(folder / "config.json")
    block = storage_of(config)
    if not isinstance(block, Block):
        raise ConfigError(f"rollout.fp8=true needs a folder in block FP8, and model.path={str(folder)!r} is not")
    power_of_two = config["quantization_config"].get("scale_fmt") == "ue8m0"
    with HfFolder(folder) as files:
        quantized = QuantizedLayout(layout, block, files.in_fp8() & layout.hf_tensors.keys(), power_of_two)
    for pp in range(layout.topology.pipeline):
        quantized.placed(pp)
    return quantized


def load_shards(
    hf_dir: str | Path,
    layout: Layout,
    rank: int,
    dtype: torch.dtype = torch.float32,
    absent: Tensors | None = None,
    names: Container[str] | None = None,
) -> dict[str, torch.Tensor]:
    """A global rank's parameters from a Hugging Face folder, as CPU tensors with their local shapes; all or ``names``.

    They have ``dtype``, except those with a dtype of their own (`Placed.dtype`). ``absent`` replaces tensors that the
    folder may lack. Raises CheckpointError for a missing file, a missing tensor or a wrong shape, by name.
    """
    with HfFolder(hf_dir) as folder:
        return fill_params(layout, rank, folder.reading(layout.hf_tensors, absent), dtype, names)


def fill_params(
    layout: Layout, rank: int, read: Read, dtype: torch.dtype, names: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """A global rank's parameters, as CPU tensors of their local shapes; ``dtype``, ``names`` as in `load_shards`."""
    pieces, dtypes = pieces_by_param(layout, rank), dtypes_of(layout, rank, dtype)
    return {
        name: fill_param(shape, pieces[name], read, dtypes[name])
        for name, shape in layout.params(rank).items()
        if names is None or name in names
    }


def dtypes_of(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each parameter of a rank: ``dtype``, or one of its own."""
    return {item.param: getattr(torch, item.dtype) if item.dtype else dtype for item in layout.of_rank(rank)}


def pieces_by_param(layout: Layout, rank: int) -> Mapping[str, list[Piece]]:
    """The rectangles of a global rank by parameter; none for one that is only vocabulary padding."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in layout.pieces(rank):
        pieces[piece.param].append(piece)
    return pieces


def fill_param(shape: tuple[int, ...], pieces: Iterable[Piece], read: Read, dtype: torch.dtype) -> torch.Tensor:
    """A local parameter assembled from its rectangles, on the CPU."""
    param = torch.empty(shape, dtype=dtype)
    filled = 0
    for piece in pieces:
        target = piece_of(param, piece)
        target.copy_(read(piece.hf_name, piece.hf_box))
        filled += target.numel()
    if filled < param.numel():
        # Only vocabularies are padded: with whole rows at the end.
        param[filled // param[0].numel() :] = 0
    return param


def fill_rows(
    shape: tuple[int, ...], pieces: Iterable[Piece], rows: range, read: Read, dtype: torch.dtype
) -> torch.Tensor:
    """Reads some rows of a local parameter and nothing else; see `fill_param`."""
    straight = Box(rows.start, len(rows), 0, (*shape, 1)[1])
    inside: list[Piece] = []
    for piece in pieces:
        window = straight.transposed() if piece.turned else straight
        if common := intersect(piece.param_box, window):
            hf_box, param_box = moved(common, piece.param_box, piece.hf_box), moved(common, window, CORNER)
            inside.append(piece._replace(hf_box=hf_box, param_box=param_box))
    return fill_param((len(rows), *shape[1:]), inside, read, dtype)


# Where rows and columns begin to count.
CORNER = Box(0, 0, 0, 0)


def moved(box: Box, origin: Box, target: Box) -> Box:
    """A box inside ``origin``, at the same place of ``target``."""
    return box._replace(row=box.row - origin.row + target.row, col=box.col - origin.col + target.col)


def reading_parts(layout: Layout, read: ReadPart) -> Read:
    """Reads boxes of Hugging Face tensors from parameters of ranks, each from the first rank that holds it."""
    # One replica holds everything, and the first ranks are those of the first one.
    one = layout.with_replicas(1)

    def read_piece(piece: Piece, rank: int, common: Box) -> torch.Tensor:
        place = moved(common, piece.hf_box, piece.param_box)
        if not piece.turned:
            return read(rank, piece.param, place)
        return _turned(read(rank, piece.param, place.transposed()))

    def read_box(name: str, box: Box) -> torch.Tensor:
        parts = [
            (common, read_piece(piece, layout.topology.rank_of([0], ranks[0]), common))
            for piece, ranks in one.holders[name]
            if (common := intersect(piece.hf_box, box))
        ]
        if len(parts) == 1:
            return parts[0][1]
        first = parts[0][1]
        joined = first.new_empty((box.rows, box.cols)[: first.dim()])
        for common, part in parts:
            box_of(joined, moved(common, box, CORNER)).copy_(part)
        return joined

    return read_box


def assemble(hf_name: str, layout: Layout, read: ReadParam) -> torch.Tensor:
    """One Hugging Face tensor from the shards of the first rank that holds each piece."""
    holders = layout.holders[hf_name]
    tensor = torch.empty(layout.hf_tensors[hf_name], dtype=read(holders[0].ranks[0], holders[0].piece.param).dtype)
    for piece, ranks in holders:
        box_of(tensor, piece.hf_box).copy_(piece_of(read(ranks[0], piece.param), piece))
    return tensor


# Sharded checkpoints


def shard_file(rank: int) -> str:
    """Name of a global rank's model file in a checkpoint: the parameters of which the rank is the first holder."""
    return f"model-{rank:05d}.safetensors"


def save_written(checkpoint_dir: str | Path, layout: Layout, rank: int, params: Mapping[str, torch.Tensor]) -> None:
    """Writes the parameters of which a rank is the first holder, if there are any, and syncs them to disk."""
    written = {
        name: params[name].detach().cpu().contiguous()
        for name, writer in layout.writers(rank).items()
        if writer == rank
    }
    if written:
        file = Path(checkpoint_dir) / shard_file(rank)
        save_file(written, file)
        fsync(file)


class ShardFiles(TensorFiles):
    """The model files of a checkpoint. Methods raise CheckpointError for what is missing or damaged."""

    index = LAYOUT

    def read(self, rank: int, param: str) -> torch.Tensor:
        """A parameter that a global rank wrote."""
        return self._of_rank(rank, param)[:]

    def part(self, rank: int, param: str, box: Box) -> torch.Tensor:
        """A box of a parameter that a global rank wrote."""
        return part_of(self._of_rank(rank, param), box)

    def _of_rank(self, rank: int, param: str) -> Any:
        file = shard_file(rank)
        try:
            return self._open(file).get_slice(param)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / file} has no parameter {param!r}") from error


def describe(layout: Layout, dtype: str) -> dict[str, Any]:
    """The description by which `read_layout` recognises a checkpoint's shards; stored in its layout.json."""
    return {
        "topology": asdict(layout.topology),
        "spec": layout.spec,
        "dtype": dtype,
        "hf_config": layout.hf_config,
        "value_head": layout.value_head,
        "adapter": asdict(layout.shape) if isinstance(layout, AdapterLayout) else None,
    }


def layout_of(described: Mapping[str, Any]) -> tuple[Layout, str]:
    """The layout and the dtype name that `describe` was given."""
    topology, value_head = Topology(**described["topology"]), described.get("value_head", False)
    layout = Layout(described["hf_config"], topology, described["spec"], value_head)
    if shape := described.get("adapter"):
        layout = AdapterLayout(layout, AdapterShape(shape["rank"], shape["scale"], tuple(shape["targets"])))
    return layout, described["dtype"]


def read_layout(checkpoint_dir: str | Path) -> tuple[Layout, str]:
    """The layout and the dtype name of a checkpoint. Raises CheckpointError for a missing or incomplete layout.json."""
    path = Path(checkpoint_dir) / LAYOUT
    if not path.is_file():
        raise CheckpointError(f"{checkpoint_dir} is not a megasync checkpoint: it has no {LAYOUT}")
    try:
        return layout_of(read_json(path))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def export_checkpoint(
    checkpoint_dir: str | Path, hf_source_dir: str | Path, out_dir: str | Path, replace: bool = False
) -> None:
    """Writes a checkpoint as a Hugging Face folder: safetensors, config and tokenizer files. One of adapters becomes a
    PEFT folder.

    The folder gets its name only when it is complete. A tied head is omitted, as Hugging Face does. Tensors and
    config.json have the checkpoint's dtype. With ``replace`` an earlier export gives way once the new one is complete.
    Raises CheckpointError for an incomplete checkpoint, a non-empty output folder without ``replace``, or a failed
    write.
    """
    source, out = Path(hf_source_dir), Path(out_dir)
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json to export with")
    layout, dtype = read_layout(checkpoint_dir)
    with ShardFiles(checkpoint_dir) as files:
        write_folder(source, out, layout, dtype, files.read, replace)
    log.info("Exported %s to %s", checkpoint_dir, out)


def check_vacant(out: Path) -> None:
    """Raises CheckpointError for an output folder that exists, unless it is empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; choose another output folder")


def write_folder(source: Path, out: Path, layout: Layout, dtype: str, read: ReadParam, replace: bool = False) -> None:
    """Writes the parameters of a layout's ranks as a Hugging Face folder; the other files are those of ``source``.

    Raises CheckpointError for a non-empty output folder without ``replace``, or a failed write.
    """
    if not replace:
        check_vacant(out)
    failed = raised_as(CheckpointError, f"export to {out} failed", of=(OSError, SafetensorError))
    with failed, new_folder(out, replace) as draft:
        if isinstance(layout, AdapterLayout):
            config = adapter_config(layout.shape, str(source.resolve()))
            atomic_write(draft / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
        else:
            write_companions(source, draft, dtype, layout)
        _write_weights(source, draft, layout, read, dtype)


def _write_weights(source: Path, out: Path, layout: Layout, read: ReadParam, dtype: str) -> None:
    """Writes the tensors in the layout's order, as one file or as numbered files with an index.

    Tensors of a vision tower follow, as ``source`` has them.
    """
    dtypes = {name: getattr(torch, layout.hf_dtype(name, dtype)) for name in layout.hf_tensors}
    nbytes = {name: prod(shape) * dtypes[name].itemsize for name, shape in layout.hf_tensors.items()}
    frozen: dict[str, torch.Tensor] = {}
    if layout.frozen_tensors:
        with HfFolder(source) as folder:
            frozen = {name: folder.as_stored(name, shape) for name, shape in layout.frozen_tensors.items()}
    nbytes |= {name: tensor.nbytes for name, tensor in frozen.items()}
    parts = list(split_by_bytes(nbytes.items(), MAX_FILE_BYTES))
    if isinstance(layout, AdapterLayout):
        parts, names = [[*layout.hf_tensors]], [ADAPTER_WEIGHTS]
    else:
        names = [WEIGHTS] if len(parts) == 1 else [part_name(i, len(parts)) for i in range(len(parts))]
    for file, part in zip(names, parts, strict=True):
        tensors = {
            name: frozen[name] if name in frozen else assemble(name, layout, read).to(dtypes[name]) for name in part
        }
        save_file(tensors, out / file, metadata={"format": "pt"})
    if len(parts) > 1:
        where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        atomic_write(out / INDEX, index_text(where, sum(nbytes.values())))


def index_text(where: Mapping[str, str], nbytes: int) -> str:
    """The JSON of an index: tensor name -> file name, and the bytes of all tensors."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(where)}, indent=2)


def part_name(index: int, count: int) -> str:
    """Name of the ``index``-th (from 0) of ``count`` weight files."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_companions(source: Path, out: Path, dtype: str, layout: Layout) -> None:
    """Writes what a Hugging Face folder has besides weights: the tokenizer, and the config.json for ``dtype``.

    The config.json also gets what its family, and a value model, require of every export. It states the quantization of
    a quantized layout, and no other.
    """
    config = read_json(source / "config.json")
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    config |= family_of(config).exported
    config |= value_model_options(config) if layout.value_head else {}
    if isinstance(layout, QuantizedLayout):
        config["quantization_config"] = layout.stated
    config["dtype"] = dtype
    if "torch_dtype" in config:
        config["torch_dtype"] = dtype
    atomic_write(out / "config.json", json.dumps(config, indent=2) + "\n")
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, out / path.name)
