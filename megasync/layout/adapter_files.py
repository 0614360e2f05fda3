"""Adapters in PEFT's folders, and the change that they make to a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot

from megasync.errors import CheckpointError, ConfigError, raised_as
from megasync.layout.adapter import AdapterLayout, check_adapter_config, check_served_beside
from megasync.layout.shards import ADAPTER_CONFIG, HfFolder, fill_params, read_json


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
