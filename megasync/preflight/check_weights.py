"""Refuses model folders whose weights are damaged or not those of their config.json; a part of `check`.

Only the headers of safetensors files are read, so a folder of a thousand files takes seconds. Values are not looked at.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from megasync.errors import CheckpointError, ConfigError
from megasync.layout.families import FAMILIES, language_model
from megasync.layout.families.rules import HEAD
from megasync.layout.layout import Layout
from megasync.layout.shards import HfFolder, stored_shapes
from megasync.layout.storage import storage_of
from megasync.layout.topology import Topology


def check_weights(folder: Path, layout: Layout, absent: Container[str] = ()) -> None:
    """Raises ConfigError unless the folder has every tensor of the layout, in its shape and a dtype that can be read.

    Those of ``absent`` may be missing. A folder without any weights, as a plan may have it, passes.
    """
    if not any(folder.glob("*.safetensors*")):
        return
    try:
        with HfFolder(folder) as files:
            files.check({**layout.hf_tensors, **layout.frozen_tensors}, absent)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def check_frozen_weights(key: str, folder: Path, values: Mapping[str, Any], *, generates: bool) -> int:
    """Raises ConfigError unless the files of a frozen model can be read, and hold the tensors that servers look for.

    The tensors are known for the families that megasync trains, if the folder is not quantized; ``values`` are its
    config.json. A model that does not generate has another head. Returns the number of tensors.
    """
    try:
        stored = stored_shapes(folder)
        for name, shape in _expected(values, generates).items():
            if (found := stored.get(name)) is None:
                raise CheckpointError(f"{folder} has no tensor {name!r}, which its config.json requires")
            if found != shape:
                raise CheckpointError(
                    f"{name!r} in {folder} has shape {list(found)}, but its config.json requires {list(shape)}"
                )
    except CheckpointError as error:
        raise ConfigError(f"{key}.path: {error}; copy the model again") from None
    return len(stored)


def _expected(values: Mapping[str, Any], generates: bool) -> dict[str, tuple[int, ...]]:
    if values.get("model_type") not in FAMILIES:
        return {}
    try:
        if storage_of(values) is not None:
            return {}
        shapes = Layout(language_model(values), Topology()).hf_tensors
    except ConfigError:
        # A quantization, or an option of the model, that servers may know although the trainer does not.
        return {}
    heads = {tensor.name for tensor in HEAD.tensors}
    return {name: shape for name, shape in shapes.items() if generates or name not in heads}
