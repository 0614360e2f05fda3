"""Reads the model folder of a reward or auxiliary model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasync.base.files import read_object
from megasync.config.schema import FrozenModelConfig
from megasync.errors import ConfigError, raised_as
from megasync.layout.model_files import check_values


def read_frozen_model(key: str, model: FrozenModelConfig) -> dict[str, Any]:
    """The config.json of the model's folder. Raises ConfigError when it cannot be read."""
    with raised_as(ConfigError, f"{key}.path={model.path!r} has no readable config.json", of=ValueError):
        values = read_object(Path(model.path).expanduser() / "config.json")
    with raised_as(ConfigError, f"{key}.path={model.path!r}", of=ConfigError):
        check_values(values)
    return values
