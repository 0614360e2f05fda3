"""Adapters in PEFT's folders, and merged into the weights of their model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]  # PathLike without its type
from torch.nn.functional import one_hot

from megasync.base.files import new_folder
from megasync.errors import CheckpointError, ConfigError, DataError, raised_as
from megasync.layout.adapter import (
    OPTIMIZER,
    UNEMBED,
    AdapterLayout,
    AdapterShape,
    adapter_config,
    check_adapter_config,
    check_served_beside,
)
from megasync.layout.layout import Box, Layout, Piece, intersect
from megasync.layout.shards import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CORNER,
    HfFolder,
    Read,
    ReadParam,
    ReadPart,
    ShardFiles,
    box_of,
    export_checkpoint,
    fill_param,
    fill_params,
    moved,
    part_of,
    pieces_by_param,
    read_json,
    read_layout,
    reading_parts,
    write_folder,
)
from megasync.layout.topology import Topology


def spread(up: torch.Tensor, sources: torch.Tensor, count: int) -> torch.Tensor:
    """``up`` [rows, rank] as [rows, count * rank]: each row at the factors of its own tensor, ``sources`` [rows], and
    zero at those of the other ``count`` - 1.
    """
    if count == 1:
        return up
    return (one_hot(sources, count).to(up.dtype)[:, :, None] * up[:, None, :]).flatten(1)


def low_rank_product(downs: Sequence[torch.Tensor], up: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """The change that an adapter of scale 1 makes to a parameter, [rows, columns]; see `spread`."""
    return spread(up, sources, len(downs)) @ torch.cat([*downs])


def check_adapter_folder(path: str | Path, layout: AdapterLayout) -> None:
    """Raises ConfigError unless ``path`` is a PEFT folder of adapters of this shape; reads only headers of weights."""
    key = "trainer.lora.path"
    check_adapter_config(_adapter_config(key, path), layout.shape, f"{key}={str(path)!r}")
    _check_factors(key, path, layout.hf_tensors)


def check_served_folder(key: str, path: str | Path, served: AdapterLayout) -> None:
    """Raises ConfigError unless servers of the adapters ``served`` can serve those of ``path``, which ``key`` names."""
    config = _adapter_config(key, path)
    rank, targets = check_served_beside(config, served.shape, f"{key}={str(path)!r}")
    _check_factors(key, path, served.factors_of(rank, targets))


def _check_factors(key: str, path: str | Path, factors: Mapping[str, tuple[int, ...]]) -> None:
    refused = raised_as(ConfigError, key, "copy the adapter again", of=CheckpointError)
    with refused, HfFolder(Path(path).expanduser()) as folder:
        folder.check(factors)


def _adapter_config(key: str, path: str | Path) -> dict[str, Any]:
    config = Path(path).expanduser() / ADAPTER_CONFIG
    if not config.is_file():
        raise ConfigError(f"{key}={str(path)!r} is not a PEFT folder: it has no {ADAPTER_CONFIG}")
    with raised_as(ConfigError, f"{key}={str(path)!r}", of=CheckpointError):
        return read_json(config)


def read_adapter(path: str | Path, layout: AdapterLayout, rank: int) -> dict[str, torch.Tensor]:
    """A global rank's adapters from a PEFT folder, float32.

    Raises CheckpointError for a file or tensor that is missing, and ConfigError for an adapter of another shape.
    """
    check_adapter_folder(path, layout)
    with HfFolder(path) as folder:
        return fill_params(layout, rank, folder.reading(layout.hf_tensors), torch.float32)


def padded(read: Read, shapes: Mapping[str, tuple[int, ...]]) -> Read:
    """Reads factors of these shapes as if they were of a larger rank, or more of them: the rest is zero, float32."""

    def read_box(name: str, box: Box) -> torch.Tensor:
        values = torch.zeros(box.rows, box.cols)
        rows, columns = shapes.get(name, (0, 0))
        if inside := intersect(box, Box(0, rows, 0, columns)):
            box_of(values, moved(inside, box, CORNER)).copy_(read(name, inside))
        return values

    return read_box


class AdapterFiles(HfFolder):
    """A folder of a `SavedAdapter`: the factors of ``adapters``, and Adam's moments if it has any.

    Raises CheckpointError for adapters of another shape, and for what is missing or damaged.
    """

    def __init__(self, path: str | Path, adapters: AdapterLayout) -> None:
        super().__init__(path)
        self._shapes = adapters.hf_tensors
        config, expected = read_json(self.path / ADAPTER_CONFIG), adapter_config(adapters.shape, "")
        for name in ("r", "lora_alpha", "target_modules"):
            if config.get(name) != expected[name]:
                raise CheckpointError(f"{path} has adapters with {name}={config.get(name)!r}, not {expected[name]!r}")
        self.check(self._shapes)

    def factors(self) -> Read:
        """Reads boxes of factors."""
        return self.reading(self._shapes)

    def updates(self) -> int:
        """The number of optimizer steps that the moments are of."""
        return int(self._open(OPTIMIZER).metadata()["updates"])

    def moments(self, kind: str) -> Read:
        """Reads boxes of the moments of factors."""
        file = self._open(OPTIMIZER)
        return lambda name, box: part_of(file.get_slice(f"{kind}/{name}"), box)


@dataclass(frozen=True)
class SavedAdapter:
    """Adapters, and perhaps Adam's moments by kind and factor, as they go into a PEFT folder. Tensors are in numpy."""

    shape: AdapterShape
    # Of the model that they adapt.
    model_path: str
    factors: Mapping[str, NDArray[np.float32]]
    # With the number of optimizer steps that they are of.
    moments: Mapping[str, Mapping[str, NDArray[np.float32]]] | None = None
    updates: int = 0

    def write(self, folder: Path) -> None:
        """Writes the folder durably, or not at all; an earlier one gives way. Raises OSError, also for a full disk.

        Raises DataError for weights that are not finite, with which nothing could be computed anymore.
        """
        for name, values in self.factors.items():
            if not np.isfinite(values).all():
                raise DataError(
                    f"{name} would have values that are not finite; lower the learning rate or weight decay"
                )
        with new_folder(folder, replace=True) as draft:
            config = adapter_config(self.shape, str(Path(self.model_path).resolve()))
            (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            with raised_as(OSError, f"{folder} cannot be written", of=SafetensorError):
                save_file(dict(self.factors), draft / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                if self.moments is not None:
                    tensors = {f"{kind}/{name}": each for kind, of in self.moments.items() for name, each in of.items()}
                    save_file(tensors, draft / OPTIMIZER, metadata={"updates": str(self.updates)})


def export_model(checkpoint_dir: str | Path, source: str | Path, out: str | Path) -> None:
    """Writes a checkpoint as a Hugging Face folder of a whole model: adapters are merged into the one in ``source``.

    Raises CheckpointError as `shards.export_checkpoint` does.
    """
    layout, dtype = read_layout(checkpoint_dir)
    if not isinstance(layout, AdapterLayout):
        export_checkpoint(checkpoint_dir, source, out)
        return
    with ShardFiles(checkpoint_dir) as files, HfFolder(source) as folder:
        merged, read = merging(folder, layout, files.part)
        write_folder(Path(source), Path(out), merged, dtype, read)


def merging(folder: HfFolder, layout: AdapterLayout, part: ReadPart) -> tuple[Layout, ReadParam]:
    """A layout of one rank for the model in ``folder``, and a function that reads its merged parameters, float32.

    ``part`` reads boxes of the adapters of ``layout``.
    """
    one = AdapterLayout(Layout(layout.hf_config, Topology()), layout.shape)
    if one.base.tied and UNEMBED in layout.shape.targets:
        raise CheckpointError(
            f"adapters of {UNEMBED} cannot be merged into a model whose output layer is its embedding; export them as "
            f"a PEFT folder"
        )
    adapted = {each.item.param: each for each in one.adapted(0)}
    weights = folder.reading(one.base.hf_tensors), pieces_by_param(one.base, 0), one.base.params(0)
    factors = reading_parts(layout, part), pieces_by_param(one, 0), one.params(0)

    def read(rank: int, param: str) -> torch.Tensor:
        weight = _whole(param, *weights)
        if each := adapted.get(param):
            sources = torch.tensor(one.sources(each.item, rank))
            downs = [_whole(down, *factors) for down in each.downs]
            weight.add_(low_rank_product(downs, _whole(each.up, *factors), sources), alpha=layout.shape.scale)
        return weight

    return one.base, read


def _whole(
    param: str, read: Read, pieces: Mapping[str, list[Piece]], shapes: Mapping[str, tuple[int, ...]]
) -> torch.Tensor:
    return fill_param(shapes[param], pieces[param], read, torch.float32)
