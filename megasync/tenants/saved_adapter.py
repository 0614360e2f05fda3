"""The adapters of a model of a tenant in a PEFT folder, with Adam's moments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]  # PathLike without its type

from megasync.base.files import new_folder
from megasync.errors import CheckpointError, DataError, raised_as
from megasync.layout.adapter import OPTIMIZER, AdapterLayout, AdapterShape, adapter_config
from megasync.layout.layout import Box, intersect
from megasync.layout.shards import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CORNER,
    HfFolder,
    Read,
    box_of,
    moved,
    part_of,
    read_json,
)


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
